"""Seconds of a matrix product by its shape, from a table of measured shapes.

    seconds(m, n, k) = 2*m*n*k * (c0 + c1/k + c2/(m*n)) * deviation(m, n, k)

The trend's three terms are the product at full rate, what each output tile costs however short its sum is (c1: pipeline
fill, epilogue, writing the output), and what each step of the sum costs however few tiles there are (c2: a grid too
small to fill the device). c0, c1, c2 >= 0 minimise the squared relative error over the table's rows, so the trend's
time grows with every dimension. What the trend leaves is kept as each row's ratio measured / trend; at another shape
the deviation is their weighted geometric mean with weight 1 / distance^4, the distance in octaves of (m, n, k), and the
trend itself counts as a row ``REACH_OCTAVES`` away. So table points come out exactly, far from all of them the trend
holds, and no rate is above the table's largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import exp, log, log2

import numpy as np

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import GemmPass, GemmTable
from memo_sim.program.ir.work import Gemm

REACH_OCTAVES = 2.0
"""How far a measured row's deviation from the trend reaches: at this distance both count the same."""

Shape = tuple[float, float, float]


class GemmModel:
    """One table's products: trend and deviations."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        self.largest_rate = max(row[3] for row in rows)
        self.coefficients = _trend(rows)
        self._points = [
            (log2(m), log2(n), log2(k), log(1.0 / rate / self._seconds_per_flop(m, n, k))) for m, n, k, rate in rows
        ]
        self._low = [min(row[axis] for row in rows) for axis in range(3)]
        self._high = [max(row[axis] for row in rows) for axis in range(3)]

    def rate(self, m: float, n: float, k: float) -> float:
        """Return FLOP/s of the product."""
        seconds = self._seconds_per_flop(m, n, k) * self._deviation(log2(m), log2(n), log2(k))
        return min(1.0 / seconds, self.largest_rate)

    def covers(self, m: float, n: float, k: float) -> bool:
        """Whether every dimension lies between the table's smallest and largest."""
        asked = (m, n, k)
        return all(low <= size <= high for low, size, high in zip(self._low, asked, self._high, strict=True))

    def thinner(self, m: float, n: float, k: float) -> bool:
        """Whether a dimension is below everything measured: there memory may bind, which no row shows."""
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
    """Return c0, c1, c2: non-negative least squares of relative errors, by trying every set of terms."""
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
    """The products of one profile, by dtype and pass."""

    def __init__(self, tables: Sequence[GemmTable]) -> None:
        self._models: dict[tuple[str, GemmPass], GemmModel] = {}
        for key in {(table.dtype, table.gemm_pass) for table in tables}:
            rows = [row for table in tables if (table.dtype, table.gemm_pass) == key for row in table.rows]
            self._models[key] = GemmModel(rows)

    def model(self, work: Gemm, outside: set[str]) -> GemmModel:
        """Return the model that prices ``work``; another pass of the same dtype, marked, where its own is missing.

        Raises:
            Infeasible: when the profile has no product of that dtype.
        """
        found = self._models.get((work.dtype, work.gemm_pass))
        if found is None:
            outside.add(f"gemm.{work.dtype}.{work.gemm_pass}")
            passes: tuple[GemmPass, ...] = ("fprop", "dgrad", "wgrad")
            others = [self._models[work.dtype, other] for other in passes if (work.dtype, other) in self._models]
            if not others:
                known = ", ".join(sorted({dtype for dtype, _ in self._models}))
                raise Infeasible("the profile has no matrix products of this dtype", got=work.dtype, wanted=known)
            found = others[0]
        return found
