"""Takes a problem apart without loss (``reduction``) and solves equal cores once: micro-batches and layers repeat."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memo_sim.memory.problem import Clock, Ints, Problem, Solver
from memo_sim.memory.reduction import reduced


def solve_decomposed(problem: Problem, clock: Clock, incumbent: Ints | None, solver: Solver) -> Ints | None:
    """Return offsets in units made of what ``solver`` finds for the cores of ``problem``.

    None when a core has no placement, or when all together they are not below ``incumbent``. Cores are equal when
    their lives (counted in births) and sizes are, in whatever order. They are solved smallest first, each within the
    share of the time that its buffers are of those still waiting: one that is out of reach does not starve the others.
    """
    reduction = reduced(problem)
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
        found = solver(core, Clock(clock.left_s * core.count / waiting), None)
        if found is None:
            return None
        known[key] = found
        waiting -= core.count
    offsets = reduction.put_together([known[key][np.argsort(o)] for key, o in zip(keys, orders, strict=True)])
    if incumbent is not None and problem.peak(offsets) >= problem.peak(incumbent):
        return None
    return offsets


def compressed(problem: Problem) -> Problem:
    """Return ``problem`` with instants counted by births: those between two births need no more than the first."""
    return replace(
        problem,
        lower=np.searchsorted(problem.instants, problem.lower),
        upper=np.searchsorted(problem.instants, problem.upper),
    )
