"""Gives a plan that fits by its live bytes the arena it will really take (MEMO 4.2), or says that it does not fit.

The search compares plans by live bytes, which no placement is below. What a user is told is the arena of a placement
that passed the checker.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Prediction
from memo_sim.contract.requests import Requests
from memo_sim.contract.units import format_bytes
from memo_sim.engine.simulate import Simulation
from memo_sim.memory.place import place
from memo_sim.program.arena.first_fit import arena_bytes, offsets_of
from memo_sim.program.arena.requests import arena_requests
from memo_sim.program.ir.instruction import BufferClass
from memo_sim.program.ir.program import Program

MOST_INSTRUCTIONS = 200_000
"""Of a step that is placed whole; of a longer one the micro-batches that were played are placed."""

MOST_NODES = 6000
"""Of the exact search, per core of the problem: about half a second."""

TIME_LIMIT_S = 600.0
"""A safety net that is not reached: what is found in time must not depend on it."""


@dataclass(frozen=True)
class Arena:
    """A plan's placement, and what that makes of its prediction.

    ``whole``: the placement has every buffer of the step, so that the executor can obey it. Of pipeline stages one is
    placed; the executor places the others' buffers by first fit, and the prediction has the largest arena of all.
    """

    placement: Placement
    prediction: Prediction
    whole: bool


def arena_of(simulation: Simulation) -> Arena:
    """Return the arena of a plan whose live bytes fit; its prediction is gpu_oom when the arena does not."""
    whole = simulation.full_program.instruction_count <= MOST_INSTRUCTIONS
    program = simulation.full_program if whole else simulation.fullest.program
    placement = _placed(arena_requests(program, simulation.decisions), stages=len(simulation.stages))
    size = placement.arena_bytes
    if whole and len(simulation.stages) > 1:
        placement, size = _of_stages(simulation, placement)
    beyond = simulation.decisions.micro_batches - program.micro_batches
    size += beyond * _input_bytes(program, placement.alignment_bytes)
    prediction = msgspec.structs.replace(simulation.prediction, peak_device_bytes=size)
    memory = simulation.memory
    missing = size + memory.reserve_bytes - memory.device_capacity_bytes
    if missing > 0:
        prediction = msgspec.structs.replace(
            prediction,
            status="gpu_oom",
            step_s=None,
            mfu=None,
            tgs=None,
            lanes={},
            stalls=[],
            shortfall_bytes=missing,
            reason=f"the planned arena of {format_bytes(size)} and {format_bytes(memory.reserve_bytes)} reserve do not "
            f"fit, though the {format_bytes(memory.device.bytes)} that live at once would",
        )
    return Arena(placement, prediction, whole)


def _placed(requests: Requests, *, stages: int) -> Placement:
    # Ended by nodes: a search that ends by the clock would make equal questions unequal plans.
    # A stage holds several micro-batches at once: greedy comes near enough.
    solver = "portfolio" if stages == 1 else "greedy"
    placement = place(requests, solver=solver, time_limit_s=TIME_LIMIT_S, most_nodes=MOST_NODES)
    return msgspec.structs.replace(placement, elapsed_s=0.0)  # equal plans are equal files


def _of_stages(simulation: Simulation, fullest: Placement) -> tuple[Placement, int]:
    """Return the stage's placement that the plan pins, and the largest arena that any stage then has.

    That of the stage with the most live bytes, unless first fit needs more on another, and less when that is placed.
    """
    asked = [arena_requests(program, simulation.decisions) for program in simulation.full_programs]
    by_first_fit = [arena_bytes(requests, offsets_of(requests)) for requests in asked]
    ours = next(n for n, requests in enumerate(asked) if requests.program_sha256 == fullest.program_sha256)

    def largest(placement: Placement, stage: int) -> int:
        return max(placement.arena_bytes, *(size for n, size in enumerate(by_first_fit) if n != stage))

    size, other = largest(fullest, ours), max(range(len(asked)), key=by_first_fit.__getitem__)
    if size == fullest.arena_bytes or other == ours:
        return fullest, size
    instead = _placed(asked[other], stages=len(asked))
    return (instead, least) if (least := largest(instead, other)) < size else (fullest, size)


def _input_bytes(program: Program, alignment_bytes: int) -> int:
    """Return what the inputs of one more micro-batch take; they last the whole step."""
    inputs = [f for f in program.all_families if f.buffer_class is BufferClass.INPUT and f.lifetime == "step"]
    return sum(-(-f.bytes // alignment_bytes) * alignment_bytes for f in inputs)
