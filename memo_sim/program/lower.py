"""From decisions to programs: the one pure function both interpreters start from.

One program a rank role: without pipeline stages all ranks play the same, else each stage's ranks do (``role.py``).
"""

from __future__ import annotations

import hashlib

from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.pipeline.stage_program import RoleLowering
from memo_sim.program.pipeline.template_cache import made_before


def lower(decisions: Decisions, *, micro_batches: int | None = None, cp_rank: int | None = None) -> tuple[Program, ...]:
    """Return the program of each rank role: ``rank``, or ``stage0``, ``stage1`` ... with pipeline stages.

    ``micro_batches`` plays fewer than the decisions name (the engine repeats identical ones). ``cp_rank``: the programs
    of this context-parallel rank, in place of the representative's (cp - 1), which plans pin and the engine plays.

    Raises:
        Infeasible: when the layout does not divide the model or the sequence, or asks for what no lowering plays yet.
    """
    shape = shape_of(decisions, cp_rank=cp_rank)
    played = micro_batches or decisions.micro_batches
    made = made_before(decisions)
    return tuple(RoleLowering(decisions, shape, stage, played, made=made).program() for stage in stages_of(decisions))


def program_sha256(programs: tuple[Program, ...]) -> str:
    """Return the hash a plan pins: of one program, or of all roles' hashes in order."""
    if len(programs) == 1:
        return programs[0].sha256
    return hashlib.sha256("".join(p.sha256 for p in programs).encode()).hexdigest()
