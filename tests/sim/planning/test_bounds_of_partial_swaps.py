"""Bounds of pipelines that swap some rows: layers whose activations stay on the device copy none of them."""

from __future__ import annotations

from typing import Any

import pytest

from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.space import with_alpha
from tests.sim.planning.test_stage_passes import machine, pipeline, step_s

STAGES: dict[str, dict[str, Any]] = {
    "one stage": {"pp": 1},
    "1f1b": {"pp": 8},
    "interleaved": {"pp": 8, "schedule": "interleaved", "virtual_stages": 2},
    "gpipe": {"pp": 4, "schedule": "gpipe"},
    "zero-bubble": {"pp": 4, "schedule": "zero-bubble"},
}


@pytest.mark.parametrize("recompute", ["none", "tokenwise"])
@pytest.mark.parametrize("layout", STAGES.values(), ids=STAGES)
def test_kept_rows_are_not_copied_beside_where_all_rows_stay(layout: dict[str, Any], recompute: str) -> None:
    """With one to three layers a chunk, most layers of the last stage stay in the two rounding buffers.

    The rows that are kept of other layers are copied by kernels, in forward and in backward.
    """
    cluster, hardware = machine("h100-2x8")
    bounds, chunks = LowerBounds(hardware, cluster), layout["pp"] * layout.get("virtual_stages", 1)
    for layers in (1, 2, 3):
        base = pipeline("gpt-7b", chunks * layers, 8 * layout["pp"], 2048, tp=1, dp=1, zero=1, **layout)
        for alpha in (0.125, 0.375, 0.75):
            plan = with_alpha(base, recompute, alpha)
            played_s = step_s(plan, cluster, hardware) * (1 + 1e-9)
            assert bounds.of(plan).step_s <= played_s
            assert bounds.step_s_between(plan, plan) <= played_s
            assert bounds.of_passes(plan, plan) <= played_s
            assert bounds.of_one_stage(plan, plan) <= played_s
            assert bounds.copied_s(plan) <= played_s
