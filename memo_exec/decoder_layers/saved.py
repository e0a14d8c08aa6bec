"""What autograd holds for the tensors that a layer saves: kept, swapped, or a place that recompute fills."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from memo_exec.decoder_layers.bytes_report import LayerBytes
from memo_exec.decoder_layers.layer_swap import CountedSwap, LayerBlocks, LayerSwap
from memo_exec.decoder_layers.policy import Fate
from memo_exec.offload.block import Block, Original
from memo_exec.offload.version import Kept, Version
from memo_exec.offload.view import View

MIN_SWAPPED_BYTES = 1024
"""Smaller tensors stay on the device, as with ``offload_activations``."""

Packed = object
"""Kept, Swapped, or what recompute and attention put in place of a tensor."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """The object that autograd holds instead of a swapped tensor."""

    layer: LayerBlocks
    block: Block
    version: Version
    inside: View
    """Geometry of the tensor in the block's bytes."""


@dataclass(frozen=True, slots=True)
class _Copied:
    """A swapped block; ``packed``: the view with gaps whose elements it has, None where it has a range of bytes."""

    block: Block
    packed: View | None

    def holds(self, view: View, original: Original) -> bool:
        """Return whether a view's elements are among the bytes, unchanged since they were copied."""
        if not self.block.serves(view, original):
            return False
        first = self.block.first
        inside = first <= view.first_bytes and view.end_bytes <= first + self.block.host.memory.numel()
        return view == self.packed if self.packed is not None else inside

    def geometry(self, view: View) -> View:
        """Return the geometry of a view in the block's bytes."""
        return view.packed() if self.packed is not None else view.after(self.block.first)


class SavedTensors:
    """Packs and unpacks the saved tensors of one layer's forward pass, and counts their bytes.

    ``shared``: tensors that other layers also use (masks, rotary tables); like parameters, they stay and do not count.
    """

    def __init__(
        self, swap: LayerSwap | CountedSwap, layer: LayerBlocks, module: nn.Module, shared: Iterable[Tensor]
    ) -> None:
        self._swap = swap
        self._layer = layer
        parameters = [*module.parameters(), *module.buffers()]
        self._held = {key for tensor in (*parameters, *shared) if (key := _storage_key(tensor)) is not None}
        self._parameters = {id(parameter) for parameter in parameters}
        self._shapes = {tuple(shape) for p in parameters for shape in (p.shape, p.shape[::-1])}
        self._copied: dict[int, list[_Copied]] = {}
        self._counted: dict[int, StorageWeakRef] = {}
        self._kept: set[int] = set()
        self.bytes = LayerBytes(layer=-1)

    def end_forward(self) -> None:
        """Forget what was only needed to see that two saved tensors share bytes."""
        self._copied.clear()
        self._kept.clear()
        self._counted.clear()

    def is_held(self, tensor: Tensor) -> bool:
        """Return whether a tensor stays on the device whatever happens to the layer: a parameter, or shared."""
        root = tensor if tensor._base is None else tensor._base
        return isinstance(root, nn.Parameter | nn.Buffer) or _storage_key(tensor) in self._held

    def pack(self, fate: Fate) -> Callable[[Tensor], Packed]:
        """Return the hook that keeps or swaps."""
        return self.swapped if fate is Fate.SWAP else self.kept

    def kept(self, tensor: Tensor) -> Kept:
        """Keep a tensor on the device."""
        if not self.is_held(tensor) and (key := _storage_key(tensor)) is not None:
            self.bytes.kept_bytes += self._storage_bytes(tensor)
            self._kept.add(key)
        return Kept(tensor)

    def swapped(self, tensor: Tensor) -> Packed:
        """Swap a tensor to the host, once for all views of the same bytes."""
        key = _storage_key(tensor)
        swappable = type(tensor) is Tensor and tensor.nbytes >= MIN_SWAPPED_BYTES and key not in self._kept
        if key is None or not swappable or self.is_held(tensor) or self._is_of_parameters(tensor):
            return self.kept(tensor)
        view, original = View.of(tensor), Original(tensor)
        copied = next((each for each in self._copied.get(key, []) if each.holds(view, original)), None)
        if copied is None:
            block = self._swap.add(self._layer, original, tensor.untyped_storage(), view)
            copied = _Copied(block, None if view.gapless else view)
            self._copied.setdefault(key, []).append(copied)
            self._counted[key] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self.bytes.swapped_bytes += block.host.memory.numel()
        return Swapped(self._layer, copied.block, original.version, copied.geometry(view))

    def count_recomputed(self, tensor: Tensor) -> None:
        """Count a tensor that recompute makes again, unless its bytes are held or swapped anyway."""
        if not self.is_held(tensor):
            self.bytes.recomputed_bytes += self._storage_bytes(tensor)

    def unpack(self, packed: Packed) -> Tensor:
        """Return a tensor that was kept or swapped."""
        assert isinstance(packed, Kept | Swapped)
        if isinstance(packed, Kept):
            return packed.tensor()
        packed.version.check()
        restored = self._swap.restored(packed.layer, packed.block)
        return packed.inside.over(restored.untyped_storage())

    def _storage_bytes(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor's storage, the first time that it is asked."""
        key = _storage_key(tensor)
        if key is None or key in self._counted:
            return 0
        storage = tensor.untyped_storage()
        self._counted[key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return storage.nbytes()

    def _is_of_parameters(self, tensor: Tensor) -> bool:
        """Return whether a tensor is made from parameters alone, as autocast's copies of weights are."""
        if tensor.grad_fn is None:
            return not tensor.requires_grad and tuple(tensor.shape) in self._shapes
        node: torch.autograd.graph.Node | None = tensor.grad_fn
        while node is not None:
            if (variable := getattr(node, "variable", None)) is not None:
                return id(variable) in self._parameters
            inputs = [each for each, _ in node.next_functions if each is not None]
            node = inputs[0] if len(inputs) == 1 else None
        return False


def _storage_key(tensor: Tensor) -> int | None:
    """Return an identifier of a plain tensor's storage; None for other tensors (``DTensor``, sparse)."""
    local = getattr(tensor, "_local_tensor", tensor)
    if type(local) not in (Tensor, nn.Parameter, nn.Buffer) or local.layout is not torch.strided:
        return None
    key: int = local.untyped_storage()._cdata
    return key
