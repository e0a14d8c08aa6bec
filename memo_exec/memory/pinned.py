"""Pins host memory in place, at its exact size, on the NUMA node of the GPU that copies to and from it.

torch's pinned allocator rounds blocks up to powers of two and ignores NUMA nodes. Linux puts a page on the node of the
core that first touches it. So several threads on cores of that node touch all pages first, each its own part, which is
faster than the driver's touching them one by one. Huge pages leave fewer pages to touch and to pin. A large block is
pinned in pieces, because one registration of half a TiB or more may fail.

    mapping(size)   [        fresh pages, huge where the system has them        ]
    pin(memory)     [ thread 0 ][ thread 1 ][ thread 2 ][ thread 3 ]   touch
                    [       piece 0      ][       piece 1          ]   register
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memo_sim.contract.errors import CannotRun

PIECE_BYTES = 64 * 2**30
"""The most bytes that are pinned by one call. CUDA may refuse a copy that crosses two pieces, so no buffer of a slab
does (``FirstFit``)."""

TOUCHING_THREADS = 16
"""The most threads that touch memory; the bandwidth of one NUMA node needs no more."""

TOUCHED_BYTES = 2**24
"""Bytes that are worth a thread of their own."""

HUGE_PAGE_BYTES = 2**21
"""Size of Linux's huge pages on x86; threads meet at multiples of it, so no two of them touch the same page."""


def mapping(size: int) -> Tensor:
    """Return zeroed memory on fresh pages of its own, so that pinning it pins no other data; on huge pages if any."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system that was built without huge pages refuses the advice
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def pin(memory: Tensor) -> None:
    """Zero ``memory`` and pin it for the current CUDA device, in pieces of at most ``PIECE_BYTES``.

    Raises:
        CannotRun: if the driver refuses, for example because of a limit on locked memory. Nothing stays pinned then.
    """
    done: list[int] = []
    with near_gpu():
        _touch(memory)
        for first, size in _parts(memory, PIECE_BYTES):
            status = int(_cudart().cudaHostRegister(first, size, 0))
            if status != 0:
                break
            done.append(first)
        else:
            return
    for first in done:
        _cudart().cudaHostUnregister(first)
    raise CannotRun(
        "the host slab cannot be pinned",
        got=f"CUDA error {status} for {size} of {memory.numel()} bytes",
        wanted="enough lockable memory",
        hint="raise the limit on locked memory, or swap less",
    )


def unpin(memory: Tensor) -> None:
    """Wait until the device has finished its work, such as copies to and from ``memory``, then unpin it."""
    torch.cuda.synchronize()
    for first, _ in _parts(memory, PIECE_BYTES):
        _cudart().cudaHostUnregister(first)


def _parts(memory: Tensor, most_bytes: int) -> list[tuple[int, int]]:
    """Return address and size of the parts of ``memory``, each but the last of ``most_bytes``."""
    base, whole = memory.data_ptr(), memory.numel()
    return [(base + first, min(most_bytes, whole - first)) for first in range(0, whole, most_bytes)]


def _touch(memory: Tensor) -> None:
    """Write zeros to all pages, from threads with the calling thread's affinity."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, min(TOUCHING_THREADS, cores, memory.numel() // TOUCHED_BYTES))
    share = -(-memory.numel() // threads)
    share = -(-share // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    with ThreadPoolExecutor(threads, thread_name_prefix="touch") as pool:  # ctypes lets the threads run side by side
        for future in [pool.submit(ctypes.memset, first, 0, size) for first, size in _parts(memory, share)]:
            future.result()


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
