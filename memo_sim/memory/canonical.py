"""Restarts the exact search (``skyline``) with other orders, more nodes and other capacities.

Such a search either succeeds soon or takes very long, and no order is best for all problems. So it is restarted again
and again, with node limits by Luby's sequence (1, 1, 2, 1, 1, 2, 4, ... times the smallest limit). Each restart has
another branching rule, an order changed at random from a fixed seed, and weights from the failures of earlier searches.

The lower bound may not be reachable, and the best reachable capacity is unknown. So each restart tries the lower bound
and one higher capacity: first halfway between the bound and the best known peak, and nearer to that peak after each
failed restart.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np

from memo_sim.memory.problem import Clock, Ints, Problem
from memo_sim.memory.reduction import compressed
from memo_sim.memory.skyline import RULES, Rule, Skyline

FIRST_NODES = 1000
NODES_PER_BUFFER = 4
"""The smallest node limit is the larger of the two: a search that never fails needs about one node per buffer."""

MOST_SEARCHED = 10_000
"""More buffers are not searched: a search begins with the set of buffers over each section, which are their square."""

SHAKES = (0.05, 0.3, 1.0)
"""Largest fractions by which random orders count a life longer than it is."""

SHARES = (8, 12, 14, 15)
"""Where the second capacity lies between the bound and the best known peak, in sixteenths. The list starts again after
a success, and when all entries have failed."""

FADE = 0.5
"""The fraction of a weight's excess over 1 that remains at the next restart."""


def solve_canonical(
    problem: Problem, clock: Clock, incumbent: Ints | None, *, most_nodes: int | None = None
) -> Ints | None:
    """Return the best placement found in units, or None when none is better than ``incumbent``.

    With ``most_nodes`` it also stops after that many nodes, which is the same on every machine and under any load.
    """
    return search(problem, clock, incumbent, most_nodes=most_nodes)[0]


def search(
    problem: Problem,
    clock: Clock,
    incumbent: Ints | None,
    *,
    rules: tuple[str, ...] = tuple(RULES),
    most_nodes: int | None = None,
) -> tuple[Ints | None, bool]:
    """Return the result of ``solve_canonical``, and whether it is proven that nothing better exists.

    A search that is exhausted proves that its capacity is too small. When no capacity below the best peak is left, the
    best peak is optimal.
    """
    chosen = np.flatnonzero(problem.size)
    if chosen.size > MOST_SEARCHED:
        return None, False
    if not chosen.size:
        return (np.zeros(problem.count, dtype=np.int64) if incumbent is None else None), True
    whole, problem = problem, compressed(problem.part(chosen))
    best = incumbent
    known = whole.peak(incumbent) if incumbent is not None else int(problem.size.sum()) + 1
    possible = problem.lower_bound
    weight = [1.0] * len(problem.instants)
    spent = 0
    ease = 0
    for many, rule, order in _attempts(problem, rules):
        for sixteenths in (0, SHARES[ease % len(SHARES)]):
            if possible >= known or known <= whole.lower_bound or not clock.left_s:
                return (None if best is incumbent else best), possible >= known
            nodes = many if most_nodes is None else min(many, most_nodes - spent)
            if nodes <= 0:
                return (None if best is incumbent else best), False
            capacity = possible + (known - 1 - possible) * sixteenths // 16
            sky = Skyline(problem, capacity, order, rule, weight=weight)
            found = sky.search(nodes, clock)
            spent += sky.nodes
            if found:
                offsets = np.zeros(whole.count, dtype=np.int64)
                offsets[chosen[order]] = sky.offset
                best, known = offsets, whole.peak(offsets)
                ease = -1
            elif found is False:
                possible = capacity + 1
        ease += 1
        weight = [1 + (w - 1) * FADE for w in weight]
    raise AssertionError("attempts have no end")


def _attempts(problem: Problem, rules: tuple[str, ...]) -> Iterator[tuple[int, Rule, Ints]]:
    """Yield the node limit, the rule and the order of each search, without end."""
    random = np.random.default_rng(0)
    life = problem.upper - problem.lower
    opening, *others = rules
    for number in count():
        # The first rule solves most programs at once, and later restarts seldom profit from it.
        rule = others[number % len(others)] if number and others else opening
        shake = SHAKES[number // len(rules) % len(SHAKES)] if number >= len(rules) else 0.0
        shaken = life * (1 + shake * random.random(problem.count))
        nodes = max(FIRST_NODES, NODES_PER_BUFFER * problem.count) * _luby(number + 1)
        yield nodes, RULES[rule], np.lexsort((-problem.size, -shaken))


def _luby(number: int) -> int:
    """Return entry ``number`` (from 1) of Luby's sequence 1, 1, 2, 1, 1, 2, 4, ..."""
    while number & (number + 1):
        number -= (1 << (number.bit_length() - 1)) - 1
    return (number + 1) // 2
