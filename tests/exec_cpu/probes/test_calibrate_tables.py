"""Conversion of timed operators to a profile's tables and curves."""

import pytest

from memo_exec.probes.tables import Timed, attention_tables, gemm_tables, rowwise_curves
from memo_exec.probes.timing import Sample
from memo_sim.program.ir.work import Attention, Gemm, Rowwise


def test_tables_average_equal_works_and_join_near_points() -> None:
    gemm = Gemm(64, 32, 16, "fprop", "fp32")
    rowwise = [Rowwise("gelu", 10, 600, 400), Rowwise("gelu", 5, 640, 400)]
    causal, whole = (Attention(1, 64, 64, mask, 2, 2, 16, False, "k", "fp32") for mask in ("causal", "none"))
    timed = [Timed.of(gemm, Sample(seconds, 0.1), 0.5) for seconds in (1.0, 2.0)]
    timed += [Timed(work, 2.0, 0.0) for work in rowwise] + [Timed(causal, 1.0, 0.0), Timed(whole, 1.6, 0.0)]
    (table,) = gemm_tables(timed, "s")
    assert table.rows == [[64.0, 32.0, 16.0, gemm.flops / 2.0]]
    assert rowwise_curves(timed, "s")["gelu"].y == [pytest.approx(2040 / 4.0)]
    (attention,) = attention_tables(timed, "s")
    assert attention.rows == [[64.0, 2.0, causal.flops]]
    assert attention.full_mask_gains == [[64.0, pytest.approx(2 / 1.6)]]
