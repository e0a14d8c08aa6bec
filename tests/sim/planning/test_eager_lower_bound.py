"""Memory's lower bound of an eager framework's plan is not above its need, also when the loss works in place."""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.attention_kernels import Libraries
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.engine.simulate import simulate
from memo_sim.planning.lower_bounds import LowerBounds


@pytest.mark.parametrize("libraries", ["2024", "2025"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sequence_parallel=True), Layout(pp=2)], ids=str)
def test_the_lower_bound_is_below_the_allocated_bytes(layout: Layout, libraries: Libraries) -> None:
    cluster, hardware = load_cluster(f"b200-1x{layout.devices}")
    hardware = msgspec.structs.replace(hardware, eager_libraries=libraries)
    decisions = Decisions(
        model=msgspec.structs.replace(load_model("llama-tiny"), vocab=32000),
        layout=layout,
        seq_tokens=16384,
        memory_policy="eager",
        kernels=Kernels(attention="torch-cudnn"),
    )
    bound = LowerBounds(hardware, cluster).of(decisions)
    prediction = simulate(decisions, hardware, cluster).prediction
    assert prediction.step_s is not None
    assert bound.device_bytes <= prediction.peak_device_bytes
    assert bound.step_s <= prediction.step_s
    if libraries == "2025" and layout.pp == 1:
        assert bound.device_bytes > 0.8 * prediction.peak_device_bytes
