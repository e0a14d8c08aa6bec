"""Exact search under one capacity after the other, restarted with other orders and ever more nodes.

Search of this kind either succeeds soon or is lost for long, and which order succeeds cannot be told before. So every
rule and order gets few nodes, then four times as many, and so on; some orders are shaken at random, from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memo_sim.memory.decompose import compressed
from memo_sim.memory.problem import Clock, Ints, Problem
from memo_sim.memory.skyline import RULES, Rule, Skyline

FIRST_NODES = 1000
GROWTH = 4
SHAKES = (0.05, 0.3, 1.0)
"""By what fraction at most a life counts longer than it is, in orders that are shaken."""


def solve_canonical(problem: Problem, clock: Clock, incumbent: Ints | None) -> Ints | None:
    """Return the best placement found in units, or None when none is better than ``incumbent``."""
    return search(problem, clock, incumbent)[0]


def search(problem: Problem, clock: Clock, incumbent: Ints | None) -> tuple[Ints | None, bool]:
    """Return what ``solve_canonical`` does, and whether it is proven that nothing better exists.

    Every round tries the lower bound, then, as long as that fails, a capacity halfway to the best peak known. A
    capacity that a search exhausts is too small; when only the best peak is left, that is the proof.
    """
    chosen = np.flatnonzero(problem.size)
    whole, problem = problem, compressed(problem.part(chosen))
    best = incumbent
    known = whole.peak(incumbent) if incumbent is not None else int(problem.size.sum()) + 1
    possible = problem.lower_bound
    for nodes, rule, order in _attempts(problem):
        for capacity in {possible: None, (possible + known) // 2: None}:
            if not possible <= capacity < known:
                continue
            sky = Skyline(problem, capacity, order, rule)
            found = sky.search(nodes, clock)
            if found:
                offsets = np.zeros(whole.count, dtype=np.int64)
                offsets[chosen[order]] = sky.offset
                best, known = offsets, whole.peak(offsets)
                break
            if found is False:
                possible = capacity + 1
        if possible >= known or known <= whole.lower_bound or not clock.left_s:
            break
    return (None if best is incumbent else best), possible >= known


def _attempts(problem: Problem) -> Iterator[tuple[int, Rule, Ints]]:
    """Yield nodes, rule and order of one search after the other, without end."""
    random = np.random.default_rng(0)
    life = problem.upper - problem.lower
    fullest = np.array(
        [problem.live[a:b].max() for a, b in zip(problem.lower.tolist(), problem.upper.tolist(), strict=True)]
    )
    by_life = np.lexsort((-problem.size, -life))
    by_load = np.lexsort((-problem.size, -life, -fullest))
    nodes = FIRST_NODES
    while True:
        for rule in RULES.values():
            yield nodes, rule, by_life
            yield nodes, rule, by_load
            shaken = life * (1 + random.choice(SHAKES) * random.random(problem.count))
            yield nodes, rule, np.lexsort((-problem.size, -shaken))
        nodes *= GROWTH
