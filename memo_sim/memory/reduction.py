"""Makes a placement problem smaller without losing its optimum, so that a solver sees only its hard cores.

Four steps, repeated until nothing changes; each keeps the least peak what it is:

1. Buffers that surely fit later are set aside (as colours of small degree are in graph colouring). If k buffers that
   live beside one take n units of C, the C - n free ones lie in at most k + 1 gaps, so one of s units fits into some
   gap when C - n > (k + 1)(s - 1). C is the largest live sum, which no placement undercuts.
2. Where nothing lives across an instant, the buffers before and after it are two problems, and the peak is the larger.
3. A buffer that lives beside all others of its part splits the addresses: what is below it can move above it. So it
   lies at the bottom, and the rest is a problem of its own above it.
4. What is left is a core. Sizes are divided by what all of them share.

    [ a ][   b   ]      c lives beside all and goes to the bottom; then time falls apart at the bar,
    [      c     ]  ->  and each of a and b lives beside all of its part: nothing is left to solve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from memo_sim.memory.problem import Ints, Problem

Core = Callable[[Problem, Ints], Ints | None]
"""Places a core, a problem in its own units, given the numbers of its buffers in the whole problem."""

CRUMBS = 32
"""A crumb is no larger than the largest buffer divided by this."""


def place_by_cores(problem: Problem, core: Core, *, bounded: bool = True) -> Ints | None:
    """Return offsets in units of ``problem``, or None when ``core`` found none for some core.

    The placement is optimal when each core's is, or keeps within that core's ``lower_bound``, which holds what other
    parts need anyway. Without ``bounded`` the live sum is not used at all: no step 1, and cores know no ``enough``.
    """
    reduction = reduced(problem, bounded=bounded)
    found = []
    for part in reduction.parts:
        offsets = core(part.core, part.buffers)
        if offsets is None:
            return None
        found.append(offsets)
    return reduction.put_together(found)


@dataclass(frozen=True, eq=False)
class Part:
    """A core, the numbers of its ``buffers`` in the whole problem, and the address ``base`` of its lowest unit."""

    core: Problem
    buffers: Ints
    base: int


@dataclass(frozen=True, eq=False)
class Reduction:
    """A problem taken apart: the cores, and how their placements make one of the whole."""

    problem: Problem
    parts: list[Part]
    bottoms: Ints
    """Offsets of what lies at the bottom of its part, 0 for all others."""
    returns: list[Return]
    """What was set aside, in the order in which it comes back."""

    def put_together(self, found: Sequence[Ints]) -> Ints:
        """Return offsets in units of ``problem``, given those of each of ``parts`` in its own units."""
        offsets = self.bottoms.copy()
        for part, inner in zip(self.parts, found, strict=True):
            offsets[part.buffers] = part.base + inner * (part.core.unit_bytes // self.problem.unit_bytes)
        for back in self.returns:
            put_back(self.problem, back.kept, back.aside, offsets, base=back.base)
        return offsets


def crumbs_of(problem: Problem) -> Ints:
    """Return the buffers that are small beside the largest, largest first: they rarely decide how the others lie."""
    crumbs = np.flatnonzero(problem.size * CRUMBS <= problem.size.max(initial=0))
    largest_first: Ints = crumbs[np.argsort(-problem.size[crumbs], kind="stable")]
    return largest_first


def put_back(problem: Problem, placed: Ints, missing: Ints, offsets: Ints, base: int = 0) -> None:
    """Write the offset of each of ``missing``, one after the other the lowest from ``base`` free beside ``placed``."""
    for buffer in missing.tolist():
        offsets[buffer] = _lowest_gap(problem, placed, buffer, offsets, base)
        placed = np.append(placed, buffer)


def sections(problem: Problem) -> list[Ints]:
    """Return the sets of buffers that live at one instant, without those that are part of another."""
    later = np.append(problem.instants[1:], problem.upper.max(initial=0))
    found = []
    for instant, following in zip(problem.instants, later, strict=True):
        if bool(np.any((problem.upper > instant) & (problem.upper <= following))):
            found.append(np.flatnonzero((problem.lower <= instant) & (problem.upper > instant)))
    return found


@dataclass(frozen=True, eq=False)
class _Scope:
    """Buffers to place from address ``base`` up; to end within ``enough`` units of it needs no improvement."""

    buffers: Ints
    base: int
    enough: int


@dataclass(frozen=True, eq=False)
class Return:
    """Buffers that were set aside and come back beside ``kept`` once these are placed."""

    aside: Ints
    kept: Ints
    base: int


def reduced(problem: Problem, *, bounded: bool = True) -> Reduction:
    """Take ``problem`` apart, without the live sum unless ``bounded``. A stack: lives nest thousands deep."""
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
            work.append(Return(aside, kept, task.base))  # below its parts in the stack, so after them
        for chosen in _parts(problem, kept):
            scope = _Scope(chosen, task.base, task.enough)
            rest = _above_bottom(problem, scope, offsets)
            if rest is not None:
                work.append(rest)
            else:
                parts.append(_core(problem, scope))
    return Reduction(problem, parts, offsets, returns)


def _above_bottom(problem: Problem, part: _Scope, offsets: Ints) -> _Scope | None:
    """Place what lives beside all others of ``part`` and return the scope above it; None when nothing does."""
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
    """Return what is kept, and what surely fits into ``capacity`` afterwards, in the order in which to put it back.

    That is batch by batch, the last first. Within a batch each buffer is judged with all the others beside it.
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
    """Yield the buffers between two instants across which nothing lives."""
    order = chosen[np.argsort(problem.lower[chosen], kind="stable")]
    lasting = np.maximum.accumulate(problem.upper[order])
    cuts = np.flatnonzero(problem.lower[order][1:] >= lasting[:-1]) + 1
    for part in np.split(order, cuts):
        if part.size:
            yield np.sort(part)


def _lowest_gap(problem: Problem, placed: Ints, buffer: int, offsets: Ints, base: int) -> int:
    """Return the lowest address from ``base`` up at which ``buffer`` fits beside what is placed."""
    beside = placed[(problem.lower[placed] < problem.upper[buffer]) & (problem.upper[placed] > problem.lower[buffer])]
    address = base
    for other in beside[np.argsort(offsets[beside], kind="stable")]:
        if offsets[other] >= address + problem.size[buffer]:
            break
        address = max(address, int(offsets[other] + problem.size[other]))
    return address
