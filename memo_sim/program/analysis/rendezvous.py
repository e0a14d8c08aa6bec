"""Which instructions of different roles are one: a send and its receive, a collective over pipeline stages.

The n-th send from one stage to another is the n-th receive there, and the n-th call of a group that spans stages is the
same call on all of its stages. Whether that is so is for ``program.py`` to say; here numbers are enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, PointToPoint, Work

SPANNING = ("pp", "tied")
"""Groups whose ranks are of different stages."""

Rendezvous = tuple[tuple[int, int], ...]
"""Instructions of different roles that are played at once: (role, instruction) of each."""


def all_rendezvous(programs: Sequence[Program]) -> list[Rendezvous]:
    """Return what the roles play together; what has nobody to meet is left out (``check_stages`` finds it)."""
    found: dict[tuple[object, ...], list[tuple[int, int]]] = defaultdict(list)
    if len(programs) > 1:
        for stage, program in enumerate(programs):
            for key, number in _calls(program):
                found[key].append((stage, number))
    return [tuple(each) for each in found.values() if len(each) > 1]


def _calls(program: Program) -> list[tuple[tuple[object, ...], int]]:
    """Return what a role shares with others, as (which call it is, number of the instruction)."""
    shared = [
        [(at, kind) for at, i in enumerate(t.instructions) if (kind := _kind(i.work, i.lane))]
        for t in program.templates
    ]
    counts: dict[tuple[object, ...], int] = defaultdict(int)
    calls, first = [], 0
    for instance in program.instances:
        for at, key in shared[instance.template]:
            # Both sides of a hand-over count for themselves; what they call is what comes after the lane.
            calls.append(((*key[1:], counts[key]), first + at))
            counts[key] += 1
        first += len(program.templates[instance.template].instructions)
    return calls


def _kind(work: Work, lane: Lane) -> tuple[object, ...]:
    """Return (lane, what is called) of a work that other roles take part in; nothing for others."""
    if isinstance(work, PointToPoint):
        return (lane, "handover", work.source, work.target)
    if isinstance(work, Collective) and work.group in SPANNING:
        return (lane, work.group)
    return ()
