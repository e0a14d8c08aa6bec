"""Memory's lower bound of an eager framework's plan is not above its need, also when the loss works in place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memo_sim.contract.attention_kernels import Libraries
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.knobs import States
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.contract.units import GIB
from memo_sim.engine.simulate import simulate
from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.question import with_memory


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


@pytest.mark.parametrize("states", ["fp32", "host", "pure-bf16"])
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(dp=8, zero=3), Layout(cp=8, zero=3, cp_exchange="all_gather")], ids=str
)
def test_the_lower_bound_is_below_what_hugging_faces_modules_hold(layout: Layout, states: States) -> None:
    """Few tokens and many parameters: accelerate has fewer states than the program."""
    cluster, hardware = load_cluster(f"h100-1x{layout.devices}")
    decisions = Decisions(
        model=load_model("qwen3-0.6b"),
        layout=layout,
        seq_tokens=4096,
        global_batch=layout.dp,
        memory_policy="eager",
        modules="huggingface",
        recompute="full",
        states=states,
        loss="checkpointed",
        loss_chunk_tokens=256,
        kernels=Kernels(attention="torch-cudnn", rowwise="eager"),
    )
    bound = LowerBounds(hardware, cluster).of(decisions)
    prediction = simulate(decisions, hardware, cluster).prediction
    assert prediction.step_s is not None
    assert bound.device_bytes <= prediction.peak_device_bytes
    assert bound.step_s <= prediction.step_s


def eager_pipeline(layers: int = 6, **fields) -> Decisions:
    layout = Layout(pp=4, **fields)
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=layers)
    return Decisions(model=model, layout=layout, seq_tokens=8192, global_batch=32 * layout.dp, memory_policy="eager")


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layers", [6, 8])
@pytest.mark.parametrize("fields", [{"dp": 2, "zero": 1}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_one_stage_shows_what_the_allocator_lacks(fields: dict[str, Any], layers: int, recompute: str) -> None:
    decisions = msgspec.structs.replace(eager_pipeline(layers, **fields), recompute=recompute)
    known = load_cluster("h100-1x8")
    needed = simulate(decisions, known[1], known[0]).prediction
    assert needed.reserved_bytes is not None
    shown = 0
    for room_bytes in (needed.reserved_bytes, (needed.reserved_bytes + needed.peak_device_bytes) // 2, 2**33):
        cluster, hardware = with_memory(*known, device_bytes=room_bytes + 2 * GIB, host_bytes=2**50)
        bounds = LowerBounds(hardware, cluster)
        prediction, found = simulate(decisions, hardware, cluster).prediction, bounds.of_served_stages(decisions)
        assert found is not None
        missing_bytes = max(0, found.total - bounds.device_room_bytes)
        assert missing_bytes <= prediction.shortfall_bytes
        shown += missing_bytes > 0
    assert shown


def test_without_stages_nothing_is_replayed_for_a_bound() -> None:
    cluster, hardware = load_cluster("h100-1x8")
    alone = msgspec.structs.replace(eager_pipeline(), layout=Layout(dp=2), global_batch=2)
    assert LowerBounds(hardware, cluster).of_served_stages(alone) is None
