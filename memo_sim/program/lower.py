"""From decisions to programs: the one pure function both interpreters start from.

There is one program for each pipeline stage; without stages, all ranks play the same one (``stage_program.py``).
"""

from __future__ import annotations

import hashlib

from memo_sim.contract.errors import BadInput
from memo_sim.contract.plan import Decisions, Plan
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.pipeline.stage_program import stage_program
from memo_sim.program.pipeline.template_cache import cached_templates


def lower(decisions: Decisions, *, micro_batches: int | None = None, cp_rank: int | None = None) -> tuple[Program, ...]:
    """Return the program of each rank role: ``rank``, or ``stage0``, ``stage1`` ... with pipeline stages.

    ``micro_batches`` plays fewer than the decisions name (the engine repeats identical ones). ``cp_rank``: the programs
    of this context-parallel rank, in place of the representative's (cp - 1), which plans pin and the engine plays.

    Raises:
        Infeasible: when the layout does not divide the model or the sequence, or asks for what no lowering plays yet.
    """
    shape = shape_of(decisions, cp_rank=cp_rank)
    played = micro_batches or decisions.micro_batches
    made = cached_templates(decisions)
    return tuple(stage_program(decisions, shape, stage, played, made=made) for stage in stages_of(decisions))


def program_sha256(programs: tuple[Program, ...]) -> str:
    """Return the hash that a plan pins: of its only program, or of the hashes of all stages' programs in order."""
    if len(programs) == 1:
        return programs[0].sha256
    return hashlib.sha256("".join(p.sha256 for p in programs).encode()).hexdigest()


def check_pinned(plan: Plan, programs: tuple[Program, ...], *, where: str) -> None:
    """Refuse a plan that pins other programs than ``programs``, which its decisions lower to.

    Raises:
        BadInput: with ``where`` (the plan's file), the hash that the plan pins, and the one of ``programs``.
    """
    found = program_sha256(programs)
    if plan.program_sha256 == found:
        return
    earlier = not plan.program_sha256
    raise BadInput(
        "a plan of an earlier version pins no program of this one"
        if earlier
        else "the plan's decisions lower to another program than the one it pins",
        where=f"{where}: $.program_sha256",
        got=plan.program_sha256[:16] or "none",
        wanted=found[:16],
        hint=f"{'' if earlier else 'the plan was edited, or made by another version: '}write it again with "
        "memo-sim what-if --plan FILE --cluster CLUSTER -o NEW_FILE",
    )
