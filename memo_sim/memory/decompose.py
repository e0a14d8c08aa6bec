"""Takes a problem apart without loss (``reduction``) and solves equal cores once: micro-batches and layers repeat."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memo_sim.memory.problem import Clock, Ints, Problem, Solver
from memo_sim.memory.reduction import place_by_cores


def solve_decomposed(problem: Problem, clock: Clock, incumbent: Ints | None, solver: Solver) -> Ints | None:
    """Return offsets in units made of what ``solver`` finds for the cores of ``problem``.

    None when a core has no placement, or when all together they are not below ``incumbent``. Cores are equal when
    their lives (counted in births) and sizes are, in whatever order.
    """
    known: dict[tuple[bytes, int], Ints] = {}

    def solve(core: Problem, buffers: Ints) -> Ints | None:
        core = compressed(core)
        order = np.lexsort((core.size, core.upper, core.lower))
        columns = np.stack((core.lower, core.upper, core.size))[:, order]
        key = (columns.tobytes(), core.enough)
        if key not in known:
            found = solver(core.part(order), clock, None)
            if found is None:
                return None
            known[key] = found
        offsets = np.empty(core.count, dtype=np.int64)
        offsets[order] = known[key]
        return offsets

    offsets = place_by_cores(problem, solve)
    if offsets is None or (incumbent is not None and problem.peak(offsets) >= problem.peak(incumbent)):
        return None
    return offsets


def compressed(problem: Problem) -> Problem:
    """Return ``problem`` with instants counted by births: those between two births need no more than the first."""
    return replace(
        problem,
        lower=np.searchsorted(problem.instants, problem.lower),
        upper=np.searchsorted(problem.instants, problem.upper),
    )
