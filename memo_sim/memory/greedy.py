"""Places buffers by first fit in several orders, and keeps the best result.

Each buffer takes the lowest gap between placed buffers that are live at the same time.

    order        places first
    area         the largest bytes times instants
    size         the largest
    lifetime     the longest life
    birth        the oldest, as an allocator without knowledge of the future would
    wide_large   the longest life (rounded to powers of two), then the largest
    breadth      the buffers that live in the fullest instants

First fit compares each buffer with all placed ones. In the order ``birth`` it does not need to: a list of the free
ranges is enough (``by_birth``), and takes 4 us a buffer.

Where there are many buffers, another order takes seconds, and ``breadth`` comes first: on four interleaved pipelines of
25,000 to 49,000 buffers it ended 0.05 to 0.33 % above the lower bound, the others up to 7 %.

Where the clock cuts the first order of many buffers short, they are placed by ``in_size_classes`` instead, which takes
time in proportion to their number.

Pisarchyk and Lee (arXiv 2001.03288) and XLA's heap simulator use the same family of orders.
"""

from __future__ import annotations

import heapq

import numpy as np

from memo_sim.memory.problem import Clock, Ints, Problem
from memo_sim.program.arena.first_fit import ALIGNMENT_BYTES, FirstFit

CERTAIN = 2_000
"""Up to so many buffers an order is never cut short: it takes a tenth of a second."""

MANY = 25_000
"""From so many buffers on, an order takes a second, and the best one of many steps is tried first."""

CLASSES_S = 5e-6
"""Seconds a buffer that ``in_size_classes`` takes; kept free for it."""

CLASSES_AN_OCTAVE = 8
"""Size classes between a power of two and the next: at most an eighth of a slot is unused."""

LOOK = 128
"""Buffers between two looks at the clock."""

ORDERS = ("area", "size", "lifetime", "wide_large", "breadth", "birth")


def solve_greedy(problem: Problem, clock: Clock, incumbent: Ints | None) -> Ints | None:
    """Return the best result of all orders in units, or None when none is better than ``incumbent``.

    Stops at the lower bound, or what is ``enough``, and when ``clock`` runs out. There is always a placement.
    """
    within = Clock(clock.left_s - CLASSES_S * problem.count) if problem.count > CERTAIN else None
    best = incumbent
    most = problem.peak(incumbent) if incumbent is not None else None
    for order in sorted(ORDERS, key="breadth".__ne__) if problem.count >= MANY else ORDERS:
        if best is not None and most is not None and (most <= problem.lower_bound or clock.left_s == 0):
            break
        chosen = order_of(problem, order)
        offsets = by_birth(problem, chosen, within) if order == "birth" else first_fit(problem, chosen, within)
        if offsets is None:
            break
        peak = problem.peak(offsets)
        if most is None or peak < most:
            best, most = offsets, peak
    if best is None:
        return in_size_classes(problem)
    return None if best is incumbent else best


def order_of(problem: Problem, name: str) -> Ints:
    """Return the buffers in the order ``name``; ties go to the larger, then to the older buffer."""
    life = problem.upper - problem.lower
    age = np.arange(problem.count)
    if name == "area":
        keys = (age, -problem.size, -problem.size * life)
    elif name == "size":
        keys = (age, -life, -problem.size)
    elif name == "lifetime":
        keys = (age, -problem.size, -life)
    elif name == "wide_large":
        keys = (age, -problem.size, -np.frexp(life.astype(float))[1])
    elif name == "breadth":
        keys = (age, -problem.size, -_fullest(problem))
    else:
        keys = (age, -problem.size, problem.lower)
    order: Ints = np.lexsort(keys)
    return order


def _fullest(problem: Problem) -> Ints:
    """Return for each buffer the largest sum of live sizes during its life."""
    first = np.searchsorted(problem.instants, problem.lower)
    last = np.searchsorted(problem.instants, problem.upper)
    live = problem.live
    return np.array([live[a:b].max() for a, b in zip(first.tolist(), last.tolist(), strict=True)], dtype=np.int64)


