"""The context manager ``OffloadActivations``, which users know as ``offload_activations``."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memo_exec.offload.block import Block, Original, Saved, Wrapped
from memo_exec.offload.eligible import Eligible
from memo_exec.offload.host import HostMemory
from memo_exec.offload.moves import Moves
from memo_exec.offload.statistics import OffloadStatistics, Why
from memo_exec.offload.swap import Swap
from memo_exec.offload.version import Kept
from memo_exec.offload.view import View
from memo_sim.contract.errors import CannotRun, UsageError

Packed = Saved | Kept | Wrapped

LEAST_BYTES = 1024
"""Bytes of the smallest tensor that leaves a GPU; torchtune's default."""

CPU_LEAST_BYTES = 2**20
"""On a CPU, handling a smaller tensor costs more time than the copy of its bytes."""


class OffloadActivations:
    """Offloads the tensors that autograd saves under this context to host memory, and prefetches them for backward.

    Keep one context for the whole training and enter it around every forward pass. Backward may run inside or outside
    of it. Arguments that torchtune's and TRL's ``OffloadActivations`` also have mean the same here.

    - A tensor is offloaded at most once, however many views of it are saved. Parameters and buffers always stay.
    - If the original is still alive in backward, it is used directly.
    - Gradients equal those of plain autograd bit for bit, with one exception. A view with gaps (a column block) comes
      back contiguous, and a kernel that selects its algorithm by strides may round differently.
    - For tensor subclasses that wrap others (``DTensor``), the inner tensors are offloaded. Other tensors that are not
      plain strided ones stay on the device.

    After ``__exit__``, at most the last ``max_fwd_stash_size`` tensors are still on the device, where backward uses
    them. They live at most as long as the graph; ``synchronize`` frees them at once.

    Args:
        use_pin_memory: pin the host slab (CUDA only).
        use_streams: copy on separate lanes, in parallel with compute; otherwise copies run in order with compute.
        max_fwd_stash_size: copies to the host that may be in flight before compute waits for the oldest; at least 1.
        min_offload_size: smaller tensors stay on the device, in bytes. None: 1,024 on a GPU, 1 MiB on a CPU.
        fraction: share of the eligible bytes to offload (MEMO's alpha), spread evenly over the forward pass.
        host_bytes: size of the host slab, allocated at once; tensors that do not fit stay on the device. None: the size
            that the first pass needs; the copies of that first pass use pageable memory. A CPU has no slab then, and
            copies begin when a tensor leaves the forward stash (``Moves``).
        max_bwd_stash_size: number of saved tensors to prefetch ahead of backward.
        model: its parameters and buffers stay on the device even if autograd saves them as plain tensors, as under
            FSDP.
        device: the device whose tensors are offloaded. None: CUDA; on machines without a GPU the activations are in
            host memory already, and nothing is copied (``statistics.host_is_device``). A context for the CPU that is
            named saves no memory, but it copies the bytes all the same, so code can be tried without a GPU.
        debug: compare checksums of offloaded and restored bytes, and poison memory before it is reused.

    Raises:
        UsageError: if an argument is out of its range.
        CannotRun: if the device is neither CUDA nor the CPU, or if host memory cannot be allocated or pinned.
    """

    def __init__(
        self,
        *,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        max_fwd_stash_size: int = 5,
        min_offload_size: int | None = None,
        fraction: float = 1.0,
        host_bytes: int | None = None,
        max_bwd_stash_size: int = 5,
        model: nn.Module | None = None,
        device: torch.device | str | None = None,
        debug: bool = False,
    ) -> None:
        _count("max_fwd_stash_size", max_fwd_stash_size, least=1)
        _count("max_bwd_stash_size", max_bwd_stash_size)
        if min_offload_size is not None:
            _count("min_offload_size", min_offload_size)
        if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise _out_of_range("fraction", fraction, "a number between 0 and 1")
        if host_bytes is not None:
            _count("host_bytes", host_bytes)
        idle = device is None and not torch.cuda.is_available()
        device = _device(device)
        self.statistics = OffloadStatistics(host_is_device=idle)
        on_cuda = device.type == "cuda"
        if on_cuda or (host_bytes is not None and not idle):
            host = HostMemory(host_bytes, pinned=use_pin_memory and on_cuda)
            swap: Callable[..., Swap] = partial(Swap, host)
        else:
            swap = Moves
        self._swap = swap(
            self.statistics,
            streams=use_streams,
            forward=max_fwd_stash_size,
            backward=max_bwd_stash_size,
            debug=debug,
        )
        self._swap.settle()
        if min_offload_size is None:
            min_offload_size = LEAST_BYTES if on_cuda else CPU_LEAST_BYTES
        self._eligible = Eligible(device, min_offload_size, model)
        self._fraction = fraction
        self._eligible_bytes = self._offloaded_bytes = 0
        self._offloaded_storages: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self._kept_storages: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()
        self._blocks: weakref.WeakValueDictionary[tuple[int, View | None], Block] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._entered: list[saved_tensors_hooks] = []

    def __enter__(self) -> Self:
        if self.statistics.host_is_device:
            return self
        if not self._entered:
            with self._lock:
                self._swap.settle()
                self._eligible.look_again()
                self._eligible_bytes = self._offloaded_bytes = 0
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._entered.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.statistics.host_is_device:
            return
        self._entered.pop().__exit__(kind, error, trace)
        with self._lock:
            self._swap.end_forward()

    def synchronize(self) -> None:
        """Block until every copy to the host has run, and free the originals."""
        with self._lock:
            self._swap.synchronize()

    def _pack(self, tensor: Tensor) -> Packed:
        with self._lock:
            return self._packed(tensor)

    def _unpack(self, packed: Packed) -> Tensor:
        if type(packed) is Kept:
            return packed.tensor()  # most are small, and need neither of these
        with torch.no_grad(), self._lock:
            return self._unpacked(packed)

    def _packed(self, tensor: Tensor) -> Packed:
        why = self._eligible.refuse(tensor)
        if why is Why.KIND and is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            parts = {name: getattr(tensor, name) for name in names}
            # DTensor lists its mesh among its tensors, so not every part is a tensor.
            inner = {name: self._packed(part) if isinstance(part, Tensor) else part for name, part in parts.items()}
            return Wrapped(type(tensor), context, tensor.shape, tensor.stride(), inner)
        return self._offloaded(tensor) if why is None else self._keep(tensor, why)

    def _keep(self, tensor: Tensor, why: Why) -> Kept:
        self.statistics.kept_bytes[why] += 0 if why is Why.KIND else tensor.nbytes
        return Kept(tensor)

    def _offloaded(self, tensor: Tensor) -> Packed:
        view, storage = View.of(tensor), tensor.untyped_storage()
        original, key = Original(tensor), storage._cdata
        reach = self._swap.reach(storage, view)
        place = view if reach is None else None
        block = self._blocks.get((key, place))
        if block is not None and block.serves(view, original):
            self.statistics.shared_tensors += 1
        else:
            if (why := self._choose(key, self._swap.size_bytes(storage, view))) is not None:
                return self._keep_storage(tensor, why, key)
            block = self._swap.offload(original, storage, view)
            if block is None:
                return self._keep_storage(tensor, Why.HOST, key)
            self._offloaded_storages[key] = self._blocks[key, place] = block
        inside = view.packed() if reach is None else view.after(block.first)
        return self._swap.save(block, view, inside, original)

    def _choose(self, key: int, size_bytes: int) -> Why | None:
        """Return why a tensor stays, or None if it is to be offloaded.

        All views of one storage share its fate; for other tensors the fraction decides.
        """
        if key in self._kept_storages:
            return Why.STORAGE
        self._eligible_bytes += size_bytes
        allowed_bytes = self._fraction * self._eligible_bytes
        if key not in self._offloaded_storages and self._offloaded_bytes + size_bytes > allowed_bytes:
            return Why.FRACTION
        self._offloaded_bytes += size_bytes
        return None

    def _keep_storage(self, tensor: Tensor, why: Why, key: int) -> Kept:
        """Keep a tensor and every later view of its storage, because copying one of these would free nothing."""
        kept = self._kept_storages[key] = self._keep(tensor, why)
        return kept

    def _unpacked(self, packed: Packed) -> Tensor:
        if isinstance(packed, Wrapped):
            parts = packed.inner.items()
            inner = {name: self._unpacked(part) if isinstance(part, Packed) else part for name, part in parts}
            kind: Any = packed.kind
            found: Tensor = kind.__tensor_unflatten__(inner, packed.context, packed.size, packed.stride)
            return found
        if isinstance(packed, Kept):
            return packed.tensor()
        packed.version.check()
        storage, view = self._swap.storage_for(packed)
        return view.over(storage)


class keep_activations(saved_tensors_hooks):  # noqa: N801 - reads as a statement: with keep_activations()
    """Keeps the tensors that autograd saves under this context on the device.

    Use it for the last layers of a model, whose saved tensors backward needs at once.
    """

    def __init__(self) -> None:
        super().__init__(Kept, Kept.tensor)


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = torch.device(device)
    if found.type not in ("cuda", "cpu"):
        raise CannotRun(
            "activations can be offloaded from CUDA devices and CPUs only", got=str(found), wanted="cuda or cpu"
        )
    return found


def _count(name: str, got: object, *, least: int = 0) -> None:
    if not isinstance(got, int) or got < least:
        raise _out_of_range(name, got, f"an integer of at least {least}")


def _out_of_range(name: str, got: object, wanted: str) -> UsageError:
    return UsageError("an argument of offload_activations is out of range", where=name, got=got, wanted=wanted)
