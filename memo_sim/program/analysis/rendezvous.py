"""Matches instructions of several pipeline stages: a send with its receive, a collective over stages with itself.

The n-th send from one stage to another is the n-th receive there. The n-th call of a group that spans stages is the
same call on all its stages. This module only counts; ``verify/stages.py`` checks that matched calls fit together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memo_sim.program.analysis.columns import Ints
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, PointToPoint, Work

SPANNING = ("pp", "tied")
"""Groups whose ranks belong to several stages."""


@dataclass(frozen=True)
class AllRendezvous:
    """Matched instructions of several stages that run at the same time.

    Rendezvous r has the instructions ``bounds[r]`` to before ``bounds[r + 1]``, in the order of their stages.
    """

    stage: Ints
    instruction: Ints
    """Number of the instruction in its stage."""
    bounds: Ints

    def __len__(self) -> int:
        """Return the number of rendezvous."""
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield each rendezvous as pairs (stage, instruction)."""
        pairs = list(zip(self.stage.tolist(), self.instruction.tolist(), strict=True))
        for first, end in pairwise(self.bounds.tolist()):
            yield tuple(pairs[first:end])


def all_rendezvous(programs: Sequence[Program]) -> AllRendezvous:
    """Return the matched instructions of all stages; unmatched calls are left out (``check_stages`` reports them)."""
    numbers: dict[tuple[object, ...], int] = {}
    found = [_calls(stage, program, numbers) for stage, program in enumerate(programs if len(programs) > 1 else ())]
    kind, count, stage, instruction = np.concatenate([np.zeros((4, 0), dtype=np.int64), *found], axis=1)
    order = np.lexsort((stage, count, kind))
    kind, count = kind[order], count[order]
    begins = np.append(True, (kind[1:] != kind[:-1]) | (count[1:] != count[:-1]))[: len(order)]
    size = np.diff(np.append(np.flatnonzero(begins), len(order)))
    order = order[np.repeat(size > 1, size)]
    return AllRendezvous(stage[order], instruction[order], np.append(0, np.cumsum(size[size > 1])))


def _calls(stage: int, program: Program, numbers: dict[tuple[object, ...], int]) -> Ints:
    """Return a stage's calls that involve other stages, as rows (kind, how many came before, stage, instruction).

    ``numbers``: of the kinds of calls seen so far; new ones are added.
    """
    lengths = np.array([len(t.instructions) for t in program.templates], dtype=np.int64)
    template_of = program.template_of
    length = lengths[template_of]
    starts = np.cumsum(length) - length
    # Sends and receives are counted separately, but matched calls have the same number, so it leaves out the lane.
    by_lane: dict[tuple[object, ...], list[Ints]] = {}
    for number, template in enumerate(program.templates):
        for at, each in enumerate(template.instructions):
            if kind := _kind(each.work, each.lane):
                by_lane.setdefault(kind, []).append(starts[template_of == number] + at)
    rows = [np.zeros((4, 0), dtype=np.int64)]
    for kind, places in by_lane.items():
        calls = np.sort(np.concatenate(places))
        number = numbers.setdefault(kind[1:], len(numbers))
        rows.append(np.stack([np.full(len(calls), number), np.arange(len(calls)), np.full(len(calls), stage), calls]))
    return np.concatenate(rows, axis=1)


def _kind(work: Work, lane: Lane) -> tuple[object, ...]:
    """Return (lane, kind of call) for work that involves other stages, else an empty tuple."""
    if isinstance(work, PointToPoint):
        return (lane, "p2p", work.source, work.target)
    if isinstance(work, Collective) and work.group in SPANNING:
        return (lane, work.group)
    return ()
