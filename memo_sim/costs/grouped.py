"""How much longer products of several experts take than the derived price, from a table of measured ones.

    seconds(work) = derived seconds(work) * deviation(experts, rows of an expert, n, k)

The derived price (``Pricer``) is that of one product with the rows of all experts, in whole tiles. Each measured row
has a ratio measured / derived. The deviation is the weighted geometric mean of these ratios, as in ``gemm.py``: the
weight is 1 / distance^4, with the distance in octaves, and 1 counts as a ratio at distance ``REACH_OCTAVES``. Without
measured rows it is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import exp, log, log2

from memo_sim.contract.hardware import GroupedGemmTable
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.costs.gemm import REACH_OCTAVES
from memo_sim.program.ir.work import GroupedGemm

Point = tuple[float, ...]
Derived = Callable[[GroupedGemm], float]


class GroupedRates:
    """The measured products of one pass and dtype.

    ``derived`` prices a product; ``copies``: whether kernels return new tensors, which are copied.
    """

    def __init__(self, tables: Sequence[GroupedGemmTable], derived: Derived, *, copies: bool) -> None:
        self._tables, self._derived, self._copies = tables, derived, copies

    @cached_property
    def _points(self) -> list[tuple[Point, float]]:
        """The place of each measured row, and the logarithm of its ratio."""
        found = []
        for table in self._tables:
            for experts, rows, n, k, rate in table.rows:
                work = _measured(table, round(experts), round(rows), round(n), round(k), copies=self._copies)
                found.append((_place(work), log(work.flops / rate / self._derived(work))))
        return found

    def deviation(self, work: GroupedGemm, outside: set[str]) -> float:
        """Return the factor on the derived price; a place beyond every measured one is added to ``outside``."""
        if not self._points:
            return 1.0
        here = _place(work)
        axes = list(zip(*(place for place, _ in self._points), strict=True))
        if any(not min(axis) <= value <= max(axis) for axis, value in zip(axes, here, strict=True)):
            outside.add(f"grouped_gemm.{work.dtype}.{work.gemm_pass}")
        weights, total = REACH_OCTAVES**-4, 0.0
        for place, ratio in self._points:
            squared = sum((a - b) ** 2 for a, b in zip(here, place, strict=True))
            if squared < 1e-12:
                return exp(ratio)
            weights += 1.0 / (squared * squared)
            total += ratio / (squared * squared)
        return exp(total / weights)


def _place(work: GroupedGemm) -> Point:
    experts = max(1, work.experts)
    return log2(experts), log2(max(1.0, work.rows / experts)), log2(work.n), log2(work.k)


def _measured(table: GroupedGemmTable, experts: int, rows: int, n: int, k: int, *, copies: bool) -> GroupedGemm:
    """Return the product of a measured row: equally many rows for each expert."""
    each, more = divmod(rows, experts)
    sizes = tuple(part for part in ((each + 1, more), (each, experts - more)) if part[0] and part[1])
    size = DTYPE_BYTES[table.dtype]
    copied = (size + 2 * DTYPE_BYTES["fp32"]) * experts * n * k if table.gemm_pass == "wgrad" else 2 * size * rows * n
    return GroupedGemm(sizes, n, k, table.gemm_pass, table.dtype, copied if copies else 0)
