"""Prices a matrix product by its shape, from a table of measured shapes.

    seconds(m, n, k) = 2*m*n*k * (c0 + c1/k + c2/(m*n)) * waves(m, n) * deviation(m, n, k)

The trend in parentheses has three terms:

- c0: the product at full rate;
- c1: the fixed time of each output tile, however short its sum is (pipeline fill, epilogue, writing the output);
- c2: the fixed time of each step of the sum, when too few tiles fill the device.

A table that says how many tiles its device computes at a time (``GemmTable.tiles_at_once``) has waves: the output is
cut into tiles, and the last wave of tiles leaves multiprocessors idle. ``waves`` is the number of waves over the
number that whole tiles without a remainder would need; kernels hide part of the remainder, so it is rounded up by the
share that fits the rows best. Too few tiles are then less than one wave, and c2 is left out.

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
from math import ceil, exp, log2

import numpy as np
from numpy.typing import NDArray

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import GemmPass, GemmTable
from memo_sim.program.ir.work import Gemm

REACH_OCTAVES = 2.0
"""Distance at which a measured row's ratio and the trend have the same weight."""

TILE = 128
"""Rows and columns of an output tile. Of 64 x 128 to 256 x 256, one size for all products, it predicts A100's best."""

SHARES = tuple(i / 20 for i in range(21))
"""Shares of the last wave's remainder that a fit tries."""

Shape = tuple[float, float, float]


class GemmModel:
    """The model of one table: trend and deviations."""

    def __init__(self, rows: Sequence[Sequence[float]], tiles_at_once: int | None = None) -> None:
        table = np.array(rows, dtype=np.float64)
        self.largest_rate = float(table[:, 3].max())
        self._tiles_at_once = tiles_at_once
        self.coefficients, self.share = _trend(table, tiles_at_once)
        self._points = np.log2(table[:, :3])
        trend = [self._seconds_per_flop(m, n, k) for m, n, k, _ in rows]
        self._deviations = -np.log(table[:, 3] * trend)
        self._low = [float(size) for size in table[:, :3].min(axis=0)]
        self._high = [float(size) for size in table[:, :3].max(axis=0)]

    def rate(self, m: float, n: float, k: float) -> float:
        """Return the product's rate in FLOP/s."""
        seconds = self._seconds_per_flop(m, n, k) * self._deviation(m, n, k)
        return min(1.0 / seconds, self.largest_rate)

    def covers(self, m: float, n: float, k: float) -> bool:
        """Whether every dimension lies between the table's smallest and largest value."""
        asked = (m, n, k)
        return all(low <= size <= high for low, size, high in zip(self._low, asked, self._high, strict=True))

    def thinner(self, m: float, n: float, k: float) -> bool:
        """Whether a dimension is smaller than in every row. Memory may then limit the product, which no row shows."""
        return m < self._low[0] or n < self._low[1] or k < self._low[2]

    def _seconds_per_flop(self, m: float, n: float, k: float) -> float:
        c0, c1, c2 = self.coefficients
        seconds = c0 + c1 / k + c2 / (m * n)
        return seconds if self._tiles_at_once is None else seconds * _waves(m, n, self._tiles_at_once, self.share)

    def _deviation(self, m: float, n: float, k: float) -> float:
        away = self._points - (log2(m), log2(n), log2(k))
        squared = np.einsum("ij,ij->i", away, away)
        nearest = int(squared.argmin())
        if squared[nearest] < 1e-12:
            return exp(self._deviations[nearest])
        weights = 1.0 / (squared * squared)
        return exp(float(weights @ self._deviations) / (float(weights.sum()) + REACH_OCTAVES**-4))


def _waves(m: float, n: float, tiles_at_once: int, share: float) -> float:
    """Return the waves of an m x n output over those without remainders; ``share`` of a wave's remainder counts."""
    tiles = ceil(m / TILE) * ceil(n / TILE) / tiles_at_once
    counted = share * ceil(tiles) + (1.0 - share) * max(tiles, 1.0)
    return counted * TILE * TILE * tiles_at_once / (m * n)


def _trend(table: NDArray[np.float64], tiles_at_once: int | None) -> tuple[Shape, float]:
    """Return c0, c1, c2 and the share of a wave's remainder with the smallest squared relative error."""
    if tiles_at_once is None:
        return _terms(table, np.ones(len(table)), 3)[0], 0.0
    best: tuple[Shape, float] | None = None
    error = float("inf")
    for share in SHARES:
        waves = np.array([_waves(m, n, tiles_at_once, share) for m, n, _, _ in table])
        found, left = _terms(table, waves, 2)
        if best is None or left < error - 1e-12:
            best, error = (found, share), left
    assert best is not None
    return best


def _terms(table: NDArray[np.float64], waves: NDArray[np.float64], terms: int) -> tuple[Shape, float]:
    """Return the first ``terms`` of c0, c1, c2 by non-negative least squares of relative errors, and what is left.

    Every set of terms with c0 is tried.
    """
    m, n, k, rate = table.T
    features = np.stack([rate, rate / k, rate / (m * n)], axis=1) * waves[:, None]
    scale = np.abs(features).max(axis=0)
    best: Shape = (float((1.0 / rate).mean()), 0.0, 0.0)
    error = float("inf")
    for count in range(1, terms + 1):
        for tried in combinations(range(terms), count):
            if 0 not in tried:
                continue
            chosen = list(tried)
            found = np.linalg.lstsq(features[:, chosen] / scale[chosen], np.ones(len(table)), rcond=None)[0]
            found = found / scale[chosen]
            left = float(((features[:, chosen] @ found - 1.0) ** 2).sum())
            if (found >= 0).all() and found[0] > 0 and left < error - 1e-12:
                full = [0.0, 0.0, 0.0]
                for term, value in zip(chosen, found, strict=True):
                    full[term] = float(value)
                best, error = (full[0], full[1], full[2]), left
    return best, error


class GemmRates:
    """The matrix products of one profile, by dtype and pass."""

    def __init__(self, tables: Sequence[GemmTable]) -> None:
        self._models: dict[tuple[str, GemmPass], GemmModel] = {}
        for key in {(table.dtype, table.gemm_pass) for table in tables}:
            same = [table for table in tables if (table.dtype, table.gemm_pass) == key]
            self._models[key] = GemmModel([row for table in same for row in table.rows], same[0].tiles_at_once)

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
                raise Infeasible("the profile has no matrix products of this dtype", got=work.dtype, wanted=known)
            found = others[0]
        return found
