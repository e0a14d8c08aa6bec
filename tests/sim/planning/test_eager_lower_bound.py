"""Memory's lower bound of an eager framework's plan is not above its need, also when the loss works in place."""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.attention_kernels import Libraries
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.knobs import States
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.contract.units import GIB
from memo_sim.engine.simulate import simulate
from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.search import search


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


@pytest.mark.parametrize(("seq_tokens", "device_gib"), [(8192, 40.05), (16384, 64.1)])
def test_a_plan_that_needs_a_lower_limit_of_the_allocator_is_found(seq_tokens: int, device_gib: float) -> None:
    """With all of the memory the allocator fails, with a little less it does not; the live bytes fit."""
    known = load_cluster("h100-1x8")
    cluster, hardware = with_memory(*known, device_bytes=int(device_gib * GIB), host_bytes=2**50)
    pins = Pins(tp=2, pp=4, cp=1, schedule="interleaved", virtual_stages=2)
    model = load_model("gpt-7b")
    question = Question(model, cluster, hardware, seq_tokens, system="megatron-lm", global_batch=8, pins=pins)
    found, every = search(question), search(question, prune=False)
    assert found.best is not None
    assert every.best is not None
    assert found.best.decisions == every.best.decisions
    assert found.best.decisions.allocator_limit_gib == int(device_gib)