def in_size_classes(problem: Problem) -> Ints:
    """Return offsets in units: buffers in the order of birth, each in a slot of its size class that is free again."""
    offsets = np.zeros(problem.count, dtype=np.int64)
    order = np.lexsort((-problem.size, problem.lower))
    free: dict[int, list[int]] = {}
    living: list[tuple[int, int, int]] = []  # death, slot, its offset
    top = 0
    rows = (problem.lower[order].tolist(), problem.upper[order].tolist(), problem.size[order].tolist())
    for buffer, lower, upper, size in zip(order.tolist(), *rows, strict=True):
        while living and living[0][0] <= lower:
            _, slot, offset = heapq.heappop(living)
            free.setdefault(slot, []).append(offset)
        slot = _size_class(size)
        if free.get(slot):
            offset = free[slot].pop()
        else:
            offset, top = top, top + slot
        offsets[buffer] = offset
        heapq.heappush(living, (upper, slot, offset))
    return offsets


def _size_class(size: int) -> int:
    """Return the least number of at most four significant bits that is not below ``size``."""
    step = 1 << max(0, size.bit_length() - CLASSES_AN_OCTAVE.bit_length())
    return -(-size // step) * step


def first_fit(problem: Problem, order: Ints, clock: Clock | None = None) -> Ints | None:
    """Return offsets in units where each buffer of ``order`` takes the lowest gap that is free during its life.

    None when ``clock`` runs out first.
    """
    offsets = np.zeros(problem.count, dtype=np.int64)
    return offsets if fitted(problem, order, offsets, clock=clock) == len(order) else None


def by_birth(problem: Problem, order: Ints, clock: Clock | None = None) -> Ints | None:
    """Return what ``first_fit`` returns for the order ``birth``, from a list of the free ranges.

    All placed buffers are older, so those that live on at a birth are those that live beside the new one.
    """
    space, offsets = FirstFit(), np.zeros(problem.count, dtype=np.int64)
    ends: list[tuple[int, int, int]] = []  # death, offset and size
    rows = (order.tolist(), problem.lower[order].tolist(), problem.upper[order].tolist(), problem.size[order].tolist())
    for number, (buffer, lower, upper, size) in enumerate(zip(*rows, strict=True)):
        if clock is not None and number % LOOK == 0 and clock.left_s == 0:
            return None
        while ends and ends[0][0] <= lower:
            _, offset, length = heapq.heappop(ends)
            space.give(offset, length)
        if size:
            found = space.take(size * ALIGNMENT_BYTES)
            assert found is not None  # without a limit there is room
            offsets[buffer] = found // ALIGNMENT_BYTES
            heapq.heappush(ends, (upper, found, size * ALIGNMENT_BYTES))
    return offsets


def fitted(
    problem: Problem,
    order: Ints,
    offsets: Ints,
    *,
    beside: Ints | None = None,
    base: int = 0,
    clock: Clock | None = None,
) -> int:
    """Write offsets of the buffers of ``order`` by first fit from ``base`` up; those of ``beside`` are placed already.

    Returns the number of buffers that are placed: all but those for which ``clock`` leaves no time.
    """
    # Placed buffers by rising offset; rows: birth, death, offset, end.
    first = order[:0] if beside is None else beside[np.argsort(offsets[beside], kind="stable")]
    first = first[problem.size[first] > 0]
    count = len(first)
    placed = np.empty((4, count + len(order)), dtype=np.int64)
    begins = offsets[first]
    placed[:, :count] = problem.lower[first], problem.upper[first], begins, begins + problem.size[first]
    rows = zip(
        order.tolist(),
        problem.lower[order].tolist(),
        problem.upper[order].tolist(),
        problem.size[order].tolist(),
        strict=True,
    )
    for number, (buffer, lower, upper, size) in enumerate(rows):
        if clock is not None and number % LOOK == 0 and clock.left_s == 0:
            return number
        if not size:
            offsets[buffer] = base
            continue
        near = np.flatnonzero((placed[0, :count] < upper) & (placed[1, :count] > lower))
        offset = _lowest_gap(placed[2, near], placed[3, near], size, base)
        offsets[buffer] = offset
        at = int(np.searchsorted(placed[2, :count], offset))
        placed[:, at + 1 : count + 1] = placed[:, at:count].copy()
        placed[:, at] = (lower, upper, offset, offset + size)
        count += 1
    return len(order)


def _lowest_gap(begins: Ints, ends: Ints, size: int, base: int) -> int:
    """Return the lowest address from ``base`` up with ``size`` free units between intervals sorted by their begin."""
    if not len(begins):
        return base
    reach = np.empty(len(ends) + 1, dtype=np.int64)
    reach[0] = base
    np.maximum.accumulate(ends, out=reach[1:])
    fits = begins - reach[:-1] >= size
    first = int(fits.argmax())
    return int(reach[first]) if fits[first] else int(reach[-1])
