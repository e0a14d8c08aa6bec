"""Checks a plan's programs before they run: each by itself, the stages with each other, the ranks of a ring together.

The checkers of ``memo_sim/program/verify`` share nothing with the lowering; one of them holds every value that an
instruction reads against the model's mathematics. What they find is a bug in the lowering, or in a version that wrote
the plan: a run that starts with such a program computes something else, or waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memo_sim.contract.errors import MemoError
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import counted
from memo_sim.program.analysis.columns import Columns, expand
from memo_sim.program.analysis.edges import Edges, derive_edges
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.heads import have_unequal_shares
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges, check_program
from memo_sim.program.verify.stages import ACROSS, check_calls, check_deadlock, check_stages
from memo_sim.program.verify.values import check_values

SHOWN_FAULTS = 3
"""Of a faulty program, in the message."""


@dataclass(frozen=True)
class Check:
    """What was checked, how much of it there is, and every fault."""

    name: str
    what: str
    faults: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What was found, in one line."""
        if not self.faults:
            return f"ok: {self.what}"
        more = len(self.faults) - SHOWN_FAULTS
        return "faulty: " + "; ".join(self.faults[:SHOWN_FAULTS]) + (f" (and {more} more)" if more > 0 else "")


@dataclass(frozen=True)
class _Expanded:
    program: Program
    columns: Columns
    edges: Edges


def program_checks(decisions: Decisions) -> list[Check]:
    """Return the checks of every stage's program, of the stages together, and of ranks with programs of their own.

    These are the ranks of a ring, the ranks of Ulysses with uneven heads (the first has the most, the last the fewest),
    and tensor-parallel ranks that exchange chunks (``tp_overlap``).
    """
    layout = decisions.layout
    ring_ranks = range(layout.ring) if layout.ring > 1 else [None]
    uneven = have_unequal_shares(decisions.model, layout)
    by_heads = [
        [tuple(map(_expanded, lower(decisions, cp_rank=rank, ulysses_rank=ulysses_rank))) for rank in ring_ranks]
        for ulysses_rank in ((0, layout.ulysses - 1) if uneven else (0,))
    ]
    others = range(1, layout.tp if layout.tp_overlap == "chunked" else 1)
    by_tp = [tuple(map(_expanded, lower(decisions, tp_rank=rank))) for rank in others]
    by_rank = [each for ring in by_heads for each in ring] + by_tp
    checks = []
    for alike in zip(*by_rank, strict=True):
        faults = [
            fault
            for each in alike
            for fault in (
                *check_program(each.program, each.columns),
                *check_edges(each.columns, each.edges),
                *check_values(each.program, each.columns, decisions),
            )
        ]
        instructions = sum(each.program.instruction_count for each in alike)
        ranks = f" of {counted(len(alike), 'rank')}" if len(alike) > 1 else ""
        name = f"program {alike[0].program.stage}"
        checks.append(Check(name, f"{counted(instructions, 'instruction')}{ranks}", tuple(dict.fromkeys(faults))))
    faults = [fault for stages in by_rank for fault in (*check_stages(_programs(stages)), *_waiting(stages, ACROSS))]
    stages = counted(len(by_rank[0]), "stage")
    checks.append(Check("stages", f"calls, sends and receives of {stages} match", tuple(dict.fromkeys(faults))))
    if layout.ring > 1:
        checks.append(_calls("ring", by_heads, decisions, (layout.ring_group, "grads"), every_group=True))
    if uneven:
        by_ring = list(zip(*by_heads, strict=True))
        checks.append(_calls("uneven heads", by_ring, decisions, ("ulysses", "grads"), every_group=False))
    if by_tp:
        checks.append(_calls("chunks", [[by_heads[0][-1], *by_tp]], decisions, ("tp", "grads"), every_group=True))
    return checks


def _calls(
    name: str,
    groups: Sequence[Sequence[Sequence[_Expanded]]],
    decisions: Decisions,
    across: Sequence[str],
    *,
    every_group: bool,
) -> Check:
    """Return the check that the ranks of each group make the same calls; a rank has a program for each stage.

    ``across``: the kinds of groups that the ranks form. ``every_group``: calls of other groups match as well.
    """
    faults: list[str] = []
    for ranks in groups:
        for alike in zip(*ranks, strict=True):
            faults += check_calls(_programs(alike), () if every_group else across)
            if decisions.layout.pp == 1:  # the checker takes sends of several ranks of one stage for one
                faults += _waiting(alike, across)
    return Check(name, f"calls of {counted(len(groups[0]), 'rank')} match", tuple(dict.fromkeys(faults)))


def _expanded(program: Program) -> _Expanded:
    columns = expand(program)
    return _Expanded(program, columns, derive_edges(columns))


def _programs(expanded: Sequence[_Expanded]) -> tuple[Program, ...]:
    return tuple(each.program for each in expanded)


def _waiting(expanded: Sequence[_Expanded], across: Sequence[str]) -> list[str]:
    """Return the instructions that wait for each other in a cycle."""
    columns, edges = [each.columns for each in expanded], [each.edges for each in expanded]
    return check_deadlock(_programs(expanded), columns, edges, across)


def check_programs(decisions: Decisions, *, where: str) -> None:
    """Refuse a plan whose programs are faulty.

    Raises:
        MemoError: naming the first faults.
    """
    faulty = [check for check in program_checks(decisions) if check.faults]
    if faulty:
        raise MemoError(
            "the plan's program is faulty (a bug)",
            where=f"{where}: {faulty[0].name}",
            got=faulty[0].text.removeprefix("faulty: "),
            wanted="a program that the independent checkers pass",
            hint="report it with the plan; another layout or fewer options may lower without it",
        )
