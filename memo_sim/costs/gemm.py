"""Prices a matrix product by its shape, from a table of measured shapes.

    seconds(m, n, k) = 2*m*n*k * (c0 + c1/k + c2/(m*n)) * deviation(m, n, k)

The trend in parentheses has three terms:

- c0: the product at full rate;
- c1: the fixed time of each output tile, however short its sum is (pipeline fill, epilogue, writing the output);
- c2: the fixed time of each step of the sum, when too few tiles fill the device.

c0, c1, c2 >= 0 minimise the squared relative error over the table's rows, so the trend's time grows with every
dimension. Each row keeps its ratio measured / trend. At another shape, the deviation is the weighted geometric mean of
these ratios. The weight is 1 / distance^4, with the distance in octaves of (m, n, k). The trend itself counts as a row
with ratio 1 at distance ``REACH_OCTAVES``.

So the model returns measured points exactly, follows the trend far from all points, and never exceeds the table's
largest rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import exp, log, log2

import numpy as np

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import GemmPass, GemmTable
from memo_sim.contract.knobs import ProductDtype
from memo_sim.program.ir.work import Gemm

_MEASURED = "another --dtype, or memo-exec calibrate on a machine that has such products"
REACH_OCTAVES = 2.0
"""Distance at which a measured row's ratio and the trend have the same weight."""

Shape = tuple[float, float, float]


class GemmModel:
    """The model of one table: trend and deviations."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        self.largest_rate = max(row[3] for row in rows)
        self.coefficients = _trend(rows)
        self._points = [
            (log2(m), log2(n), log2(k), log(1.0 / rate / self._seconds_per_flop(m, n, k))) for m, n, k, rate in rows
        ]
        self._low = [min(row[axis] for row in rows) for axis in range(3)]
        self._high = [max(row[axis] for row in rows) for axis in range(3)]
        self._rates: dict[Shape, float] = {}
        """Rates of products that were asked for; layouts of a search share most of them."""

    def rate(self, m: float, n: float, k: float) -> float:
        """Return the product's rate in FLOP/s."""
        found = self._rates.get((m, n, k))
        if found is None:
            seconds = self._seconds_per_flop(m, n, k) * self._deviation(log2(m), log2(n), log2(k))
            self._rates[m, n, k] = found = min(1.0 / seconds, self.largest_rate)
        return found

    def covers(self, m: float, n: float, k: float) -> bool:
        """Whether every dimension lies between the table's smallest and largest value."""
        asked = (m, n, k)
        return all(low <= size <= high for low, size, high in zip(self._low, asked, self._high, strict=True))

    def thinner(self, m: float, n: float, k: float) -> bool:
        """Whether a dimension is smaller than in every row. Memory may then limit the product, which no row shows."""
        return m < self._low[0] or n < self._low[1] or k < self._low[2]

    def _seconds_per_flop(self, m: float, n: float, k: float) -> float:
        c0, c1, c2 = self.coefficients
        return c0 + c1 / k + c2 / (m * n)

    def _deviation(self, m: float, n: float, k: float) -> float:
        weights, total = REACH_OCTAVES**-4, 0.0
        for row_m, row_n, row_k, deviation in self._points:
            squared = (m - row_m) ** 2 + (n - row_n) ** 2 + (k - row_k) ** 2
            if squared < 1e-12:
                return exp(deviation)
            weight = 1.0 / (squared * squared)
            weights += weight
            total += weight * deviation
        return exp(total / weights)


def _trend(rows: Sequence[Sequence[float]]) -> Shape:
    """Return c0, c1, c2 by non-negative least squares of relative errors; tries every set of terms with c0."""
    table = np.array(rows, dtype=np.float64)
    m, n, k, rate = table.T
    features = np.stack([rate, rate / k, rate / (m * n)], axis=1)
    scale = np.abs(features).max(axis=0)
    best: Shape = (float((1.0 / rate).mean()), 0.0, 0.0)
    error = float("inf")
    for count in (1, 2, 3):
        for terms in combinations(range(3), count):
            if 0 not in terms:
                continue
            chosen = list(terms)
            found = np.linalg.lstsq(features[:, chosen] / scale[chosen], np.ones(len(rows)), rcond=None)[0]
            found = found / scale[chosen]
            left = float(((features[:, chosen] @ found - 1.0) ** 2).sum())
            if (found >= 0).all() and found[0] > 0 and left < error - 1e-12:
                full = [0.0, 0.0, 0.0]
                for term, value in zip(terms, found, strict=True):
                    full[term] = float(value)
                best, error = (full[0], full[1], full[2]), left
    return best


class GemmRates:
    """The matrix products of one profile, by dtype and pass."""

    def __init__(self, tables: Sequence[GemmTable]) -> None:
        self._models: dict[tuple[str, GemmPass], GemmModel] = {}
        for key in {(table.dtype, table.gemm_pass) for table in tables}:
            rows = [row for table in tables if (table.dtype, table.gemm_pass) == key for row in table.rows]
            self._models[key] = GemmModel(rows)

    def has(self, dtype: str) -> bool:
        """Return whether the profile has products of this dtype."""
        return any(known == dtype for known, _ in self._models)

    def of(self, dtype: ProductDtype, gemm_pass: GemmPass) -> GemmModel:
        """Return the model of one kind of product and pass.

        Raises:
                Infeasible: when the profile has no such products.
        """
        found = self._models.get((dtype, gemm_pass))
        if found is None:
            known = ", ".join(sorted({name for name, _ in self._models}))
            raise Infeasible("the profile has no matrix products of this kind", got=dtype, wanted=known, hint=_MEASURED)
        return found

    def model(self, work: Gemm, outside: set[str]) -> GemmModel:
        """Return the model that prices ``work``.

        If its pass was not measured, another pass of the same dtype is used, and the name is added to ``outside``.

        Raises:
                Infeasible: when the profile has no product of this dtype.
        """
        found = self._models.get((work.dtype, work.gemm_pass))
        if found is None:
            outside.add(f"gemm.{work.dtype}.{work.gemm_pass}")
            passes: tuple[GemmPass, ...] = ("fprop", "dgrad", "wgrad")
            others = [self._models[work.dtype, other] for other in passes if (work.dtype, other) in self._models]
            if not others:
                known = ", ".join(sorted({dtype for dtype, _ in self._models}))
                raise Infeasible(
                    "the profile has no matrix products of this dtype", got=work.dtype, wanted=known, hint=_MEASURED
                )
            found = others[0]
        return found
