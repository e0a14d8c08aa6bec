"""The order of ranks in a layout, for prices and for process groups alike.

Ranks count tensor-parallel first, then METP, Ulysses, context-parallel, data-parallel, pipeline stages last, so the
ranks of a group are so many ranks apart:

    tp 1   metp tp   ulysses tp*metp   cp tp*metp*ulysses   dp tp*metp*ulysses*cp   pp what is left
    grads (all that hold the same parameters of a layer: ulysses x cp x dp) tp*metp
    ends (all that hold the same embedding and head: metp x ulysses x cp x dp) tp

    tp 4, cp 2, dp 2:   tp group of rank 0: 0 1 2 3    cp: 0 4    dp: 0 8    grads: 0 4 8 12
"""

from __future__ import annotations

from math import prod

from memo_sim.contract.plan import Layout

AXES = ("tp", "metp", "ulysses", "cp", "dp", "pp")
"""Axes of a layout, neighbouring ranks first."""

TIED = "tied"
"""The group of the first pipeline stage and the last."""
GRADS = "grads"
"""The group that spans ulysses, cp and dp."""
ENDS = "ends"
"""The group that spans metp, ulysses, cp and dp."""


def stride(group: str, layout: Layout) -> int:
    """Return how many ranks apart consecutive ranks of ``group`` (an axis, ``grads`` or ``ends``) are."""
    if group == TIED:
        return stride("pp", layout) * max(1, layout.pp - 1)
    first = {GRADS: "ulysses", ENDS: "metp"}.get(group, group)
    return prod(degree(axis, layout) for axis in AXES[: AXES.index(first)])


def degree(group: str, layout: Layout) -> int:
    """Return how many ranks ``group`` has."""
    if group == TIED:
        return min(2, layout.pp)
    if group == ENDS:
        return layout.metp * layout.replicas
    return layout.replicas if group == GRADS else int(getattr(layout, group))


def coordinate(group: str, layout: Layout, rank: int) -> int:
    """Return which of its group's ranks ``rank`` is."""
    return rank // stride(group, layout) % degree(group, layout)


def members(group: str, layout: Layout, rank: int) -> list[int]:
    """Return the ranks of the group that ``rank`` is in, in order of their coordinates."""
    step = stride(group, layout)
    first = rank - coordinate(group, layout, rank) * step
    return [first + i * step for i in range(degree(group, layout))]
