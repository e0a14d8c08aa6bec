"""The plan that keeps everything bounds the step times of all other plans of its layout, with its waits.

The plan that rebuilds everything and swaps nothing bounds those that swap more.
"""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.engine.simulate import simulate
from memo_sim.planning.few_layers import Passes, gathers
from memo_sim.planning.lower_bounds import LowerBounds, rebuilds_all
from memo_sim.planning.pipeline_lower_bound import kept
from memo_sim.planning.presets import Policy
from memo_sim.planning.question import with_memory
from memo_sim.planning.space import with_alpha
from memo_sim.program.layout.shape import shape_of
from memo_sim.views.plan_table import layout_label

ROOM = 2**50
MEGATRON = {"sequence_parallel": True}
PLANS: dict[str, tuple[float, dict[str, object]]] = {
    "none": (0.0, {}),
    "partial swap": (0.5, {"recompute": "none"}),
    "full swap": (1.0, {"recompute": "none"}),
    "tokenwise": (0.0, {}),
    "tokenwise, some swapped": (0.25, {"recompute": "tokenwise"}),
    "tokenwise, most swapped": (0.9, {"recompute": "tokenwise"}),
    "full": (0.0, {}),
    "full, inputs swapped": (1.0, {"recompute": "full"}),
    "full, ends early": (0.0, {"recompute": "full", "early_stop": True}),
    "full, of some layers": (0.0, {"recompute": "full", "recompute_layers": "every-2"}),
    "full, MLP in blocks": (0.0, {"recompute": "full", "mlp_chunk_tokens": 1024}),
    "full, in chunks": (1.0, {"recompute": "full", "mlp_chunk_tokens": 1024, "attention_chunk_tokens": 4096}),
    "rowwise": (0.0, {"mlp_chunk_tokens": 1024}),
    "rowwise, swapped": (1.0, {"recompute": "rowwise", "mlp_chunk_tokens": 512}),
    "rowwise, partly swapped": (0.5, {"recompute": "rowwise", "mlp_chunk_tokens": 2048}),
    "rowwise, in chunks": (1.0, {"recompute": "rowwise", "mlp_chunk_tokens": 512, "attention_chunk_tokens": 4096}),
    "selective": (0.0, {}),
    "norms": (0.0, {}),
    "mlp": (0.0, {}),
    "operators": (0.0, {}),
}
DENSE = [
    Layout(tp=4, **MEGATRON, cp=2, zero=1),
    Layout(tp=8),
    Layout(tp=16, **MEGATRON),
    Layout(ulysses=8, zero=1),
    Layout(tp=2, **MEGATRON, ulysses=2, dp=2, zero=3),
    Layout(tp=2, **MEGATRON, ulysses=4, pp=2),
    Layout(cp=8),
    Layout(cp=4, cp_exchange="all_gather", dp=2, zero=2),
    Layout(tp=4, **MEGATRON, tp_overlap="chunked", dp=2, zero=3),
    Layout(tp=4, **MEGATRON, pp=4),
    Layout(tp=4, **MEGATRON, pp=2, schedule="interleaved", virtual_stages=2),
    Layout(tp=4, **MEGATRON, pp=4, schedule="zero-bubble"),
    Layout(tp=4, **MEGATRON, pp=2, schedule="gpipe"),
]
EXPERTS = [
    Layout(ulysses=2, dp=4, ep=8, zero=1),
    Layout(tp=2, **MEGATRON, dp=4, ep=4, expert_tp=1, zero=1),
    Layout(ulysses=4, pp=2, ep=4, schedule="interleaved", virtual_stages=2),
]


def shallow(name: str) -> Model:
    return msgspec.structs.replace(load_model(name), layers=8)


def plan(name: str, layout: Layout, how: str, *, expert_overlap: bool = False) -> Decisions:
    alpha, fields = PLANS[how]
    base = Decisions(
        model=shallow(name), layout=layout, seq_tokens=1 << 14, global_batch=4 * layout.dp, loss_chunk_tokens=4096,
        expert_overlap=expert_overlap,
    )  # fmt: skip
    return msgspec.structs.replace(with_alpha(base, str(fields.get("recompute", how)), alpha), **fields)


def is_lowered(decisions: Decisions) -> bool:
    try:
        shape_of(decisions)
    except Infeasible:
        return False
    return True


def check(bounds: LowerBounds, cluster_name: str, decisions: Decisions) -> tuple[float, float]:
    """Compare bounds with the played step; return those of the plan that keeps everything."""
    cluster, hardware = with_memory(*load_cluster(cluster_name), device_bytes=ROOM, host_bytes=ROOM)
    played = simulate(decisions, hardware, cluster).prediction
    assert played.step_s is not None
    keep, policy = kept(decisions), Policy.of(decisions)
    computed_s, waited_s = (bounds.beside_s(keep, [policy], waits=waits) for waits in (False, True))
    ungathered_s = bounds.beside_s(keep, [policy], waits=True, gathered=False)
    assert 0 < computed_s <= ungathered_s * (1 + 1e-12)
    assert ungathered_s <= waited_s * (1 + 1e-12)
    assert waited_s <= played.step_s
    assert (ungathered_s < waited_s) == gathers(keep)
    if rebuilds_all(decisions):
        unswapped_s = bounds.unswapped_s(decisions)
        assert 0.5 * played.step_s < unswapped_s <= played.step_s
        if not decisions.swapped_tokens:
            assert unswapped_s == bounds.of(decisions).step_s
    return computed_s, waited_s


def bounds_on(cluster_name: str) -> LowerBounds:
    return LowerBounds(*reversed(with_memory(*load_cluster(cluster_name), device_bytes=ROOM, host_bytes=ROOM)))


