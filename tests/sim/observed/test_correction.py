"""A profile corrected by a trace predicts the step of the trace: each kind of work, and the whole."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from memo_sim.answers.doctor import diagnose
from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.hardware import CopyRates, Curve, Hardware
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.engine.simulate import simulate
from memo_sim.observed.correction import corrected, product_rate
from tests.sim.observed.played import recorded, seconds_by_kind
from tests.sim.small_programs import GPT, decide

MODEL = msgspec.structs.replace(
    GPT, layers=9, hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn_hidden=8192, vocab=32000
)
PASSES = {"fprop": 1.25, "dgrad": 0.8, "wgrad": 1.1}
ATTENTION = {"forward": 1.3, "backward": 1.15}
COLLECTIVES = {"all_gather": 1.6, "reduce_scatter": 1.3, "all_reduce": 0.9}
ROWWISE, D2H, H2D = 1.4, 1.5, 1.2
CURVES = "memory_bound_bytes_per_s", "rowwise_bytes_per_s", "fused_rowwise_bytes_per_s", "framework_rowwise_bytes_per_s"

T = TypeVar("T")


def slower(part: T, factor: float) -> T:
    """Return a curve, copy rates or tables of curves whose rates are divided by a factor."""
    if isinstance(part, dict):
        return {name: slower(one, factor) for name, one in part.items()}  # type: ignore[return-value]
    if isinstance(part, Curve):
        return msgspec.structs.replace(part, y=[value / factor for value in part.y])
    assert isinstance(part, CopyRates)
    duplex, every = (msgspec.structs.replace(one, value=one.value / factor) for one in (part.duplex, part.all_devices))
    return CopyRates(alone=slower(part.alone, factor), duplex=duplex, all_devices=every)


def machine(profile: Hardware) -> Hardware:
    """Return a machine of which each kind of work differs from the profile by its own factor."""
    return msgspec.structs.replace(
        profile,
        gemm=[
            msgspec.structs.replace(t, rows=[[*row[:3], row[3] / PASSES[t.gemm_pass]] for row in t.rows])
            for t in profile.gemm
        ],
        attention=[
            msgspec.structs.replace(t, rows=[[*row[:2], row[2] / ATTENTION[t.attention_pass]] for row in t.rows])
            for t in profile.attention
        ],
        collectives=[
            msgspec.structs.replace(
                t,
                alpha_s=t.alpha_s * COLLECTIVES.get(t.kind, 1.0),
                bus_bytes_per_s=slower(t.bus_bytes_per_s, COLLECTIVES.get(t.kind, 1.0)),
            )
            for t in profile.collectives
        ],
        d2h=slower(profile.d2h, D2H),
        h2d=slower(profile.h2d, H2D),
        **{name: slower(getattr(profile, name), ROWWISE) for name in CURVES},
    )


def plan(rowwise: str, layout: Layout, policy: tuple[str, float]) -> Decisions:
    found = decide(MODEL, layout, policy, seq_tokens=65536, loss_chunk_tokens=8192)
    kernels = msgspec.structs.replace(found.kernels, rowwise=rowwise, attention="flash2")
    return msgspec.structs.replace(found, kernels=kernels)


@pytest.mark.parametrize(
    ("cluster", "device", "decisions"),
    [
        ("a100-1x8", "A100", plan("torch", Layout(tp=2, sequence_parallel=True, dp=2, zero=1), ("tokenwise", 0.5))),
        ("h100-1x8", "H100", plan("torch", Layout(), ("tokenwise", 0.5))),
        ("h100-1x8", "H100", plan("eager", Layout(tp=2, sequence_parallel=True), ("full", 0.0))),
    ],
    ids=["copies beside copies and collectives", "operators with curves of their own", "a framework's kernels"],
)
def test_the_corrected_profile_predicts_the_step_it_was_corrected_by(
    cluster: str, device: str, decisions: Decisions, tmp_path: Path
) -> None:
    named, profile = load_cluster(cluster)
    real = machine(profile)
    measured = simulate(decisions, real, named)
    trace = recorded(measured, real)
    trace.device = f"NVIDIA {device}"
    (tmp_path / "trace.json").write_bytes(trace.raw())
    found = diagnose(trace=str(tmp_path / "trace.json"), cluster=cluster)
    before, after = simulate(decisions, profile, named), simulate(decisions, found.hardware, named)
    corrected_kinds = {line.partition(":")[0].split(".")[0] for line in found.changes}
    assert corrected_kinds >= {"product", "attention", "row-wise"}
    assert ("copy" in corrected_kinds) == ("tokenwise" in decisions.recompute)
    assert ("collective" in corrected_kinds) == (decisions.layout.devices > 1)
    truth, old, new = (seconds_by_kind(one) for one in (measured, before, after))
    for kind, seconds in truth.items():
        if kind.split(".")[0] in corrected_kinds and kind != "collective.all_reduce":  # it takes less than 0.5 %
            assert new[kind] == pytest.approx(seconds, rel=0.015), kind
            assert abs(new[kind] - seconds) < abs(old[kind] - seconds), kind
    assert after.prediction.step_s == pytest.approx(measured.prediction.step_s, rel=0.01)


def test_a_pass_without_rows_gets_rows_of_its_own() -> None:
    _, profile = load_cluster("a100-1x8")
    only = msgspec.structs.replace(profile, gemm=[table for table in profile.gemm if table.gemm_pass == "fprop"])
    found = corrected(only, {product_rate("bf16", "wgrad"): 2.0}, text="test")
    tables = {(table.dtype, table.gemm_pass): table for table in found.gemm}
    rows, first = tables["bf16", "wgrad"].rows, tables["bf16", "fprop"].rows
    assert [row[3] * 2 for row in rows] == [row[3] for row in first]
    assert first == next(table.rows for table in only.gemm if table.dtype == "bf16")


def test_a_collective_without_tables_gets_those_it_was_priced_with() -> None:
    _, profile = load_cluster("a100-1x8")
    found = corrected(profile, {"collective.broadcast": 2.0, "collective.broadcast.8": 4.0}, text="test")
    alpha = {(table.kind, table.ranks): table.alpha_s for table in found.collectives}
    assert alpha["broadcast", 8] == 4 * alpha["all_gather", 8]
    assert alpha["broadcast", 2] == 2 * alpha["all_gather", 2]
