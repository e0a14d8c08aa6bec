"""Step times from a few layers equal those of all layers; there are none when layers do not repeat."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.costs.pace import pace
from memo_sim.engine.layers import step_s_of_few_layers
from memo_sim.engine.simulate import simulate
from memo_sim.planning import few_layers
from memo_sim.planning.experts_apart import experts_apart
from memo_sim.planning.few_layers import Lowered, Pass, Passes
from memo_sim.planning.question import with_memory
from memo_sim.planning.short_rings import parts_repeat, steps_repeat
from memo_sim.planning.space import with_alpha
from memo_sim.program.layout.repeated_layers import RepeatedLayers
from memo_sim.views.plan_table import layout_label

CLUSTER, HARDWARE = with_memory(*load_cluster("a800-1x8"), device_bytes=2**50, host_bytes=2**50)
POLICIES = [
    ("none", 0.0),
    ("none", 0.5),
    ("none", 1.0),
    ("tokenwise", 0.25),
    ("tokenwise", 0.75),
    ("full", 0.0),
    ("rowwise", 1.0),
]
LAYOUTS = [
    Layout(tp=8),
    Layout(tp=2, sequence_parallel=True, ulysses=2, dp=2, zero=3),
    Layout(cp=8, zero=3),
    Layout(cp=4, dp=2, zero=3, zero_ranks=4),
]


def decided(layout: Layout, policy: tuple[str, float], *, layers: int, seq_tokens: int, **more: object) -> Decisions:
    model = msgspec.structs.replace(load_model("gpt-7b"), layers=layers)
    fields = {"global_batch": layout.dp, "loss_chunk_tokens": 4096, **more}
    return with_alpha(Decisions(model=model, layout=layout, seq_tokens=seq_tokens, **fields), *policy)


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_label)
@pytest.mark.parametrize(("layers", "seq_tokens", "micro_batches"), [(13, 1 << 16, 1), (16, 1 << 13, 5)])
def test_few_layers_tell_the_step_time_of_all(layout: Layout, layers: int, seq_tokens: int, micro_batches: int) -> None:
    told = 0
    for policy in POLICIES:
        more = {"global_batch": micro_batches * layout.dp}
        decisions = decided(layout, policy, layers=layers, seq_tokens=seq_tokens, **more)
        found = step_s_of_few_layers(decisions, HARDWARE, CLUSTER)
        if found is not None:
            told += 1
            assert found == pytest.approx(simulate(decisions, HARDWARE, CLUSTER).prediction.step_s, rel=1e-12)
    assert told >= len(POLICIES) // 3


DIFFERING = {
    "three wide, then narrow": (1,) * 3 + (2,) * 17,
    "alternating": (1, 2) * 8,
    "every third wide": (2, 2, 1) * 8,
}


def differing(kinds: tuple[int, ...], layout: Layout, policy: tuple[str, float]) -> Decisions:
    """Layers of kind n have an n-th of the MLP."""
    decisions = decided(layout, policy, layers=16, seq_tokens=1 << 16)
    shapes = [LayerShape(ffn_hidden=decisions.model.ffn_hidden // kind) for kind in kinds]
    return msgspec.structs.replace(decisions, model=decisions.model.of_layers(shapes))


@pytest.mark.parametrize("kinds", DIFFERING.values(), ids=list(DIFFERING))
def test_layers_that_differ_repeat_with_their_pattern(kinds: tuple[int, ...]) -> None:
    told = 0
    for policy in POLICIES:
        decisions = differing(kinds, Layout(tp=8), policy)
        found = step_s_of_few_layers(decisions, HARDWARE, CLUSTER)
        if found is not None:
            told += 1
            assert found == pytest.approx(simulate(decisions, HARDWARE, CLUSTER).prediction.step_s, rel=1e-12)
    assert told >= len(POLICIES) // 3


def test_layers_without_a_pattern_give_no_step_time() -> None:
    kinds = tuple(1 + (n * n + n // 3) % 3 for n in range(16))
    assert step_s_of_few_layers(differing(kinds, Layout(tp=8), ("none", 0.0)), HARDWARE, CLUSTER) is None


@pytest.mark.parametrize("kinds", DIFFERING.values(), ids=list(DIFFERING))
@pytest.mark.parametrize("policy", [("none", 0.0), ("none", 0.5), ("tokenwise", 0.25), ("full", 0.5)])
def test_the_pass_of_few_layers_is_that_of_all(kinds: tuple[int, ...], policy: tuple[str, float]) -> None:
    decisions = differing(kinds, Layout(tp=8), policy)
    shapes = [decisions.model.layer(n) for n in range(decisions.model.layers)]
    few, whole = Passes(HARDWARE, CLUSTER), Passes(HARDWARE, CLUSTER)
    found, bytes_found = few.of(decisions, shapes), few.held(decisions, shapes)
    with all_lowered(shapes):
        wanted, bytes_wanted = whole.of(decisions, shapes), whole.held(decisions, shapes)
    for name in Pass.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-9), name
    assert bytes_found == bytes_wanted


@contextmanager
def all_lowered(shapes: Sequence[LayerShape]) -> Iterator[None]:
    """Have every one of the layers lowered."""
    with pytest.MonkeyPatch.context() as patched:
        all_of_them = RepeatedLayers(tuple(shapes), 0, len(shapes), 2, 0)
        patched.setattr(few_layers, "repeated_layers", lambda *_, **__: all_of_them)
        patched.setattr(few_layers, "LOWERED", len(shapes))
        yield


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_label)
@pytest.mark.parametrize("layers", [7, 9, 12])
def test_few_layers_tell_the_bytes_of_an_odd_and_an_even_number(layout: Layout, layers: int) -> None:
    for policy in POLICIES:
        decisions = decided(layout, policy, layers=layers, seq_tokens=1 << 16)
        shapes = [decisions.model.layer(0)] * layers
        found = Passes(HARDWARE, CLUSTER).held(decisions, shapes)
        with all_lowered(shapes):
            assert found == Passes(HARDWARE, CLUSTER).held(decisions, shapes), policy


def test_an_odd_number_of_layers_is_not_lowered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = decided(LAYOUTS[0], ("tokenwise", 0.5), layers=8, seq_tokens=1 << 16)
    passes, shape = Passes(HARDWARE, CLUSTER), decisions.model.layer(0)
    six = passes.held(decisions, [shape] * 6)
    monkeypatch.setattr(few_layers, "lower_passes", None)
    assert passes.held(decisions, [shape] * 7).host_bytes > six.host_bytes


@pytest.mark.parametrize(
    ("layout", "layers", "more"),
    [
        (Layout(tp=8), 10, {}),
        (Layout(tp=4, pp=2), 16, {}),
        (Layout(tp=4, dp=2, zero=1), 16, {}),
        (Layout(tp=4, dp=2, zero=3, zero_ranks=1), 16, {}),
        (Layout(tp=8), 16, {"memory_policy": "caching"}),
    ],
    ids=["few", "stages", "gathered beside a pass", "groups of one rank", "allocator"],
)
def test_layers_that_do_not_repeat_give_no_step_time(layout: Layout, layers: int, more: dict[str, object]) -> None:
    decisions = decided(layout, ("none", 0.0), layers=layers, seq_tokens=1 << 13, **more)
    assert step_s_of_few_layers(decisions, HARDWARE, CLUSTER) is None


def test_work_that_overlaps_two_runs_is_noticed() -> None:
    """The embedding's last kernel overlaps only with the first reductions of norm gradients, so layers differ."""
    decisions = decided(Layout(tp=8, sequence_parallel=True), ("none", 0.0), layers=16, seq_tokens=1 << 16)
    assert step_s_of_few_layers(decisions, HARDWARE, CLUSTER) is None


