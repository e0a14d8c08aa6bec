"""Matches instructions of several pipeline stages: a send with its receive, a collective over stages with itself.

The n-th send from one stage to another is the n-th receive there. The n-th call of a group that spans stages is the
same call on all its stages. This module only counts; ``verify/stages.py`` checks that matched calls fit together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, PointToPoint, Work

SPANNING = ("pp", "tied")
"""Groups whose ranks belong to several stages."""

Rendezvous = tuple[tuple[int, int], ...]
"""Matched instructions of several stages that run at the same time: (stage, instruction) of each."""


def all_rendezvous(programs: Sequence[Program]) -> list[Rendezvous]:
    """Return the matched instructions of all stages; unmatched calls are left out (``check_stages`` reports them)."""
    found: dict[tuple[object, ...], list[tuple[int, int]]] = defaultdict(list)
    if len(programs) > 1:
        for stage, program in enumerate(programs):
            for key, number in _calls(program):
                found[key].append((stage, number))
    return [tuple(each) for each in found.values() if len(each) > 1]


def _calls(program: Program) -> list[tuple[tuple[object, ...], int]]:
    """Return a stage's calls that involve other stages, as (key of the call, instruction number)."""
    shared = [
        [(at, kind) for at, i in enumerate(t.instructions) if (kind := _kind(i.work, i.lane))]
        for t in program.templates
    ]
    counts: dict[tuple[object, ...], int] = defaultdict(int)
    calls, first = [], 0
    for instance in program.instances:
        for at, key in shared[instance.template]:
            # Sends and receives are counted separately, but matched calls need the same key, so the key leaves out the
            # lane.
            calls.append(((*key[1:], counts[key]), first + at))
            counts[key] += 1
        first += len(program.templates[instance.template].instructions)
    return calls


def _kind(work: Work, lane: Lane) -> tuple[object, ...]:
    """Return (lane, kind of call) for work that involves other stages, else an empty tuple."""
    if isinstance(work, PointToPoint):
        return (lane, "p2p", work.source, work.target)
    if isinstance(work, Collective) and work.group in SPANNING:
        return (lane, work.group)
    return ()
