"""Exact search under one capacity after the other, restarted with other orders and more nodes.

Search of this kind either succeeds soon or is lost for long, and which order succeeds cannot be told before. So it is
restarted over and over, with nodes by Luby's sequence (1, 1, 2, 1, 1, 2, 4, ... times the least), each time with
another rule, an order shaken at random from a fixed seed, and weights that tell where earlier searches failed.

Where sizes leave slack above the lower bound, nobody knows which capacity is within reach. So each restart tries the
bound and one higher: halfway from it to the best peak known and, for each restart that fails, a step nearer to that.
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
"""The least nodes of a search are these, whichever is more: one that never fails still needs a node a buffer."""

SHAKES = (0.05, 0.3, 1.0)
"""By what fraction at most a life counts longer than it is, in orders that are shaken."""

SHARES = (8, 12, 14, 15)
"""How far above the bound the second capacity is, in sixteenths of the way to the best peak known; begun anew after
a success and when all have failed."""

FADE = 0.5
"""What is left of a weight's excess over 1 at the next restart."""


def solve_canonical(
    problem: Problem, clock: Clock, incumbent: Ints | None, *, most_nodes: int | None = None
) -> Ints | None:
    """Return the best placement found in units, or None when none is better than ``incumbent``.

    With ``most_nodes`` it stops there too, at the same place on every machine and under any load.
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
    """Return what ``solve_canonical`` does, and whether it is proven that nothing better exists.

    A capacity that a search exhausts is too small; when only the best peak is left, that is the proof.
    """
    chosen = np.flatnonzero(problem.size)
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
    """Yield nodes, rule and order of one search after the other, without end."""
    random = np.random.default_rng(0)
    life = problem.upper - problem.lower
    opening, *others = rules
    for number in count():
        # The opening rule finds at once what programs pose, and seldom anything later.
        rule = others[number % len(others)] if number and others else opening
        shake = SHAKES[number // len(rules) % len(SHAKES)] if number >= len(rules) else 0.0
        shaken = life * (1 + shake * random.random(problem.count))
        nodes = max(FIRST_NODES, NODES_PER_BUFFER * problem.count) * _luby(number + 1)
        yield nodes, RULES[rule], np.lexsort((-problem.size, -shaken))


def _luby(number: int) -> int:
    """Return the entry of Luby's sequence 1, 1, 2, 1, 1, 2, 4, ... with this number, from 1."""
    while number & (number + 1):
        number -= (1 << (number.bit_length() - 1)) - 1
    return (number + 1) // 2
