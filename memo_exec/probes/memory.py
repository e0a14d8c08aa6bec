"""What memory costs: asking the device for it and giving it back, making host memory ready for copies, one dispatch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.kernels import KERNELS, Call, StepScalars
from memo_exec.probes.timing import Effort, Sample, sample_of, time_call
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.lower import lower

BLOCK_BYTES = 2**26
LARGE_BYTES = 2**29
PINNED_BYTES = 2**27
"""Of a pinned block that is asked of the driver: no probe before has pinned this size, so none is cached."""

REPEATS = 7
BURST = 100
"""Kernels in a row, so that a pair of events around them does not count."""

CPU_CACHE_BYTES = 2**25
"""Assumed where the system does not tell."""


def dispatch(decisions: Decisions, device: torch.device) -> Sample:
    """Return what one compute instruction costs the interpreter when its kernel does nothing."""
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
    """Return the least time of one kernel on a GPU whose stream runs ahead: of many that do next to nothing."""
    word = torch.zeros(1, device=device)

    def burst(i: int) -> None:
        del i
        for _ in range(BURST):
            word.add_(1.0)

    sample = time_call(burst, device, Effort(seconds=0.1))
    return Sample(sample.seconds / BURST, sample.spread)


@dataclass(frozen=True)
class Allocation:
    """What asking the device for a block costs, and giving it back: by block, and by GiB."""

    asked: Sample
    asked_per_gib: Sample
    given_back: Sample
    given_back_per_gib: Sample


def allocation(device: torch.device, sizes: tuple[int, int] = (BLOCK_BYTES, LARGE_BYTES)) -> Allocation:
    """Return how long the device takes to hand out blocks that no cache holds, and to take them back.

    Two sizes give a line: seconds = a block's + a GiB's x GiB; a slope that noise turns below 0 counts as 0.
    """
    small, large = (_blocks(device, size) for size in sizes)
    asked, asked_per_gib = _line(small[0], large[0], sizes)
    given_back, given_back_per_gib = _line(small[1], large[1], sizes)
    return Allocation(asked, asked_per_gib, given_back, given_back_per_gib)


def _blocks(device: torch.device, size: int) -> tuple[Sample, Sample]:
    """Return how long a block of ``size`` bytes takes to be handed out and taken back."""
    asked, given_back = [], []
    _forget(device)
    for _ in range(REPEATS):
        start = time.perf_counter()
        block = torch.empty(size, dtype=torch.uint8, device=device)
        _wait(device)
        middle = time.perf_counter()
        del block
        _forget(device)
        asked.append(middle - start)
        given_back.append(time.perf_counter() - middle)
    return sample_of(asked), sample_of(given_back)


def _line(small: Sample, large: Sample, sizes: tuple[int, int]) -> tuple[Sample, Sample]:
    """Return seconds at size 0 and seconds a GiB of the line through two sizes, neither below 0."""
    slope = max(0.0, (large.seconds - small.seconds) / (sizes[1] - sizes[0]))
    start = max(0.0, small.seconds - slope * sizes[0])
    return Sample(start, small.spread), Sample(slope * 2**30, large.spread)


def host_ready(device: torch.device) -> Sample:
    """Return how long one block of host memory takes to become usable for copies: registered, or touched on a CPU.

    Raises:
        CannotRun: when the driver does not register it.
    """
    found = []
    for _ in range(REPEATS):
        block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        start = time.perf_counter()
        if device.type == "cuda":
            _checked(_runtime().cudaHostRegister(block.data_ptr(), block.numel(), 0), "registered")
        else:
            block.zero_()
        found.append(time.perf_counter() - start)
        if device.type == "cuda":
            _checked(_runtime().cudaHostUnregister(block.data_ptr()), "given back")
    return sample_of(found)


def host_allocated(device: torch.device) -> Sample | None:
    """Return how long torch's pinned allocator takes for a block it has not cached; None where nothing is pinned."""
    if device.type != "cuda":
        return None
    found, kept = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        # Kept until the end: what is given back would be handed out again.
        kept.append(torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True))
        found.append(time.perf_counter() - start)
    return sample_of(found)


def _checked(status: Any, what: str) -> None:
    if int(status) != 0:
        raise CannotRun(
            f"host memory cannot be {what}",
            got=f"CUDA error {int(status)} for {BLOCK_BYTES} bytes",
            wanted="enough lockable memory",
            hint="raise the limit on locked memory",
        )


def _forget(device: torch.device) -> None:
    """Give what torch has cached back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize(device)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


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
