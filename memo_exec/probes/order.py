"""The order in which calibration times its operators, so that a pass that the budget cuts leaves a usable profile.

Every table and curve is read between its points, and beyond its ends it is extrapolated. So its ends decide most, then
the middle of what lies between, and so on; all tables get their first point before one gets its second.

    a curve of five points    small 1 . . . . large          timed in the order  large, small, middle, then the rest
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from memo_exec.probes.operators import Operator
from memo_sim.program.ir.work import Attention, Gemm, GroupedGemm, LinearLoss, Rowwise

ENDS = 2
"""Points of every table that are timed before any other: without both ends it says nothing about sizes."""

Table = tuple[object, ...]


def table_of(operator: Operator) -> Table:
    """Return the table or curve of a profile that an operator gives a point of."""
    work = operator.instruction.work
    if isinstance(work, Attention):
        return (
            "attention",
            work.kernel,
            work.dtype,
            "backward" if work.backward else "forward",
            work.head_dim,
            work.mask,
        )
    if isinstance(work, Gemm):
        return "products", work.dtype, work.gemm_pass
    if isinstance(work, LinearLoss):
        return "losses with the classifier inside", work.kernel, work.dtype, work.part
    if isinstance(work, GroupedGemm):
        return "products of experts", work.dtype, work.gemm_pass
    return "row-wise", work.kind if isinstance(work, Rowwise) else operator.instruction.op, operator.rowwise


def by_decision(operators: Iterable[Operator]) -> tuple[list[Operator], int]:
    """Return the operators in the order of what they decide, and how many tables there are.

    So many come first that every table has one point.
    """
    tables: dict[Table, list[Operator]] = defaultdict(list)
    for operator in operators:
        tables[table_of(operator)].append(operator)
    ranked = [_ends_then_middles(sorted(found, key=_size)) for found in tables.values()]
    ordered = [found[i] for i in range(max(map(len, ranked), default=0)) for found in ranked if i < len(found)]
    return ordered, len(ranked)


def _ends_then_middles(found: list[Operator]) -> list[Operator]:
    """Return the largest, the smallest, and then the middle of each gap, the widest gaps first."""
    if len(found) <= ENDS:
        return found[::-1]
    order, gaps = [found[-1], found[0]], deque([(0, len(found) - 1)])
    while gaps:
        first, last = gaps.popleft()
        if (middle := (first + last) // 2) > first:
            order.append(found[middle])
            gaps += [(first, middle), (middle, last)]
    return order


def _size(operator: Operator) -> float:
    work = operator.instruction.work
    if isinstance(work, Attention | Gemm | GroupedGemm | LinearLoss):
        return float(work.flops)
    return float(work.moved_bytes) if isinstance(work, Rowwise) else 0.0


def left_out(operators: list[Operator], measured: int) -> str:
    """Return in words how many points were not measured, and of which tables most; empty if none is missing."""
    missing = Counter(" ".join(map(str, table_of(operator))) for operator in operators[measured:])
    if not missing:
        return ""
    every = Counter(" ".join(map(str, table_of(operator))) for operator in operators)
    most = "; ".join(f"{count} of {every[name]} of {name}" for name, count in missing.most_common(5))
    return f"{missing.total():,} of {len(operators):,} points, for want of time; most of them: {most}"
