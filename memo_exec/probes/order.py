"""The tables that operators give points of, and the order in which calibration times them.

A pass that the budget cuts has to leave a usable profile. Every table and curve is read between its points, and beyond
its ends it is extrapolated. So its ends decide most, then the middle of what lies between, and so on; all tables get
their first point before one gets its second.

    a curve of five points    small 1 . . . . large          timed in the order  large, small, middle, then the rest
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Container, Sequence

from memo_exec.probes.operators import Operator
from memo_sim.program.ir.work import Attention, Gemm, GroupedGemm, LinearLoss, Rowwise

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


def kind_of(operator: Operator) -> Table:
    """Return what an operator has in common with those whose times say how long it takes: kernels of one library."""
    table, work = table_of(operator), operator.instruction.work
    if isinstance(work, Attention | Gemm | LinearLoss | GroupedGemm):
        return table[:3] if isinstance(work, Attention | LinearLoss) else table[:2]
    return table[0], operator.rowwise


def tables_of(operators: Sequence[Operator]) -> dict[Table, list[int]]:
    """Return the points of every table, as indices of ``operators``, the smallest first."""
    tables: dict[Table, list[int]] = defaultdict(list)
    for i, operator in enumerate(operators):
        tables[table_of(operator)].append(i)
    return {table: sorted(points, key=lambda i: size_of(operators[i])) for table, points in tables.items()}


def by_decision(operators: Sequence[Operator]) -> list[Operator]:
    """Return the operators in the order of what they decide: one point of every table before the second of any."""
    ranked = [_ends_then_middles(points) for points in tables_of(operators).values()]
    order = [points[i] for i in range(max(map(len, ranked), default=0)) for points in ranked if i < len(points)]
    return [operators[i] for i in order]


def _ends_then_middles(found: list[int]) -> list[int]:
    """Return the largest, the smallest, and then the middle of each gap, the widest gaps first."""
    if len(found) == 1:
        return found
    order, gaps = [found[-1], found[0]], deque([(0, len(found) - 1)])
    while gaps:
        first, last = gaps.popleft()
        if (middle := (first + last) // 2) > first:
            order.append(found[middle])
            gaps += [(first, middle), (middle, last)]
    return order


def size_of(operator: Operator) -> float:
    """Return an operator's size: the FLOPs of a product or an attention call, the bytes that a row-wise one moves."""
    work = operator.instruction.work
    if isinstance(work, Attention | Gemm | GroupedGemm | LinearLoss):
        return float(work.flops)
    return float(work.moved_bytes) if isinstance(work, Rowwise) else 0.0


def left_out(operators: Sequence[Operator], measured: Container[int]) -> str:
    """Return in words how many points were not measured, of which tables most, and which tables end too early.

    Empty if none is missing. ``measured`` has the indices of those that were measured.
    """
    tables = tables_of(operators)
    missing = Counter({_words(table): sum(i not in measured for i in points) for table, points in tables.items()})
    if not missing.total():
        return ""
    every = {_words(table): len(points) for table, points in tables.items()}
    most = "; ".join(f"{count} of {every[name]} of {name}" for name, count in missing.most_common(5) if count)
    text = f"{missing.total():,} of {len(operators):,} points, for want of time; most of them: {most}"
    early = [_words(table) for table, points in tables.items() if points[-1] not in measured]
    return f"{text}; without their largest point: {', '.join(early)}" if early else text


def _words(table: Table) -> str:
    return " ".join(map(str, table))
