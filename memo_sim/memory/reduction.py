"""Reduces a placement problem to its hard cores without losing the optimum, and solves equal cores once.

Four steps repeat until nothing changes; none of them changes the least possible peak:

1. Set aside buffers that surely fit later (as graph colouring does with nodes of small degree). Suppose k buffers that
   are live together with a buffer take n of C units. Then the other C - n units lie in at most k + 1 gaps, and a buffer
   of s units fits into one of them if C - n > (k + 1)(s - 1). C is the largest sum of live sizes, the lower bound.
2. Split the problem at an instant across which no buffer lives; the peak is the larger of the two.
3. A buffer that is live together with all others of its part goes to the bottom: whatever lies below it can move above
   it. The rest is a separate problem above it.
4. What is left is a core. Its sizes are divided by their greatest common divisor.

    [ a ][   b   ]      c is live together with all others and goes to the bottom; then the problem splits
    [      c     ]  ->  between a and b, and each of them is alone in its part: nothing is left to solve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memo_sim.memory.greedy import fitted, in_size_classes
from memo_sim.memory.problem import Clock, Ints, Problem, Solver

Core = Callable[[Problem, Ints], Ints | None]
"""Places a core (a problem in its own units), given the numbers of its buffers in the whole problem."""

FINISH_SHARE, FINISH_S = 0.05, 0.5
"""Of a time limit, or seconds: for the larger of both, buffers that were set aside are still put back after it."""

MANY_ASIDE = 5_000
"""So many buffers take a tenth of a second to put back: time for more is reserved."""

RESERVE = 1.25
"""How many times as long as in a trial buffers may take to be put back; other load of the machine changes."""

CRUMBS = 32
"""A crumb is a buffer of at most the largest size divided by this."""


def place_by_cores(problem: Problem, core: Core, *, bounded: bool = True, clock: Clock | None = None) -> Ints | None:
    """Return offsets in units of ``problem``, or None when ``core`` finds none for some core.

    The placement is optimal if each core's placement is optimal or within that core's ``lower_bound``. Without
    ``bounded``, sums of live sizes are not used: there is no step 1, and the cores' ``enough`` is 0. Buffers that
    ``clock`` leaves no time to put back are placed above all others.
    """
    reduction = reduced(problem, bounded=bounded)
    found = []
    for part in reduction.parts:
        offsets = core(part.core, part.buffers)
        if offsets is None:
            return None
        found.append(offsets)
    return reduction.put_together(found, clock)


def solve_decomposed(problem: Problem, clock: Clock, incumbent: Ints | None, solver: Solver) -> Ints | None:
    """Return offsets in units, made from what ``solver`` finds for the cores of ``problem``.

    Returns None when a core has no placement, or when the result is not better than ``incumbent``. Two cores are equal
    if their lives (counted in births) and sizes are equal in any order; micro-batches and layers make many equal cores.
    Cores are solved smallest first. Each gets a share of the time left in proportion to its buffers, so that a hard
    core leaves time for the others. The time that many buffers need to be put back is found by a trial, and reserved.
    """
    reduction = reduced(problem)
    finishing = Clock(clock.left_s + max(FINISH_SHARE * clock.limit_s, FINISH_S))
    reserved_s = RESERVE * _finish_s(reduction, clock)
    solving = Clock(clock.left_s - reserved_s)
    distinct: dict[tuple[bytes, int], Problem] = {}
    orders = []
    keys = []
    for part in reduction.parts:
        core = compressed(part.core)
        order = np.lexsort((core.size, core.upper, core.lower))
        columns = np.stack((core.lower, core.upper, core.size))[:, order]
        key = (columns.tobytes(), core.enough)
        distinct.setdefault(key, core.part(order))
        orders.append(order)
        keys.append(key)
    known: dict[tuple[bytes, int], Ints] = {}
    waiting = sum(core.count for core in distinct.values())
    for key, core in sorted(distinct.items(), key=lambda item: item[1].count):
        found = solver(core, Clock(solving.left_s * core.count / waiting), None)
        if found is None:
            return None
        known[key] = found
        waiting -= core.count
    offsets = reduction.put_together(
        [known[key][np.argsort(o)] for key, o in zip(keys, orders, strict=True)], finishing
    )
    if incumbent is not None and problem.peak(offsets) >= problem.peak(incumbent):
        return None
    return offsets


def _finish_s(reduction: Reduction, clock: Clock) -> float:
    """Return how many seconds it takes to put many buffers back; 0 for few. A trial puts them beside quick cores."""
    if not reduction.parts or sum(len(back.aside) for back in reduction.returns) <= MANY_ASIDE:
        return 0.0
    trial = Clock(clock.left_s / 2)
    reduction.put_together([in_size_classes(part.core) for part in reduction.parts], trial)
    return trial.elapsed_s


def compressed(problem: Problem) -> Problem:
    """Return ``problem`` with instants counted by births: between two births, live sizes do not grow."""
    return replace(
        problem,
        lower=np.searchsorted(problem.instants, problem.lower),
        upper=np.searchsorted(problem.instants, problem.upper),
    )


@dataclass(frozen=True, eq=False)
class Part:
    """A core, the numbers of its ``buffers`` in the whole problem, and the address ``base`` of its lowest unit."""

    core: Problem
    buffers: Ints
    base: int


@dataclass(frozen=True, eq=False)
class Reduction:
    """A problem reduced to cores, and how to combine their placements into one of the whole problem."""

    problem: Problem
    parts: list[Part]
    bottoms: Ints
    """Offsets of the buffers at the bottom of their part; 0 for all others."""
    returns: list[Return]
    """The buffers that were set aside, in the order in which they come back."""

    def put_together(self, found: Sequence[Ints], clock: Clock | None = None) -> Ints:
        """Return offsets in units of ``problem``, given those of each of ``parts`` in its own units.

        What ``clock`` leaves no time for is placed above everything else.
        """
        offsets = self.bottoms.copy()
        for part, inner in zip(self.parts, found, strict=True):
            offsets[part.buffers] = part.base + inner * (part.core.unit_bytes // self.problem.unit_bytes)
        for back in self.returns:
            put_back(self.problem, back.kept, back.aside, offsets, base=back.base, clock=clock)
        return offsets


def crumbs_of(problem: Problem) -> Ints:
    """Return the buffers that are small compared with the largest, largest first: they rarely affect the others."""
    crumbs = np.flatnonzero(problem.size * CRUMBS <= problem.size.max(initial=0))
    largest_first: Ints = crumbs[np.argsort(-problem.size[crumbs], kind="stable")]
    return largest_first


def put_back(
    problem: Problem, placed: Ints, missing: Ints, offsets: Ints, *, base: int = 0, clock: Clock | None = None
) -> None:
    """Place each buffer of ``missing`` in turn at the lowest free address from ``base`` up, and write its offset.

    Those for which ``clock`` leaves no time go above all others, in size classes.
    """
    done = fitted(problem, missing, offsets, beside=placed, base=base, clock=clock)
    if (rest := missing[done:]).size:
        above = np.append(placed, missing[:done])
        top = int((offsets[above] + problem.size[above]).max(initial=base))
        offsets[rest] = top + in_size_classes(problem.part(rest))


def sections(problem: Problem) -> list[Ints]:
    """Return the sets of buffers that are live at one instant, without subsets of other such sets."""
    later = np.append(problem.instants[1:], problem.upper.max(initial=0))
    found = []
    for instant, following in zip(problem.instants, later, strict=True):
        if bool(np.any((problem.upper > instant) & (problem.upper <= following))):
            found.append(np.flatnonzero((problem.lower <= instant) & (problem.upper > instant)))
    return found


@dataclass(frozen=True, eq=False)
class _Scope:
    """Buffers to place from address ``base`` up; a height of ``enough`` units needs no improvement."""

    buffers: Ints
    base: int
    enough: int


@dataclass(frozen=True, eq=False)
class Return:
    """Buffers that were set aside; they come back after ``kept`` is placed."""

    aside: Ints
    kept: Ints
    base: int


def reduced(problem: Problem, *, bounded: bool = True) -> Reduction:
    """Reduce ``problem``; use sums of live sizes only if ``bounded``.

    Works with a stack instead of recursion, because lives can nest thousands deep.
    """
    parts: list[Part] = []
    returns: list[Return] = []
    offsets = np.zeros(problem.count, dtype=np.int64)
    whole = _Scope(np.arange(problem.count), base=0, enough=problem.lower_bound if bounded else 0)
    work: list[_Scope | Return] = [whole]
    while work:
        task = work.pop()
        if isinstance(task, Return):
            returns.append(task)
            continue
        kept, aside = _set_aside(problem, task.buffers, task.enough)
        if aside.size:
            work.append(Return(aside, kept, task.base))  # below its parts on the stack, so it comes after them
        for chosen in _parts(problem, kept):
            scope = _Scope(chosen, task.base, task.enough)
            rest = _above_bottom(problem, scope, offsets)
            if rest is not None:
                work.append(rest)
            else:
                parts.append(_core(problem, scope))
    return Reduction(problem, parts, offsets, returns)


def _above_bottom(problem: Problem, part: _Scope, offsets: Ints) -> _Scope | None:
    """Place the buffers that are live together with all others of ``part`` at its bottom.

    Returns the scope above them, or None if there are no such buffers.
    """
    lower, upper = problem.lower[part.buffers], problem.upper[part.buffers]
    everywhere = (lower < upper.min()) & (upper > lower.max())
    if not everywhere.any():
        return None
    bottom = part.buffers[everywhere]
    ends = np.cumsum(problem.size[bottom])
    offsets[bottom] = part.base + ends - problem.size[bottom]
    height = int(ends[-1])
    return _Scope(part.buffers[~everywhere], part.base + height, max(0, part.enough - height))


def _core(problem: Problem, part: _Scope) -> Part:
    size = problem.size[part.buffers]
    unit = int(np.gcd.reduce(size))  # not 0: empty buffers are set aside
    core = Problem(
        lower=problem.lower[part.buffers],
        upper=problem.upper[part.buffers],
        size=size // unit,
        unit_bytes=problem.unit_bytes * unit,
        enough=part.enough // unit,
    )
    return Part(core, part.buffers, part.base)


def _set_aside(problem: Problem, chosen: Ints, capacity: int) -> tuple[Ints, Ints]:
    """Return the kept buffers, and those that surely fit into ``capacity`` later, in the order of putting them back.

    Buffers are set aside in batches, and the last batch comes back first. Within a batch, each buffer is judged as if
    all others of the batch were placed.
    """
    batches: list[Ints] = []
    while True:
        lower, upper, size = problem.lower[chosen], problem.upper[chosen], problem.size[chosen]
        by_birth, by_death = np.argsort(lower), np.argsort(upper)
        born = np.searchsorted(lower[by_birth], upper, side="left")
        dead = np.searchsorted(upper[by_death], lower, side="right")
        units_born = np.append(0, np.cumsum(size[by_birth]))[born]
        units_dead = np.append(0, np.cumsum(size[by_death]))[dead]
        beside = born - dead - 1
        free = capacity - (units_born - units_dead - size)
        fits = (size == 0) | ((capacity > 0) & (free > (beside + 1) * (size - 1)))
        if not fits.any():
            return chosen, np.concatenate([*reversed(batches), chosen[:0]])
        batches.append(chosen[fits])
        chosen = chosen[~fits]


def _parts(problem: Problem, chosen: Ints) -> Iterator[Ints]:
    """Yield the groups of buffers between instants across which no buffer lives."""
    order = chosen[np.argsort(problem.lower[chosen], kind="stable")]
    lasting = np.maximum.accumulate(problem.upper[order])
    cuts = np.flatnonzero(problem.lower[order][1:] >= lasting[:-1]) + 1
    for part in np.split(order, cuts):
        if part.size:
            yield np.sort(part)
