"""Measures the cost of memory: device allocation and free, host pinning; and of the shortest kernel of a GPU."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from memo_exec.memory.pinned import mapping, pin, unpin
from memo_exec.probes.timing import Effort, Sample, sample_of, time_call

BLOCK_BYTES = 2**26
LARGE_BYTES = 2**29
PINNED_BYTES = 2**27
"""Size of the pinned blocks that the probe allocates; no earlier probe pins this size, so no block is cached."""

REPEATS = 7
BURST = 100
"""Kernels between two events; there are so many that the cost of the events is negligible."""

CPU_CACHE_BYTES, CORE_CACHE_BYTES = 2**25, 2**20
"""Assumed sizes of a CPU's last-level cache, and of the largest one of a core alone, if the system reports none."""

CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

CORE_LEVEL = 2
"""Last level of cache that each core has of its own."""


def launch_floor(device: torch.device) -> Sample:
    """Return the shortest time of one kernel on a GPU, measured over many tiny kernels in one stream."""
    word = torch.zeros(1, device=device)

    def burst(i: int) -> None:
        del i
        for _ in range(BURST):
            word.add_(1.0)

    sample = time_call(burst, device, Effort(seconds=0.1))
    return Sample(sample.seconds / BURST, sample.spread)


@dataclass(frozen=True)
class Allocation:
    """Time to allocate a block on the device (``asked``) and to free it (``given_back``), per block and per GiB."""

    asked: Sample
    asked_per_gib: Sample
    given_back: Sample
    given_back_per_gib: Sample


def allocation(device: torch.device, sizes: tuple[int, int] = (BLOCK_BYTES, LARGE_BYTES)) -> Allocation:
    """Return how long the device takes to allocate and to free blocks, without torch's cache.

    Two sizes determine a line: seconds = per block + per GiB x GiB. A slope that is negative due to noise counts as 0.
    """
    small, large = (_blocks(device, size) for size in sizes)
    asked, asked_per_gib = _line(small[0], large[0], sizes)
    given_back, given_back_per_gib = _line(small[1], large[1], sizes)
    return Allocation(asked, asked_per_gib, given_back, given_back_per_gib)


def _blocks(device: torch.device, size: int) -> tuple[Sample, Sample]:
    """Return how long the device takes to allocate and to free a block of ``size`` bytes."""
    asked, given_back = [], []
    _empty_cache(device)
    for _ in range(REPEATS):
        start = time.perf_counter()
        block = torch.empty(size, dtype=torch.uint8, device=device)
        _wait(device)
        middle = time.perf_counter()
        del block
        _empty_cache(device)
        asked.append(middle - start)
        given_back.append(time.perf_counter() - middle)
    return sample_of(asked), sample_of(given_back)


def _line(small: Sample, large: Sample, sizes: tuple[int, int]) -> tuple[Sample, Sample]:
    """Return seconds at size 0 and seconds per GiB of the line through two sizes; both are at least 0."""
    slope = max(0.0, (large.seconds - small.seconds) / (sizes[1] - sizes[0]))
    start = max(0.0, small.seconds - slope * sizes[0])
    return Sample(start, small.spread), Sample(slope * 2**30, large.spread)


def host_block_bytes(device: torch.device) -> int:
    """Return the size of the block that ``host_ready`` prepares; a GPU's is large enough for all threads that touch."""
    return LARGE_BYTES if device.type == "cuda" else BLOCK_BYTES


def host_ready(device: torch.device) -> Sample:
    """Return how long it takes to prepare one block of host memory for copies: pin it (CUDA), or touch it (CPU).

    Raises:
        CannotRun: if the driver refuses to pin it.
    """
    found = []
    for _ in range(REPEATS):
        cuda = device.type == "cuda"
        size = host_block_bytes(device)
        block = mapping(size) if cuda else torch.empty(size, dtype=torch.uint8)
        start = time.perf_counter()
        if cuda:
            pin(block)
        else:
            block.zero_()
        found.append(time.perf_counter() - start)
        if cuda:
            unpin(block)
    return sample_of(found)


def host_allocated(device: torch.device) -> Sample | None:
    """Return how long torch's pinned allocator takes for a block that it has not cached; None without CUDA."""
    if device.type != "cuda":
        return None
    found, kept = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        # Keep each block until the end; the allocator would hand out a freed one again.
        kept.append(torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True))
        found.append(time.perf_counter() - start)
    return sample_of(found)


def _empty_cache(device: torch.device) -> None:
    """Return torch's cached memory to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize(device)


def resident_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Return the bytes of this process that are in memory, its libraries included; 0 where the system does not say."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def cache_bytes(device: torch.device) -> int:
    """Return the size of the device's last-level cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return max(_cpu_caches().values(), default=CPU_CACHE_BYTES)


def core_cache_bytes() -> int:
    """Return the size of the largest cache that a core of the CPU has of its own."""
    own = [size for level, size in _cpu_caches().items() if level <= CORE_LEVEL]
    return max(own, default=CORE_CACHE_BYTES)


def _cpu_caches() -> dict[int, int]:
    """Return the bytes of the largest cache of each level; empty if the system does not report them."""
    sizes: dict[int, int] = {}
    for index in CPU_CACHES.glob("index*"):
        with suppress(OSError, ValueError):
            level, text = int((index / "level").read_text()), (index / "size").read_text().strip()
            size = int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]] if text[-1] in "KM" else int(text)
            sizes[level] = max(size, sizes.get(level, 0))
    return sizes


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
