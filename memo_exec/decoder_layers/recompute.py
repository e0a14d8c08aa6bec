"""Recompute of one row block: its forward runs again when backward first needs one of its tensors.

Attention does not run again. The block's rows of the attention output take its place, and its rows of q, k and v are
handed to attention's backward. As in torch's checkpoint, saved tensors are matched by their order, and the forward
stops at the last one, so the MLP's last product does not run again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memo_exec.decoder_layers.attention_calls import AttentionCall, handled_by
from memo_exec.decoder_layers.saved import Packed, SavedTensors

NAMES = ("q", "k", "v")
Kind = tuple[torch.Size, torch.dtype, torch.device]


class AutocastState:
    """The autocast of a forward, for its recompute."""

    def __init__(self, device: str) -> None:
        self._of = [
            (
                kind,
                torch.is_autocast_enabled(kind),
                torch.get_autocast_dtype(kind),
                torch.is_autocast_cache_enabled(),
            )
            for kind in dict.fromkeys((device, "cpu"))
            if kind != "meta"
        ]

    def enter(self, stack: ExitStack) -> None:
        """Enter the same autocast."""
        for kind, enabled, dtype, cache in self._of:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))


@dataclass(frozen=True, slots=True)
class Place:
    """The object that autograd holds for a tensor that recompute makes again."""

    recompute: BlockRecompute
    number: int


class _AllThereError(Exception):
    """Raised inside the recomputed forward when its last saved tensor is there."""


class BlockRecompute:
    """The recompute of one row block.

    ``forward`` runs the block on given input rows. ``inputs`` returns the rows of the layer's input and of attention's
    output, back on the device. Both require gradients where the first forward's did.
    """

    def __init__(
        self, forward: Callable[[Tensor], Any], inputs: Callable[[], tuple[Tensor, Tensor]], saved: SavedTensors
    ) -> None:
        self._forward = forward
        self._inputs = inputs
        self._saved = saved
        self._kinds: list[Kind] = []
        self._tensors: dict[int, Tensor] = {}
        self._next = 0
        self.wanted_parts: set[str] = set()
        """Which of q, k and v attention's backward reads."""
        self._parts: dict[str, Tensor] = {}
        self.autocast: AutocastState | None = None

    def pack(self, tensor: Tensor) -> Packed:
        """Hook of the first forward: keep parameters, and a place for everything else."""
        if self._saved.is_held(tensor):
            return self._saved.kept(tensor)
        self._saved.count_recomputed(tensor)
        self._kinds.append(_kind(tensor))
        return Place(self, len(self._kinds) - 1)

    def unpack(self, place: Place) -> Tensor:
        """Return a saved tensor; the first one runs the forward again."""
        if place.number not in self._tensors:
            self._run()
        return self._tensors.pop(place.number)

    def part(self, name: str) -> Tensor:
        """Return the block's rows of q, k or v."""
        if name not in self._parts:
            self._run()
        return self._parts.pop(name)

    def _run(self) -> None:
        x, attended = self._inputs()
        self._tensors.clear()
        self._parts.clear()
        self._next = 0

        def attention(call: AttentionCall) -> Tensor:
            for name, tensor in zip(NAMES, (call.q, call.k, call.v), strict=True):
                if name in self.wanted_parts:
                    self._parts[name] = tensor.detach()
            if self._next == len(self._kinds):
                raise _AllThereError
            return attended

        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if self.autocast is not None:
                self.autocast.enter(stack)
            stack.enter_context(saved_tensors_hooks(self._collect, _refuse))
            stack.enter_context(handled_by(attention))
            try:
                self._forward(x)
            except _AllThereError:
                pass
        if self._next != len(self._kinds) or set(self._parts) != self.wanted_parts:
            raise _differs(f"{self._next} saved tensors", f"{len(self._kinds)} saved tensors")

    def _collect(self, tensor: Tensor) -> None:
        if self._saved.is_held(tensor):
            return
        if self._next == len(self._kinds):
            raise _differs("one saved tensor more", f"{len(self._kinds)} saved tensors")
        if (got := _kind(tensor)) != (wanted := self._kinds[self._next]):
            raise _differs(str(got), str(wanted))
        self._tensors[self._next] = tensor.detach()
        self._next += 1
        if self._next == len(self._kinds) and set(self._parts) == self.wanted_parts:
            raise _AllThereError


def _kind(tensor: Tensor) -> Kind:
    return tensor.shape, tensor.dtype, tensor.device


def _refuse(packed: object) -> Tensor:
    raise RuntimeError("a recomputed forward has no backward")


def _differs(got: str, wanted: str) -> RuntimeError:
    return RuntimeError(
        "a layer's forward saves other tensors when it runs again than it did the first time: "
        f"{got}, wanted {wanted}; its choice of experts or kernels may not be deterministic"
    )
