"""Takes a problem apart without loss: what always lives goes to the bottom, and idle instants cut the rest.

    address
      ^   [ part ]      [ part, equal to the first ]
      |   [part ][part]
      |   [ lives over all of it ]
      +-----------|-----------------|-----> instants

A buffer that lives over a whole part may lie at its bottom: in any placement, take it out, let what lay below it rise
by its size, and nothing else moves. Parts that nothing joins do not see each other. Both steps repeat inside each part.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memo_sim.memory.problem import Clock, Ints, Problem, Solver


def solve_decomposed(problem: Problem, clock: Clock, incumbent: Ints | None, solver: Solver) -> Ints | None:
    """Return offsets in units that ``solver`` found for the parts, or None when a part has none that helps.

    Parts are solved from the one with the largest bound down, each no further than the peak that is needed anyway;
    parts with the same lives and sizes are solved once.
    """
    offsets = np.zeros(problem.count, dtype=np.int64)
    parts = decompose(problem, offsets)
    known: dict[bytes, Ints] = {}
    needed = problem.lower_bound
    for part, base in sorted(parts, key=lambda p: -(p[1] + problem.part(p[0]).lower_bound)):
        inner = replace(compressed(problem.part(part)), enough=needed - base)
        order = np.lexsort((inner.size, inner.upper, inner.lower))
        key = np.stack((inner.lower, inner.upper, inner.size))[:, order].tobytes()
        if key not in known:
            start = None if incumbent is None else incumbent[part] - incumbent[part].min()
            found = solver(inner.part(order), clock, None if start is None else start[order])
            found = found if found is not None or start is None else start[order]
            if found is None:
                return None
            known[key] = found
        offsets[part[order]] = base + known[key]
        needed = max(needed, problem.part(part).peak(offsets[part]))
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


def decompose(problem: Problem, offsets: Ints) -> list[tuple[Ints, int]]:
    """Return the parts as buffers and the address at which each part begins; what needs no search gets its offset.

    Offsets of the buffers of a part are left as they are.
    """
    parts = []
    work = [(np.flatnonzero(problem.size), 0)]
    while work:
        chosen, base = work.pop()
        if not len(chosen):
            continue
        lower, upper = problem.lower[chosen], problem.upper[chosen]
        always = (lower == lower.min()) & (upper == upper.max())
        stacked = chosen[always]
        offsets[stacked] = base + np.cumsum(problem.size[stacked]) - problem.size[stacked]
        base += int(problem.size[stacked].sum())
        rest = chosen[~always]
        pieces = _cut(problem, rest)
        if len(pieces) > 1 or (len(stacked) and pieces):
            work += [(piece, base) for piece in pieces]
        elif pieces:
            parts.append((rest, base))
    return parts


def _cut(problem: Problem, chosen: Ints) -> list[Ints]:
    """Return ``chosen`` cut at the instants that none of them crosses."""
    ordered = chosen[np.argsort(problem.lower[chosen], kind="stable")]
    latest = np.maximum.accumulate(problem.upper[ordered])
    cuts = np.flatnonzero(problem.lower[ordered][1:] >= latest[:-1]) + 1
    return [piece for piece in np.split(ordered, cuts) if len(piece)]
