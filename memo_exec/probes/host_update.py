"""Measures AdamW on the host's cores as the executor plays it under ``--states host``.

It runs in the lane's own thread with the lane's number of cores. Under torchrun all ranks update at the same time, as
they do in a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from memo_exec.interpreter.lanes import lane_threads
from memo_exec.kernels import KERNELS, Call, Context
from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_exec.probes.grid import Grid
from memo_exec.probes.ranks import Ranks
from memo_exec.probes.timing import Effort, Sample, of_passes, time_call
from memo_sim.contract.hardware import Quantity
from memo_sim.contract.plan import Decisions
from memo_sim.program.data_parallel.optimizer import host_update
from memo_sim.program.ir.instruction import Instruction, Lane

PASSES = 3
"""How often it is measured; a short disturbance affects at most one pass, and the median drops it."""

OP = "adamw.decay"


def measure(
    ranks: Ranks, decisions: Decisions, grid: Grid, source: str, *, over: Callable[[], bool] = lambda: False
) -> Quantity:
    """Return the rate of all ranks together, in bytes/s of the update's operands; every rank calls this.

    ``over`` says whether time is short, so that it is not measured again.
    """
    update, moved_bytes = _update(decisions, ranks.device, grid.updated_elements)
    lane = lane_threads((Lane.HOST,), ranks.device, sharing=ranks.world)[Lane.HOST]
    found = []
    try:
        for _ in range(PASSES):
            ranks.wait()
            found.append(ranks.slowest(lane.submit(_timed, update).result()))
            if ranks.any(over()):
                break
    finally:
        lane.shutdown()
    slowest = of_passes(found)
    return Quantity(value=ranks.world * moved_bytes / slowest.seconds, source=source, spread=slowest.spread)


def _timed(update: Callable[[int], None]) -> Sample:
    with torch.inference_mode():
        return time_call(update, torch.device("cpu"), Effort(seconds=0.2))


def _update(decisions: Decisions, device: torch.device, elements: int) -> tuple[Callable[[int], None], int]:
    """Return a function that updates ``elements`` parameters on the host, and the bytes of its operands."""
    work = host_update(elements, decisions.dtype)
    tensors = {name: torch.full((elements,), 1e-3) for name in ("grads", "master", "moment1", "moment2")}
    tensors["params"] = torch.zeros(elements, dtype=TORCH_DTYPES[decisions.dtype])
    call = Call(Instruction(OP, OP, Lane.HOST, work, ()), Context(decisions, device), tensors)
    kernel = KERNELS[OP]

    def update(i: int) -> None:
        del i
        kernel(call)

    return update, work.moved_bytes