@pytest.mark.parametrize(
    ("name", "layout", "how"),
    [
        ("llama3-8b", DENSE[0], "tokenwise, most swapped"),
        ("llama3-8b", DENSE[1], "full swap"),
        ("llama3-8b", DENSE[3], "tokenwise, some swapped"),
        ("llama3-8b", DENSE[5], "full, in chunks"),
        ("llama3-8b", DENSE[4], "full swap"),
        ("llama3-8b", DENSE[8], "full"),
        ("llama3-8b", Layout(tp=2, **MEGATRON, dp=4, zero=3, zero_ranks=2), "tokenwise"),
        ("qwen3-30b-a3b", Layout(ulysses=2, dp=4, ep=8, zero=3), "mlp"),
        ("llama3-8b", DENSE[6], "rowwise, swapped"),
        ("llama3-8b", DENSE[2], "rowwise, partly swapped"),
        ("llama3-8b", DENSE[10], "rowwise, partly swapped"),
        ("llama3-8b", DENSE[9], "full, inputs swapped"),
        ("llama3-8b", DENSE[10], "partial swap"),
        ("llama3-8b", DENSE[11], "tokenwise"),
        ("qwen3-30b-a3b", EXPERTS[0], "mlp"),
        ("qwen3-30b-a3b", EXPERTS[1], "full"),
        ("qwen3-30b-a3b", EXPERTS[0], "rowwise, swapped"),
    ],
    ids=lambda value: layout_label(value) if isinstance(value, Layout) else str(value),
)
def test_no_plan_is_faster_than_its_layouts_bound(name: str, layout: Layout, how: str) -> None:
    check(bounds_on("h100-4x8"), "h100-4x8", plan(name, layout, how))


@pytest.mark.parametrize(
    ("fields", "counted"),
    [
        ({}, True),
        ({"expert_load": "zipf-1"}, False),
        ({"expert_load": "zipf-1", "expert_capacity": 0.5}, True),
        ({"expert_overlap": True}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [256, 1024, 4096])
def test_row_blocks_wait_for_experts_rows(rows: int, fields: dict[str, object], counted: bool) -> None:
    """A capacity that follows from an uneven load is rounded in each block; products may hide exchanges beside them."""
    base = plan("qwen3-30b-a3b", Layout(ulysses=2, dp=4, ep=8, zero=1), "rowwise")
    decisions = msgspec.structs.replace(base, mlp_chunk_tokens=rows, **fields)
    computed_s, waited_s = check(bounds_on("h100-4x8"), "h100-4x8", decisions)
    assert (waited_s > 1.01 * computed_s) == counted


@pytest.mark.slow
@pytest.mark.parametrize("cluster_name", ["h100-4x8", "a800-4x8"])
@pytest.mark.parametrize("layout", DENSE, ids=layout_label)
def test_no_plan_of_any_policy_is_faster_than_its_layouts_bound(layout: Layout, cluster_name: str) -> None:
    bounds = bounds_on(cluster_name)
    plans = [plan("llama3-8b", layout, how) for how in PLANS]
    lowered = [decisions for decisions in plans if is_lowered(decisions)]
    assert len(lowered) > len(PLANS) // 2
    for decisions in lowered:
        check(bounds, cluster_name, decisions)


@pytest.mark.slow
@pytest.mark.parametrize("expert_overlap", [False, True])
@pytest.mark.parametrize("layout", EXPERTS, ids=layout_label)
def test_no_plan_with_experts_is_faster_than_its_layouts_bound(layout: Layout, expert_overlap: bool) -> None:
    bounds = bounds_on("h100-4x8")
    plans = [plan("qwen3-30b-a3b", layout, how, expert_overlap=expert_overlap) for how in PLANS]
    lowered = [decisions for decisions in plans if is_lowered(decisions)]
    assert len(lowered) > len(PLANS) // 2
    for decisions in lowered:
        check(bounds, "h100-4x8", decisions)


@pytest.mark.parametrize(("layout", "least"), [(DENSE[2], 1.7), (DENSE[1], 1.02), (DENSE[6], 1.0)], ids=str)
def test_waits_make_the_bound_of_plans_on_whole_rows_higher(layout: Layout, least: float) -> None:
    """Of a long ring, only kernels are known without a lowering."""
    bounds = bounds_on("h100-4x8")
    for how in ("none", "full swap", "selective"):
        computed_s, waited_s = check(bounds, "h100-4x8", plan("llama3-8b", layout, how))
        assert waited_s >= least * computed_s * (1 - 1e-12)


def test_the_slowest_policy_does_not_raise_the_bound_of_all() -> None:
    bounds = bounds_on("h100-4x8")
    plans = [plan("llama3-8b", DENSE[0], how) for how in ("none", "full", "rowwise")]
    policies = [Policy.of(each) for each in plans]
    alone = [bounds.beside_s(plans[0], [policy], waits=True) for policy in policies]
    assert bounds.beside_s(plans[0], policies, waits=True) == min(alone) < max(alone)


@pytest.mark.parametrize("recompute", ["full", "rowwise"])
def test_what_is_repeated_for_certain_is_repeated(recompute: str) -> None:
    passes = Passes(*reversed(load_cluster("h100-1x8")))
    for layout in (Layout(tp=2, **MEGATRON), Layout(ulysses=2)):
        again = plan("llama3-8b", layout, recompute)
        layers = [again.model.layer(n) for n in range(again.model.layers)]
        keep = passes.waited(kept(again), layers)
        certain_s = keep.repeated_s + (keep.attention_s if recompute == "full" else 0.0)
        assert 0.7 * passes.of(again, layers).rebuild_s < certain_s <= passes.of(again, layers).rebuild_s
