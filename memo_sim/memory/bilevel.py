"""Makes MEMO's bi-level plan (4.2, Figure 7): places each phase alone, then whole phases as blocks.

    level 1: inside one phase             level 2: over the step
      ^  [ a ][ b ]                         ^  [fwd 0][fwd 1] ... [bwd 1][bwd 0]    pseudo-blocks
      |  [   c    ]   -> its peak           |  [ l0.input ---------------------]    crosses phases
      +------------>                        +---------------------------------->

Level 1 places the buffers that live inside one phase. Phases with equal requests share one solution; instances of one
template have equal requests, which is checked and not assumed. Level 2 treats a phase as one block with the height of
its level-1 peak and the life of the phase, and places the blocks together with the buffers that cross phases. A rigid
block costs memory: a buffer that crosses phases cannot use the space that is free while a phase is below its peak.
``BilevelPlan`` says how much that costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memo_sim.contract.errors import BadInput
from memo_sim.contract.requests import Requests
from memo_sim.memory.greedy import solve_greedy
from memo_sim.memory.problem import Clock, Ints, Problem, Solver, problem_of
from memo_sim.memory.reduction import place_by_cores
from memo_sim.memory.repeated import period_of, short_step


@dataclass(frozen=True, eq=False)
class BilevelPlan:
    """Offsets and peaks in units of ``problem_of(requests)``."""

    offsets: Ints
    peak: int
    level_1: dict[str, tuple[int, int]]
    """By kind of phase: the highest level-1 peak of its phases, and the lower bound of the same phase."""
    level_2_bound: int
    """The largest live sum of blocks and what crosses phases; equal to ``peak``: level 2 is proven optimal."""
    flat_bound: int
    """The largest live sum of all buffers: what a flat plan could need at best."""

    @property
    def price(self) -> float:
        """How much more it needs than the largest live sum, as a fraction."""
        return self.peak / self.flat_bound - 1 if self.flat_bound else 0.0

    @property
    def proven(self) -> bool:
        """Whether no bi-level plan is smaller: the highest phase of each kind and level 2 reach their lower bounds."""
        return self.peak == self.level_2_bound and all(peak == bound for peak, bound in self.level_1.values())


def plan_bilevel(requests: Requests, clock: Clock, level: Solver) -> BilevelPlan | None:
    """Return the bi-level plan, or None when ``level`` found nothing for some phase before ``clock`` ran out.

    ``level`` solves every level-1 problem. Level 2 takes greedy's placement of a core where it is proven, as it nearly
    always is, and else asks ``level`` for a better one.

    Raises:
        BadInput: when the requests have no phases, or phases that overlap.
    """
    problem = problem_of(requests)
    phase_of = _phase_of(requests, problem)
    offsets = np.zeros(problem.count, dtype=np.int64)
    heights: list[int] = []
    level_1: dict[str, tuple[int, int]] = {}
    known: dict[bytes, Ints] = {}
    by_phase = np.argsort(phase_of, kind="stable")
    begins = np.searchsorted(phase_of[by_phase], np.arange(len(requests.phases) + 1))
    phases = [_inside(problem, buffers) for buffers in np.split(by_phase, begins)[1:-1]]
    keys = [_key(inner) for _, inner in phases]
    distinct = len(set(keys))
    for phase, (buffers, inner), key in zip(requests.phases, phases, keys, strict=True):
        if key not in known:
            # An equal share of the time for each remaining level-1 problem and for level 2.
            share = Clock(clock.left_s / (distinct - len(known) + 1))
            found = level(inner, share, None) if inner.count else offsets[:0]
            if found is None:
                return None
            known[key] = found
        scale = inner.unit_bytes // problem.unit_bytes
        offsets[buffers] = known[key] * scale
        peak = inner.peak(known[key]) * scale
        heights.append(peak)
        level_1[phase.kind] = max(level_1.get(phase.kind, (0, 0)), (peak, inner.lower_bound * scale))
    crossing = np.flatnonzero(phase_of < 0)
    blocks = Problem(
        lower=np.append([p.lower for p in requests.phases], problem.lower[crossing]).astype(np.int64),
        upper=np.append([p.upper for p in requests.phases], problem.upper[crossing]).astype(np.int64),
        size=np.append(heights, problem.size[crossing]).astype(np.int64),
        unit_bytes=problem.unit_bytes,
    )
    placed = _solve_level_2(blocks, clock, level)
    inside = phase_of >= 0
    offsets[inside] += placed[phase_of[inside]]
    offsets[crossing] = placed[len(heights) :]
    return BilevelPlan(
        offsets=offsets,
        peak=problem.peak(offsets),
        level_1=level_1,
        level_2_bound=blocks.lower_bound,
        flat_bound=problem.lower_bound,
    )


def _solve_level_2(blocks: Problem, clock: Clock, level: Solver) -> Ints:
    """Return a placement of the blocks: greedy's where it is proven, else the better of greedy's and ``level``'s."""

    def core(part: Problem, _: Ints) -> Ints:
        first = solve_greedy(part, clock, None)
        assert first is not None  # greedy always finishes one order
        better = None if part.peak(first) <= part.lower_bound else level(part, clock, first)
        return first if better is None else better

    period = period_of(blocks)
    short = None if period is None else short_step(blocks, period)
    placed = place_by_cores(blocks if short is None else short.problem, core, clock=clock)
    assert placed is not None  # every core has greedy's placement
    return placed if short is None else short.repeated(placed)


def _phase_of(requests: Requests, problem: Problem) -> Ints:
    """Return for each buffer the number of the phase that contains its life; -1 if it crosses phases."""
    phases = requests.phases
    hint = "give a plan, or use another solver: a flat one needs no phases"
    if not phases:
        raise BadInput("requests without phases have no bi-level plan", where=requests.name or None, hint=hint)
    for one, other in pairwise(phases):
        if one.upper > other.lower:
            got = f"{one.name} [{one.lower}, {one.upper}) and {other.name} [{other.lower}, {other.upper})"
            raise BadInput("phases overlap or are not in order", where="$.phases", got=got, hint=hint)
    lower = np.array([p.lower for p in phases])
    upper = np.array([p.upper for p in phases])
    number = np.searchsorted(lower, problem.lower, side="right") - 1
    inside = (number >= 0) & (problem.upper <= upper[number])
    return np.where(inside, number, -1)


def _inside(problem: Problem, buffers: Ints) -> tuple[Ints, Problem]:
    """Return the buffers of one phase, and their problem in its own units, with instants from the first birth."""
    first = int(problem.lower[buffers[:1]].sum())  # buffers are listed by birth
    scale = int(np.gcd.reduce(problem.size[buffers], initial=0)) or 1
    inner = Problem(
        lower=problem.lower[buffers] - first,
        upper=problem.upper[buffers] - first,
        size=problem.size[buffers] // scale,
        unit_bytes=problem.unit_bytes * scale,
    )
    return buffers, inner


def _key(inner: Problem) -> bytes:
    """Return what makes two level-1 problems equal: their lives and sizes in units."""
    return np.concatenate((inner.lower, inner.upper, inner.size)).tobytes()
