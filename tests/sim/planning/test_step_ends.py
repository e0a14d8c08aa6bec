"""The end of a step in lower bounds: never above the played step, and near it where nothing else is bounded loosely."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from memo_sim.contract.knobs import Overlap
from memo_sim.contract.plan import Decisions
from memo_sim.planning.lower_bounds import LowerBounds
from tests.sim.planning.test_stage_passes import machine, pipeline, step_s

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp8 zero1": {"dp": 8, "zero": 1},
    "dp8 zero3": {"dp": 8, "zero": 3},
    "tp2 dp4 zero1": {"tp": 2, "sequence_parallel": True, "dp": 4, "zero": 1},
    "pp4 dp2 zero1": {"pp": 4, "dp": 2, "zero": 1},
    "pp8": {"pp": 8},
    "pp2 v2 dp2 zero1": {"pp": 2, "dp": 2, "zero": 1, "schedule": "interleaved", "virtual_stages": 2},
    "pp4 gpipe": {"pp": 4, "schedule": "gpipe"},
    "pp4 zero-bubble": {"pp": 4, "schedule": "zero-bubble"},
}


def plan(name: str, seq_tokens: int, micro_batches: int, overlap: Overlap = "none") -> Decisions:
    base = pipeline("llama3-8b", 8, micro_batches, seq_tokens, **LAYOUTS[name])
    return msgspec.structs.replace(base, overlap=overlap, loss_chunk_tokens=128)


@pytest.mark.parametrize("overlap", get_args(Overlap))
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_bound_is_above_the_played_step(name: str, overlap: Overlap) -> None:
    """With few tokens the end is most of the step."""
    cluster, hardware = machine()
    bounds = LowerBounds(hardware, cluster)
    for seq_tokens in (128, 2048):
        for micro_batches in (2, 8):
            decisions = plan(name, seq_tokens, micro_batches, overlap)
            played_s = step_s(decisions, cluster, hardware) * (1 + 1e-9)
            assert bounds.of(decisions).step_s <= played_s
            assert bounds.of_passes(decisions, decisions) <= played_s
            assert bounds.of_one_stage(decisions, decisions) <= played_s


@pytest.mark.parametrize(("name", "least"), [("dp8 zero1", 0.98), ("tp2 dp4 zero1", 0.95), ("pp4 dp2 zero1", 0.9)])
def test_reductions_updates_and_gathers_follow_each_other(name: str, least: float) -> None:
    """Of a step of two short sequences they are a large part."""
    cluster, hardware = machine()
    decisions = plan(name, 512, 2)
    assert LowerBounds(hardware, cluster).of(decisions).step_s >= least * step_s(decisions, cluster, hardware)