def test_a_plan_that_does_not_fit_gives_no_step_time() -> None:
    cluster, hardware = with_memory(*load_cluster("a800-1x8"), device_bytes=8 * 2**30, host_bytes=2**50)
    decisions = decided(Layout(tp=8), ("none", 0.0), layers=16, seq_tokens=1 << 18)
    assert step_s_of_few_layers(decisions, hardware, cluster) is None


RINGS = [
    Layout(cp=8),
    Layout(cp=16, ulysses=2, zero=3),
    Layout(tp=2, sequence_parallel=True, cp=32),
    Layout(cp=8, dp=2, zero=3),
]


@pytest.mark.parametrize("layout", RINGS, ids=layout_label)
@pytest.mark.parametrize("model", ["gpt-7b", "llama3-8b"])
def test_short_rings_tell_the_kernels_of_a_long_one(
    layout: Layout, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, hardware = load_cluster("h100-8x8")
    decisions = Decisions(model=load_model(model), layout=layout, seq_tokens=layout.cp * 1024, global_batch=layout.dp)
    layers = [decisions.model.layer(n) for n in range(decisions.model.layers)]
    assert steps_repeat(decisions)
    short = Passes(hardware, cluster).computed(decisions, layers)
    monkeypatch.setattr(few_layers, "steps_repeat", lambda _: False)
    whole = Passes(hardware, cluster).computed(decisions, layers)
    for name in Pass.__struct_fields__:
        assert getattr(short, name) == pytest.approx(getattr(whole, name), rel=1e-12)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(metp=16), {}),
        (Layout(metp=32, zero=3), {"recompute": "tokenwise"}),
        (Layout(metp=16, dp=2), {"recompute": "full", "mlp_chunk_tokens": 256}),
        pytest.param(Layout(metp=16, pp=2), {"micro_batch": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda value: layout_label(value) if isinstance(value, Layout) else str(value),
)
@pytest.mark.parametrize("model", ["gpt-7b", "llama-7b"])
def test_few_parts_of_metp_tell_the_kernels_of_many(
    layout: Layout, changes: dict[str, Any], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, hardware = load_cluster("h100-8x8")
    batch = layout.dp * changes.get("micro_batch", 1)
    decisions = Decisions(
        model=load_model(model), layout=layout, seq_tokens=layout.metp * 1024, global_batch=batch, **changes
    )
    layers = [decisions.model.layer(n) for n in range(decisions.model.layers)]
    assert parts_repeat(decisions)
    short = Passes(hardware, cluster).computed(decisions, layers)
    monkeypatch.setattr(few_layers, "parts_repeat", lambda _: False)
    whole = Passes(hardware, cluster).computed(decisions, layers)
    for name in Pass.__struct_fields__:
        assert getattr(short, name) == pytest.approx(getattr(whole, name), rel=1e-11)


def test_parts_of_metp_that_differ_are_lowered_whole() -> None:
    metp = Decisions(model=load_model("gpt-7b"), layout=Layout(metp=16), seq_tokens=1 << 15, global_batch=1)
    assert parts_repeat(metp)
    for other in (
        msgspec.structs.replace(metp, layout=Layout(metp=8)),
        msgspec.structs.replace(metp, layout=Layout(metp=16, overlap_exchanges=False)),
        msgspec.structs.replace(metp, recompute="full", attention_chunk_tokens=1 << 14),
        msgspec.structs.replace(metp, model=msgspec.structs.replace(metp.model, window=1024)),
    ):
        assert not parts_repeat(other)


def test_rings_whose_steps_differ_are_lowered_whole() -> None:
    ring = Decisions(model=load_model("gpt-7b"), layout=Layout(cp=8), seq_tokens=1 << 14, global_batch=1)
    assert steps_repeat(ring)
    windowed = msgspec.structs.replace(ring.model, window=1024)
    for other in (
        msgspec.structs.replace(ring, model=windowed),
        msgspec.structs.replace(ring, layout=msgspec.structs.replace(ring.layout, cp=4)),
        msgspec.structs.replace(ring, layout=msgspec.structs.replace(ring.layout, cp_exchange="rsa")),
        msgspec.structs.replace(ring, layout=msgspec.structs.replace(ring.layout, subsequences=2)),
    ):
        assert not steps_repeat(other)


@pytest.mark.parametrize(
    ("name", "layout", "more"),
    [
        ("deepseek-v3", Layout(ulysses=2, dp=4, ep=8), {}),
        ("deepseek-v3", Layout(cp=8, ulysses=2, dp=2, ep=8), {"expert_load": "zipf-1", "expert_capacity": 1.5}),
        (
            "qwen3-30b-a3b",
            Layout(tp=2, sequence_parallel=True, cp=4, dp=2, ep=8, expert_tp=1),
            {"expert_overlap": True},
        ),
        ("mixtral-8x7b", Layout(tp=4, sequence_parallel=True, cp=2, ulysses=2, ep=4), {"expert_load": "zipf-1"}),
    ],
    ids=str,
)
def test_experts_and_attention_apart_tell_the_kernels_of_both(name: str, layout: Layout, more: dict[str, Any]) -> None:
    cluster, hardware = with_memory(*load_cluster("h100-4x8"), device_bytes=2**50, host_bytes=2**50)
    model = load_model(name)
    layers = [model.layer(n) for n in range(model.layers)]
    fields = {"global_batch": layout.dp, "loss_chunk_tokens": 1024, **more}
    decisions = Decisions(model=model, layout=layout, seq_tokens=1 << 15, **fields)
    assert experts_apart(decisions) is not None
    apart = Passes(hardware, cluster).computed(decisions, layers)
    whole = Passes(hardware, cluster).of(decisions, layers)
    for part in few_layers.KERNELS:
        assert getattr(apart, part) == pytest.approx(getattr(whole, part), rel=1e-12)


def test_plans_whose_experts_depend_on_more_are_lowered_whole() -> None:
    layout = Layout(ulysses=2, dp=4, ep=8)
    decisions = Decisions(model=load_model("qwen3-30b-a3b"), layout=layout, seq_tokens=1 << 14, global_batch=4)
    assert experts_apart(decisions) is not None
    for other in (
        with_alpha(decisions, "none", 0.5),
        with_alpha(decisions, "full", 0.0),
        msgspec.structs.replace(decisions, layout=msgspec.structs.replace(layout, ep=1)),
        msgspec.structs.replace(decisions, layout=Layout(dp=8, ep=8)),
        msgspec.structs.replace(decisions, model=load_model("llama3-8b"), layout=Layout(ulysses=2, dp=4)),
    ):
        assert experts_apart(other) is None


def test_few_layers_have_the_pace_of_all_devices() -> None:
    """The slowest of many devices is slower than one device alone (``costs/pace.py``)."""
    cluster, hardware = with_memory(*load_cluster("h100-4x8"), device_bytes=2**50, host_bytes=2**50)
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=8)
    layers = [model.layer(n) for n in range(model.layers)]
    passes, found = Passes(hardware, cluster), list[float]()
    for dp in (1, 32):
        layout = Layout(dp=dp, zero=1)
        decisions = Decisions(model=model, layout=layout, seq_tokens=1 << 14, global_batch=dp)
        found.append(passes.of(decisions, layers).compute_s)
        assert passes.computed(decisions, layers).compute_s == found[-1]
        assert found[-1] < (simulate(decisions, hardware, cluster).prediction.step_s or 0.0)
    assert 1.03 * found[0] < found[1] < pace(hardware, 32) * found[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_another_process_has_lowered_is_not_lowered_again(
    policy: tuple[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions = decided(Layout(tp=8), policy, layers=16, seq_tokens=1 << 13)
    layers = [decisions.model.layer(number) for number in range(decisions.model.layers)]

    def told(passes: Passes) -> list[object]:
        ask = (passes.of, passes.halves, passes.computed, passes.held)
        return [each(decisions, layers) for each in ask]

    here, there = Passes(HARDWARE, CLUSTER), Passes(HARDWARE, CLUSTER)
    nothing = here.counts
    lowered = told(here)
    assert here.counts != nothing
    sent = there.learn(pickle.loads(pickle.dumps(here.lowered_since(nothing))), nothing)
    assert sent == there.counts == here.counts
    assert there.learn(here.lowered_since(nothing), nothing) == nothing  # what was known before is still unsent
    assert not any(getattr(there.lowered_since(here.counts), each.name) for each in fields(Lowered))
    monkeypatch.setattr(few_layers, "_FewLayers", None)
    assert told(there) == lowered
