"""Pins host memory in place, at its exact size, on the NUMA node of the GPU that copies to and from it.

torch's pinned allocator rounds blocks up to powers of two and ignores NUMA nodes. Linux puts a page on the node of the
core that first touches it, and pinning is the first touch here. So the calling thread pins from a core of that node.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memo_sim.contract.errors import CannotRun


def mapping(size: int) -> Tensor:
    """Return zeroed memory on fresh pages of its own, so that pinning it pins no other data."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def pin(memory: Tensor) -> None:
    """Pin ``memory`` for the current CUDA device.

    Raises:
        CannotRun: if the driver refuses, for example because of a limit on locked memory.
    """
    with near_gpu():
        status = int(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if status != 0:
        raise CannotRun(
            "the host slab cannot be pinned",
            got=f"CUDA error {status} for {memory.numel()} bytes",
            wanted="enough lockable memory",
            hint="raise the limit on locked memory, or swap less",
        )


def unpin(memory: Tensor) -> None:
    """Unpin ``memory``; no copy to or from it may be in flight."""
    _cudart().cudaHostUnregister(memory.data_ptr())


@contextmanager
def near_gpu(root: Path = Path("/")) -> Iterator[None]:
    """Run the calling thread on the cores of the current GPU's NUMA node.

    The thread's affinity stays as it is if the node is unknown or the thread may not use its cores.
    """
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    near = before & _cores_of_gpu(root)
    if not near:
        yield
        return
    os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cores_of_gpu(root: Path) -> set[int]:
    """Return the cores of the current GPU's NUMA node; empty if the system does not report them."""
    if not torch.cuda.is_available():
        return set()
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        return _numbers((root / "sys/bus/pci/devices" / address / "local_cpulist").read_text())
    except (AttributeError, OSError, ValueError):  # a virtual machine without a node, or another system
        return set()


def _numbers(ranges: str) -> set[int]:
    """Return the numbers in a Linux CPU list such as ``0-3,8``."""
    found: set[int] = set()
    for part in ranges.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
