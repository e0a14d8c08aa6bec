"""The end of a step in lower bounds: never above the played step, and near it where nothing else is bounded loosely."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.knobs import Overlap
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.engine.simulate import simulate
from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.question import with_memory

LAYOUTS = {
    "dp8 zero1": Layout(dp=8, zero=1),
    "dp8 zero3": Layout(dp=8, zero=3),
    "tp2 dp4 zero1": Layout(tp=2, sequence_parallel=True, dp=4, zero=1),
    "pp4 dp2 zero1": Layout(pp=4, dp=2, zero=1),
    "pp8": Layout(pp=8),
    "pp2 v2 dp2 zero1": Layout(pp=2, dp=2, zero=1, schedule="interleaved", virtual_stages=2),
    "pp4 gpipe": Layout(pp=4, schedule="gpipe"),
    "pp4 zero-bubble": Layout(pp=4, schedule="zero-bubble"),
}


@pytest.fixture(scope="module")
def machine() -> tuple[Cluster, Hardware]:
    return with_memory(*load_cluster("h100-1x8"), device_bytes=2**50, host_bytes=2**50)


def plan(layout: Layout, seq_tokens: int, micro_batches: int, overlap: Overlap = "none") -> Decisions:
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=8)
    return Decisions(
        model=model,
        layout=layout,
        seq_tokens=seq_tokens,
        recompute="none",
        overlap=overlap,
        global_batch=micro_batches * layout.dp,
        loss_chunk_tokens=128,
    )


@pytest.mark.parametrize("overlap", get_args(Overlap))
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_no_bound_is_above_the_played_step(layout: Layout, overlap: Overlap, machine: tuple[Cluster, Hardware]) -> None:
    """With few tokens the end is most of the step."""
    cluster, hardware = machine
    bounds = LowerBounds(hardware, cluster)
    for seq_tokens in (128, 2048):
        for micro_batches in (2, 8):
            decisions = plan(layout, seq_tokens, micro_batches, overlap)
            played_s = simulate(decisions, hardware, cluster).prediction.step_s
            assert played_s is not None
            assert bounds.of(decisions).step_s <= played_s * (1 + 1e-9)
            assert bounds.of_passes(decisions, decisions) <= played_s * (1 + 1e-9)
            assert bounds.of_one_stage(decisions, decisions) <= played_s * (1 + 1e-9)


@pytest.mark.parametrize(("name", "least"), [("dp8 zero1", 0.98), ("tp2 dp4 zero1", 0.95), ("pp4 dp2 zero1", 0.9)])
def test_reductions_updates_and_gathers_follow_each_other(
    name: str, least: float, machine: tuple[Cluster, Hardware]
) -> None:
    """Of a step of two short sequences they are a large part."""
    cluster, hardware = machine
    decisions = plan(LAYOUTS[name], 512, 2)
    played_s = simulate(decisions, hardware, cluster).prediction.step_s
    assert played_s is not None
    assert LowerBounds(hardware, cluster).of(decisions).step_s >= least * played_s
