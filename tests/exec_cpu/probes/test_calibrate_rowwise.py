"""Calibration of fused row-wise kernels with made-up timings, and the kernels that a plan then selects."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memo_exec.commands.calibrate import calibrate
from memo_exec.kernels import FUSED, IN_TRITON, ROUNDING
from memo_exec.probes import in_step, memory
from memo_exec.probes import usable as usables
from memo_exec.probes.in_step import InStep
from memo_exec.probes.operators import Bench, Operator
from memo_exec.probes.timing import Effort, Sample
from memo_sim.contract.catalog import load_model
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import search
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.operators.workspaces import FUSED_KINDS, LATER_KINDS, ROUNDED_KINDS
from tests.exec_cpu.probes.test_calibrate import FEW

FUSED_TIMES = {"rms_norm": 4.0, "rms_norm.bwd": 4.0, "swiglu": 0.8, "cross_entropy": 0.7}
"""Rates of made-up Triton kernels relative to torch; all others are equal."""


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """Return a profile with made-up timings: torch moves 1e9 bytes/s, Triton ``FUSED_TIMES`` times as much."""

    def seconds(bench: Bench, operator: Operator, effort: Effort) -> Sample:
        work = operator.instruction.work
        if not isinstance(work, Rowwise):
            return Sample(1e-3, 0.1)
        times = FUSED_TIMES.get(work.kind, 1.0) if operator.rowwise == "triton" else 1.0
        return Sample(work.moved_bytes / (1e9 * times), 0.1)

    monkeypatch.setattr(Bench, "seconds", seconds)
    monkeypatch.setattr(in_step, "measure", lambda *given, **named: InStep(Sample(0.0, 0.0), 0.0))
    monkeypatch.setattr(memory, "cache_bytes", lambda device: 2**20)
    monkeypatch.setattr(usables, "rowwise_kernels", lambda machine: {"torch": "", "triton": ""})
    monkeypatch.setattr(usables, "tried_rowwise_kernels", lambda machine: {"torch": "", "triton": ""})
    monkeypatch.setattr(usables, "tried_losses", lambda machine: {"linear-triton": ""})
    found = calibrate(grid=replace(FEW, beside_s=0.01, copy_bytes=(2**14,)))
    assert found is not None
    return found


def test_triton_has_curves_of_its_own(with_triton: Hardware) -> None:
    curves = with_triton.fused_rowwise_bytes_per_s["triton"]
    assert set(curves) == set(IN_TRITON) == FUSED_KINDS | LATER_KINDS
    assert (set(FUSED), set(ROUNDING)) == (FUSED_KINDS, ROUNDED_KINDS)
    for kind, curve in curves.items():
        assert curve.y == [pytest.approx(1e9 * FUSED_TIMES.get(kind, 1.0))] * len(curve.x)
        assert with_triton.rowwise_bytes_per_s[kind].y == [pytest.approx(1e9)] * len(curve.x)
    assert "adamw" not in curves


def test_triton_has_tables_of_the_loss_with_the_classifier_inside(with_triton: Hardware) -> None:
    """Every made-up call takes a millisecond; of equal tiles one is timed."""
    found = {table.part: table for table in with_triton.linear_loss}
    assert set(found) == {"statistics", "gradient"}
    for table in found.values():
        assert (table.kernel, table.dtype) == ("triton", FEW.dtype)
        shapes = {(m, n, k) for m, n, k, _ in table.rows}
        assert shapes == {(m, FEW.vocab, k) for m in FEW.lengths for k in FEW.widths}
        for m, n, k, rate in table.rows:
            assert rate == pytest.approx(2 * m * n * k / 1e-3)


@pytest.mark.parametrize(("model", "chosen"), [("llama-tiny", "triton"), ("gpt-tiny", "torch")])
def test_a_plan_selects_triton_where_it_is_faster(with_triton: Hardware, model: str, chosen: str) -> None:
    """Triton gains more on llama's norms than it loses on the loss; gpt has no RMSNorm."""
    asked = Question(
        model=load_model(model),
        cluster=Cluster(name="here", hardware="here", nodes=1, devices_per_node=1),
        hardware=with_triton,
        seq_tokens=2048,
        system="any",
        pins=Pins(alpha=0.0),
    )
    best = search(asked).best
    assert best is not None
    assert best.decisions.kernels.rowwise == chosen


def test_a_profile_without_triton_has_no_fused_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "seconds", lambda *given: Sample(1e-3, 0.1))
    found = calibrate(grid=replace(FEW, beside_s=0.01, copy_bytes=(2**14,)))
    assert found is not None
    assert found.fused_rowwise_bytes_per_s == {}
    assert found.linear_loss == []
