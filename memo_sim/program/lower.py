"""Lowers a plan's decisions to programs. The engine and the executor both start from this pure function.

There is one program for each pipeline stage (``pipeline/stage_program.py``). Without stages, all ranks play the same
program.
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


def lower(
    decisions: Decisions,
    *,
    micro_batches: int | None = None,
    cp_rank: int | None = None,
    ulysses_rank: int = 0,
    tp_rank: int = 0,
) -> tuple[Program, ...]:
    """Return the program of each pipeline stage: ``stage0``, ``stage1`` ...; without stages, the one program ``rank``.

    ``micro_batches``: how many the programs have, by default all; the engine lowers a few and repeats identical ones.
    ``cp_rank``: the context-parallel rank whose programs are returned. The default is the last rank, whose programs
    represent all ranks: plans pin them, and the engine plays them.
    ``ulysses_rank``: the rank of Ulysses. Where ranks have unequal numbers of heads, rank 0 has the most.
    ``tp_rank``: the tensor-parallel rank, whose own chunk comes first where products overlap with exchanges.

    Raises:
        Infeasible: when the layout does not divide the model or the sequence, or the options are incompatible.
    """
    shape = shape_of(decisions, cp_rank=cp_rank, ulysses_rank=ulysses_rank, tp_rank=tp_rank)
    played = micro_batches or decisions.micro_batches
    made = cached_templates(decisions, shape)
    return tuple(stage_program(decisions, shape, stage, played, made=made) for stage in stages_of(decisions))


def lower_passes(decisions: Decisions) -> Program:
    """Return the program of a plan without pipeline stages up to its last pass.

    The reductions after the last pass, the gradient norm and the optimizer's update are left out: about a third of a
    program of few layers, and nothing that a bound of the passes reads. The instructions before are those of ``lower``.

    Raises:
        Infeasible: as in ``lower``.
    """
    shape = shape_of(decisions)
    (stage,) = stages_of(decisions)
    return stage_program(
        decisions, shape, stage, decisions.micro_batches, made=cached_templates(decisions, shape), with_end=False
    )


def program_sha256(programs: tuple[Program, ...]) -> str:
    """Return the hash that a plan pins: its only program's, or the hash of all stages' hashes in order."""
    if len(programs) == 1:
        return programs[0].sha256
    return hashlib.sha256("".join(p.sha256 for p in programs).encode()).hexdigest()


def check_pinned(plan: Plan, programs: tuple[Program, ...], *, where: str) -> None:
    """Refuse a plan that pins other programs than ``programs``, to which its decisions lower.

    Raises:
        BadInput: with ``where`` (the plan's file), the hash that the plan pins, and the hash of ``programs``.
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
