"""Places the buffers of a plan whose live bytes fit, to find the arena that it really needs (MEMO 4.2).

The search compares plans by live bytes, which are a lower bound for every placement. The user sees the size of an arena
whose placement passed the checker.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.contract.requests import Requests
from memo_sim.contract.units import format_bytes
from memo_sim.engine.simulate import Simulation
from memo_sim.memory.place import place
from memo_sim.program.arena.first_fit import arena_bytes, offsets_of
from memo_sim.program.arena.requests import arena_requests
from memo_sim.program.ir.instruction import BufferClass
from memo_sim.program.ir.program import Program

MOST_INSTRUCTIONS = 1_000_000
"""Largest number of instructions of a step, over all pipeline stages, that is placed whole: about four seconds.

Of a longer step, only the played part is placed."""

NEAR = 1.01
"""With pipeline stages, an arena of so many times the lower bound is near enough where it fits: the other orders of
first fit take seconds for many micro-batches, and gain less than this."""

MANY = 8_000
"""From so many buffers on, the other orders take a second or more together."""

MOST_NODES = 6000
"""Nodes of the exact search, per core of the problem: about half a second."""

TIME_LIMIT_S = 600.0
"""Time limit in seconds. The search never reaches it, because its result must not depend on time."""


@dataclass(frozen=True)
class Arena:
    """A plan's placement, and the prediction with the arena's size.

    ``whole``: the placement has every buffer of the step, so the executor can use it. With pipeline stages, one stage
    is placed. The executor places the buffers of the others by first fit, and the prediction has the largest arena of
    all stages.
    """

    placement: Placement
    prediction: Prediction
    whole: bool


def arena_of(simulation: Simulation) -> Arena:
    """Return the arena of a plan whose live bytes fit; its prediction is gpu_oom when the arena does not fit."""
    whole = simulation.instruction_count <= MOST_INSTRUCTIONS
    program = simulation.full_program if whole else simulation.fullest.program
    memory = simulation.memory
    requests = arena_requests(program, simulation.decisions)
    beyond = simulation.decisions.micro_batches - program.micro_batches
    later_bytes = beyond * _input_bytes(program, requests.alignment_bytes)
    if len(simulation.stages) == 1:
        placement = _placed(requests)
        size = placement.arena_bytes
    else:
        room = memory.device_capacity_bytes - memory.reserve_bytes - later_bytes
        enough_bytes = min(int(NEAR * memory.device.bytes), room)
        placement = _of_one_stage(requests, enough_bytes)
        size = placement.arena_bytes
        if whole:
            placement, size = _of_stages(simulation, placement, enough_bytes)
    size += later_bytes
    prediction = msgspec.structs.replace(simulation.prediction, peak_device_bytes=size)
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
            reason=f"the planned arena of {format_bytes(size)} and the reserve of {format_bytes(memory.reserve_bytes)} "
            f"do not fit, although the live bytes of {format_bytes(memory.device.bytes)} would",
        )
    return Arena(placement, prediction, whole)


def _placed(requests: Requests, *, solver: str = "portfolio", enough_bytes: int = 0) -> Placement:
    # The search is limited by nodes: with a time limit, equal questions could get different plans.
    placement = place(
        requests, solver=solver, time_limit_s=TIME_LIMIT_S, most_nodes=MOST_NODES, enough_bytes=enough_bytes
    )
    return msgspec.structs.replace(placement, elapsed_s=0.0)  # so that equal plans give equal files


def _of_one_stage(requests: Requests, enough_bytes: int) -> Placement:
    """Return the placement of one of several stages; of many buffers, an arena of ``enough_bytes`` is not improved.

    Greedy comes near enough to the optimum, because a stage holds several micro-batches at once.
    """
    return _placed(requests, solver="greedy", enough_bytes=enough_bytes if len(requests.ids) >= MANY else 0)


def _of_stages(simulation: Simulation, fullest: Placement, enough_bytes: int) -> tuple[Placement, int]:
    """Return the placement that the plan pins, and the largest arena of any stage.

    The placed stage is the one with most live bytes. If first fit needs more on another stage, and placing that stage
    makes the largest arena smaller, that stage is placed instead.
    """
    programs, decisions = simulation.full_programs, simulation.decisions
    by_first_fit = [_by_first_fit(program, decisions) for program in programs]
    ours = programs.index(simulation.full_program)

    def largest(placement: Placement, stage: int) -> int:
        return max(placement.arena_bytes, *(size for n, size in enumerate(by_first_fit) if n != stage))

    size, other = largest(fullest, ours), max(range(len(programs)), key=by_first_fit.__getitem__)
    if size == fullest.arena_bytes or other == ours:
        return fullest, size
    instead = _of_one_stage(arena_requests(programs[other], decisions), enough_bytes)
    return (instead, least) if (least := largest(instead, other)) < size else (fullest, size)


def _by_first_fit(program: Program, decisions: Decisions) -> int:
    """Return the arena of a stage whose buffers are placed in the order of their births, as the executor does."""
    requests = arena_requests(program, decisions)
    return arena_bytes(requests, offsets_of(requests))


def _input_bytes(program: Program, alignment_bytes: int) -> int:
    """Return the bytes of the inputs of one more micro-batch; inputs last the whole step."""
    inputs = [f for f in program.all_families if f.buffer_class is BufferClass.INPUT and f.lifetime == "step"]
    return sum(-(-f.bytes // alignment_bytes) * alignment_bytes for f in inputs)
