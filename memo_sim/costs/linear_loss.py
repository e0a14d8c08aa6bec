"""Rates of a loss with the classifier's product inside (``program/layers/linear_loss.py``), as a profile measured them.

A kernel with a table has its rate, by the model of ``costs/gemm.py``. What has no table is for ``pricing.py``: torch's
operators are products and passes over logits, Triton's kernels have no price.
"""

from __future__ import annotations

from memo_sim.contract.hardware import Hardware, LinearLossKernel, LinearLossPart
from memo_sim.contract.knobs import DtypeName
from memo_sim.costs.gemm import GemmModel
from memo_sim.program.ir.work import LinearLoss

Key = tuple[LinearLossKernel, DtypeName, LinearLossPart]


class LinearLossRates:
    """The measured parts of such losses of one profile."""

    def __init__(self, hardware: Hardware) -> None:
        self._floor_s = hardware.launch_floor_s.value
        rows: dict[Key, list[list[float]]] = {}
        for table in hardware.linear_loss:
            rows.setdefault((table.kernel, table.dtype, table.part), []).extend(table.rows)
        self._models = {key: GemmModel(found) for key, found in rows.items()}

    def seconds(self, work: LinearLoss, sustained: float, outside: set[str]) -> float | None:
        """Return the seconds of one part; None where the profile has no table of its kernel.

        ``sustained``: the rate of products inside a step over that of the table. ``outside`` gets the table's name when
        it is read outside its range.
        """
        model = self._models.get((work.kernel, work.dtype, work.part))
        if model is None:
            return None
        seconds = work.flops / (model.rate(work.m, work.n, work.k) * sustained)
        if seconds > self._floor_s and not model.covers(work.m, work.n, work.k):
            outside.add(f"linear_loss.{work.kernel}.{work.dtype}.{work.part}")
        return max(self._floor_s, seconds)
