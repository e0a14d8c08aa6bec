"""Measures the cost of memory and of dispatch: device allocation and free, host pinning, one empty instruction."""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.kernels import KERNELS, Call, StepScalars
from memo_exec.memory.pinned import mapping, pin, unpin
from memo_exec.probes.timing import Effort, Sample, sample_of, time_call
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.lower import lower

BLOCK_BYTES = 2**26
LARGE_BYTES = 2**29
PINNED_BYTES = 2**27
"""Size of the pinned blocks that the probe allocates; no earlier probe pins this size, so no block is cached."""

REPEATS = 7
BURST = 100
"""Kernels between two events; there are so many that the cost of the events is negligible."""

CPU_CACHE_BYTES = 2**25
"""Assumed size of a CPU's last-level cache if the system does not report it."""


def dispatch(decisions: Decisions, device: torch.device) -> Sample:
    """Return the interpreter's time for one compute instruction whose kernel does nothing."""
    (program,) = lower(decisions)
    count = sum(1 for _, instruction in program.walk() if instruction.lane is Lane.COMPUTE)
    idle = dict.fromkeys(KERNELS, _nothing)
    tokens = torch.zeros(decisions.micro_batch, decisions.seq_tokens, dtype=torch.int64)
    batch = [(tokens, tokens)] * program.micro_batches
    with Interpreter(decisions, program, device=device, kernels=idle) as interpreter:
        steps = [interpreter.run_step(batch, StepScalars()).step_s / count for _ in range(REPEATS + 2)]
    return sample_of(steps[2:])


def _nothing(call: Call) -> None:
    del call


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


def return_freed() -> None:
    """Return freed host memory to the system, which the C library may keep for reuse; do nothing if it cannot."""
    with suppress(OSError, AttributeError):  # only glibc can
        ctypes.CDLL(None).malloc_trim(0)


def cache_bytes(device: torch.device) -> int:
    """Return the size of the device's last-level cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]] if text[-1] in "KM" else int(text))
    return max(sizes, default=CPU_CACHE_BYTES)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
