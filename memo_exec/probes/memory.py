"""What memory costs: asking the device for it and giving it back, making host memory ready for copies, one dispatch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from memo_exec.interpreter import Interpreter
from memo_exec.kernels import KERNELS, Call, StepScalars
from memo_exec.probes.timing import Sample, sample_of
from memo_sim.contract.plan import Decisions
from memo_sim.program.instruction import Lane
from memo_sim.program.lower import lower

BLOCK_BYTES = 2**26
REPEATS = 7
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


def allocation(device: torch.device) -> tuple[Sample, Sample]:
    """Return how long the device takes to hand out a large block that no cache holds, and to take it back."""
    asked, given_back = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        block = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=device)
        _wait(device)
        middle = time.perf_counter()
        del block
        if device.type == "cuda":
            torch.cuda.empty_cache()
        asked.append(middle - start)
        given_back.append(time.perf_counter() - middle)
    return sample_of(asked), sample_of(given_back)


def host_ready(device: torch.device) -> Sample:
    """Return how long one block of host memory takes to become usable for copies: registered, or touched on a CPU."""
    found = []
    for _ in range(REPEATS):
        block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        start = time.perf_counter()
        if device.type == "cuda":
            _runtime().cudaHostRegister(block.data_ptr(), block.numel(), 0)
        else:
            block.zero_()
        found.append(time.perf_counter() - start)
        if device.type == "cuda":
            _runtime().cudaHostUnregister(block.data_ptr())
    return sample_of(found)


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
