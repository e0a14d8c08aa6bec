"""Lower bounds never exceed the engine's figures, and a search that prunes by them finds what a full search finds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.knobs import Recompute, Schedule
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.engine.simulate import simulate
from memo_sim.planning.alpha_search import best_partial_swap
from memo_sim.planning.bounded_candidates import Bounded, CandidateBounds
from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.presets import FULL_RECOMPUTE, KEEP, PARTIAL_SWAP, SYSTEMS, TOKENWISE
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.search import SearchResult, best_with_more_memory, search
from memo_sim.planning.space import candidates, last_resorts, with_alpha
from memo_sim.program.layout.rules.recompute import KEEPS_ALL_TOKENS
from memo_sim.views.plan_table import layout_label
from tests.pairs import covering

GIB = 2**30
ROOM = 2**50


def shallow(layers: int) -> Model:
    return msgspec.structs.replace(load_model("gpt-7b"), layers=layers)


def ask(
    devices: int, *, device_gib: int, host_gib: int, seq_tokens: int = 1 << 17, system: str = "every-layout"
) -> Question:
    cluster, hardware = load_cluster("a800-1x8")
    cluster, hardware = with_memory(cluster, hardware, device_bytes=device_gib * GIB, host_bytes=host_gib * GIB)
    cluster = msgspec.structs.replace(cluster, devices_per_node=devices)
    return Question(shallow(4), cluster, hardware, seq_tokens, system=system, global_batch=2)


LAYOUTS = [
    Layout(tp=4, sequence_parallel=True, cp=2, zero=1),
    Layout(tp=2, sequence_parallel=True, ulysses=2, dp=2, zero=3),
    Layout(cp=4, cp_exchange="all_gather", dp=2, zero=2),
    Layout(tp=2, sequence_parallel=True, dp=4, zero=3, zero_ranks=2),
    Layout(tp=8),
    Layout(tp=4, sequence_parallel=True, tp_overlap="chunked", dp=2, zero=3),
    Layout(metp=4, dp=2, zero=1),
    Layout(metp=8),
]
POLICIES = [
    *(("none", alpha) for alpha in (0.0, 0.5, 1.0)),
    *(("tokenwise", alpha) for alpha in (0.0, 0.25, 0.75)),
    *(("full", alpha) for alpha in (0.0, 1.0)),
    *(("rowwise", alpha) for alpha in (0.0, 0.5, 1.0)),
    ("selective", 0.0),
    ("norms", 0.0),
    ("mlp", 0.0),
    ("operators", 0.0),
]


def label(value: object) -> str:
    return layout_label(value) if isinstance(value, Layout) else str(value)


def check_bounds(model: Model, layout: Layout, policies: list[tuple[str, float]]) -> None:
    """Play every policy on a layout, and compare it with its lower bounds."""
    cluster, hardware = with_memory(*load_cluster("a800-1x8"), device_bytes=ROOM, host_bytes=ROOM)
    bounds = LowerBounds(hardware, cluster)
    for recompute, alpha in policies:
        base = Decisions(
            model=model,
            layout=layout,
            seq_tokens=1 << 16,
            global_batch=2 * layout.dp,
            loss_chunk_tokens=4096,
        )
        decisions = with_alpha(base, recompute, alpha)
        bound, played = bounds.of(decisions), simulate(decisions, hardware, cluster).prediction
        assert played.step_s is not None
        assert bound.step_s <= played.step_s
        if not alpha:
            assert bound.step_s > 0.85 * played.step_s
        assert bound.device_bytes <= played.peak_device_bytes
        assert bound.host_bytes_per_node == played.peak_host_bytes_per_node
        if layout.zero < 2:
            assert bound.device_bytes > 0.95 * played.peak_device_bytes
        rough = bounds.rough(decisions, keep=with_alpha(base, "none", 0.0))
        assert 0 < rough.step_s <= bound.step_s * (1 + 1e-12)
        assert rough.device_bytes <= bound.device_bytes
        assert rough.host_bytes_per_node <= bound.host_bytes_per_node
        if decisions.recompute == "none" and layout.zero < 3:
            assert rough.device_bytes > 0.7 * bound.device_bytes


@pytest.mark.parametrize(("layout", "layers"), covering(LAYOUTS, [4, 9, 12]), ids=label)
def test_no_plan_is_below_its_lower_bound(layout: Layout, layers: int) -> None:
    # METP keeps no Q, K, V that attention could be recomputed from, and has no row blocks.
    policies = [each for each in POLICIES if layout.metp == 1 or each[0] not in (*KEEPS_ALL_TOKENS, "rowwise")]
    check_bounds(shallow(layers), layout, policies)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mixtral-8x7b", Layout(tp=2, sequence_parallel=True, ulysses=2, dp=2, zero=3)),
        pytest.param("mixtral-8x7b", Layout(tp=4, sequence_parallel=True, cp=2), marks=pytest.mark.slow),
        pytest.param("qwen3-30b-a3b", Layout(cp=4, cp_exchange="all_gather", dp=2, zero=2), marks=pytest.mark.slow),
        pytest.param("mixtral-8x7b", Layout(cp=8, zero=1), marks=pytest.mark.slow),
        ("mixtral-8x7b", Layout(tp=2, sequence_parallel=True, dp=4, ep=4, zero=1)),
        pytest.param("qwen3-30b-a3b", Layout(cp=4, dp=2, ep=8, zero=3), marks=pytest.mark.slow),
        pytest.param(
            "qwen3-30b-a3b",
            Layout(tp=2, sequence_parallel=True, dp=4, ep=4, expert_tp=1, zero=2, zero_ranks=2),
            marks=pytest.mark.slow,
        ),
        pytest.param("mixtral-8x7b", Layout(ulysses=4, dp=2, ep=2, zero=2), marks=pytest.mark.slow),
    ],
    ids=label,
)
def test_no_plan_with_experts_is_below_its_lower_bound(name: str, layout: Layout) -> None:
    model = msgspec.structs.replace(load_model(name), layers=4)
    check_bounds(model, layout, [each for each in POLICIES if each[0] != "operators"])


@pytest.mark.parametrize(
    "more", [{}, {"expert_load": "zipf-1", "expert_capacity": 1.5}, {"expert_overlap": True}], ids=str
)
def test_layers_without_experts_have_bounds_where_others_are_divided(more: dict[str, object]) -> None:
    """In pipelines, layers of each kind get bounds of their own; one stage here has dense layers alone."""
    cluster, hardware = with_memory(*load_cluster("h100-1x8"), device_bytes=ROOM, host_bytes=ROOM)
    model = load_model("deepseek-v3")
    base = Decisions(
        model=model.of_layers([model.layer(n) for n in range(1, 5)]),
        layout=Layout(tp=2, sequence_parallel=True, pp=2, dp=2, ep=2, zero=1),
        seq_tokens=1 << 12,
        global_batch=8,
        **more,
    )
    bounds = LowerBounds(hardware, cluster)
    for policy in (("none", 0.0), ("none", 1.0), ("full", 0.0)):
        decisions = with_alpha(base, *policy)
        played = simulate(decisions, hardware, cluster).prediction
        assert played.step_s is not None
        for bound in (bounds.of(decisions), bounds.rough(decisions, keep=with_alpha(base, "none", 0.0))):
            assert 0.5 * played.step_s < bound.step_s <= played.step_s
            assert bound.device_bytes <= played.peak_device_bytes


@pytest.mark.slow
def test_a_search_of_stages_with_divided_experts_finds_what_evaluating_everything_finds() -> None:
    cluster, hardware = with_memory(*load_cluster("h100-1x8"), device_bytes=300 * GIB, host_bytes=600 * GIB)
    cluster = msgspec.structs.replace(cluster, devices_per_node=4)
    model = load_model("deepseek-v3")
    few = model.of_layers([model.layer(n) for n in range(1, 5)])
    asked = Question(few, cluster, hardware, 1 << 14, system="every-layout", global_batch=4, pins=Pins(tp=1, pp=2))
    found, everything = search(asked), search(asked, prune=False)
    assert found.best is not None
    assert everything.best is not None
    assert (found.best.decisions, found.best.prediction) == (everything.best.decisions, everything.best.prediction)
    assert found.best.decisions.layout.ep > 1
    assert found.evaluated < everything.evaluated / 4


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, sequence_parallel=True, ulysses=4, dp=4, zero=3),
        Layout(ulysses=4, dp=8, zero=3),
        Layout(cp=4, cp_exchange="all_gather", ulysses=8, zero=3),
        Layout(tp=4, sequence_parallel=True, cp=2, dp=4, zero=2),
    ],
    ids=layout_label,
)
@pytest.mark.parametrize("seq_tokens", [1 << 13, 1 << 16])
def test_collectives_beside_each_other_do_not_break_the_lower_bound(layout: Layout, seq_tokens: int) -> None:
    """Collectives of several groups overlap, so a bound that added their times would be too high."""
    cluster, hardware = with_memory(*load_cluster("a800-4x8"), device_bytes=ROOM, host_bytes=ROOM)
    bounds = LowerBounds(hardware, cluster)
    for recompute in ("none", "full"):
        base = Decisions(model=shallow(12), layout=layout, seq_tokens=seq_tokens, global_batch=2 * layout.dp)
        decisions = with_alpha(base, recompute, 0.0)
        played = simulate(decisions, hardware, cluster).prediction
        assert played.step_s is not None
        assert 0 < bounds.of(decisions).step_s <= played.step_s
        assert not bounds.reach(decisions, played.step_s * (1 + 1e-9))


def test_gradients_in_bf16_are_not_below_their_lower_bound() -> None:
    """Chunks of the loss add to the classifier's gradient again and again: in bf16 that is less to move."""
    cluster, hardware = with_memory(*load_cluster("h100-2x8"), device_bytes=ROOM, host_bytes=ROOM)
    gemma = load_model("gemma3-4b")
    narrow = Decisions(
        model=gemma.of_layers([gemma.layer(0)] * 2),
        seq_tokens=1 << 15,
        loss="checkpointed",
        loss_chunk_tokens=4096,
        states="pure-bf16",
    )
    bounds = LowerBounds(hardware, cluster)
    for decisions in (narrow, msgspec.structs.replace(narrow, grad_sums="fp32")):
        played = simulate(decisions, hardware, cluster).prediction.step_s
        assert played is not None
        assert 0.98 * played < bounds.of(decisions).step_s <= played


@pytest.mark.parametrize("states", ["bf16", "host"])
@pytest.mark.parametrize(("policy", "loss"), [("planned", "auto"), ("planned", "linear"), ("eager", "auto")])
def test_lower_bounds_hold_for_other_states_and_memory_policies(states: str, policy: str, loss: str) -> None:
    cluster, hardware = with_memory(*load_cluster("a800-1x8"), device_bytes=ROOM, host_bytes=ROOM)
    decisions = Decisions(
        model=shallow(8),
        layout=Layout(tp=2, sequence_parallel=True, cp=2, dp=2, zero=1),
        seq_tokens=1 << 15,
        global_batch=8,
        states=states,
        memory_policy=policy,
        loss=loss,
    )
    bound, played = LowerBounds(hardware, cluster).of(decisions), simulate(decisions, hardware, cluster).prediction
    assert bound.step_s <= played.step_s
    assert bound.device_bytes <= played.peak_device_bytes
    assert bound.host_bytes_per_node <= played.peak_host_bytes_per_node


@pytest.mark.parametrize(("schedule", "pp"), covering(["gpipe", "1f1b", "interleaved", "zero-bubble"], [2, 4]))
def test_pipelines_are_not_below_their_lower_bound(schedule: str, pp: int) -> None:
    chunks, ahead = 2 if schedule == "interleaved" else 1, 0.6 if schedule == "zero-bubble" else 0.72
    cluster, hardware = with_memory(*load_cluster("a800-1x8"), device_bytes=ROOM, host_bytes=ROOM)
    bounds = LowerBounds(hardware, cluster)
    layout = Layout(tp=2, sequence_parallel=True, cp=4 // pp, pp=pp, schedule=schedule, virtual_stages=chunks, zero=1)
    base = Decisions(model=shallow(16), layout=layout, seq_tokens=1 << 15, global_batch=8, loss_chunk_tokens=4096)
    for recompute, alpha in (("none", 0.0), ("full", 0.0), ("tokenwise", 0.5), ("none", 1.0)):
        decisions = with_alpha(base, recompute, alpha)
        bound, played = bounds.of(decisions), simulate(decisions, hardware, cluster).prediction
        assert bound.step_s <= played.step_s
        assert bound.device_bytes <= played.peak_device_bytes
        assert bounds.rough(decisions, keep=None).device_bytes <= played.peak_device_bytes
        assert bound.host_bytes_per_node <= played.peak_host_bytes_per_node
        if not alpha:
            assert bound.step_s > ahead * played.step_s


@pytest.mark.parametrize(
    ("pp_layers", "schedule", "chunks"),
    [((), "1f1b", 1), ((1, 9, 4), "1f1b", 1), ((8, 5, 1), "zero-bubble", 1), ((1, 4, 2, 3, 1, 3), "interleaved", 2)],
)
def test_unequal_stages_are_not_below_their_lower_bound(pp_layers: tuple[int, ...], schedule: str, chunks: int) -> None:
    cluster, hardware = with_memory(*load_cluster("a800-1x8"), device_bytes=ROOM, host_bytes=ROOM)
    cluster = msgspec.structs.replace(cluster, devices_per_node=6)
    bounds = LowerBounds(hardware, cluster)
    layout = Layout(
        tp=2, sequence_parallel=True, pp=3, pp_layers=pp_layers, schedule=schedule, virtual_stages=chunks, zero=0
    )
    base = Decisions(model=shallow(14), layout=layout, seq_tokens=1 << 14, global_batch=6, loss_chunk_tokens=4096)
    for recompute, alpha in (("none", 0.0), ("full", 0.0), ("tokenwise", 0.5), ("none", 1.0)):
        decisions = with_alpha(base, recompute, alpha)
        bound, played = bounds.of(decisions), simulate(decisions, hardware, cluster).prediction
        assert bound.step_s <= played.step_s
        assert bound.device_bytes <= played.peak_device_bytes
        assert bounds.rough(decisions, keep=None).device_bytes <= played.peak_device_bytes
        assert bound.host_bytes_per_node <= played.peak_host_bytes_per_node


UNLIKE = [
    Layout(tp=2, sequence_parallel=True, cp=3, zero=1),
    Layout(tp=2, pp=3),
    Layout(pp=3, schedule="interleaved", virtual_stages=2, tp=2, sequence_parallel=True),
    Layout(tp=2, pp=3, pp_layers=(1, 9, 4), schedule="zero-bubble"),
]


@pytest.mark.parametrize(
    ("layout", "layers"), covering(UNLIKE, ["every-2", "first-3", "groups-2", "groups-3"]), ids=label
)
def test_layers_that_differ_are_not_below_their_lower_bound(layout: Layout, layers: str) -> None:
    cluster, hardware = with_memory(*load_cluster("a800-1x8"), device_bytes=ROOM, host_bytes=ROOM)
    cluster = msgspec.structs.replace(cluster, devices_per_node=6)
    base = Decisions(model=shallow(14), layout=layout, seq_tokens=3 << 13, global_batch=6, loss_chunk_tokens=4096)
    for policy in ("planned", "eager"):
        decisions = msgspec.structs.replace(
            base, recompute="full", recompute_layers=layers, memory_policy=policy, loss="blocks"
        )
        bounds = LowerBounds(hardware, cluster)
        played = simulate(decisions, hardware, cluster).prediction
        keep = msgspec.structs.replace(decisions, recompute="none", recompute_layers="all")
        for bound in (bounds.of(decisions), bounds.rough(decisions, keep=keep)):
            assert bound.step_s <= played.step_s
            assert bound.device_bytes <= played.peak_device_bytes
            assert bound.host_bytes_per_node <= played.peak_host_bytes_per_node
        assert not bounds.reach(decisions, played.step_s * 1.0001)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(ulysses=16, zero=1),
        Layout(ulysses=3, uneven_heads=True, dp=2, zero=1),
        Layout(tp=16, sequence_parallel=True),
        Layout(tp=2, sequence_parallel=True, ulysses=8, zero=3),
    ],
    ids=layout_label,
)
def test_copies_and_uneven_heads_are_not_below_their_lower_bound(layout: Layout) -> None:
    cluster, hardware = with_memory(*load_cluster("h100-2x8"), device_bytes=ROOM, host_bytes=ROOM)
    bounds = LowerBounds(hardware, cluster)
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=9)
    base = Decisions(model=model, layout=layout, seq_tokens=3 << 15, global_batch=2 * layout.dp, loss_chunk_tokens=4096)
    for recompute, alpha in (("none", 0.0), ("full", 0.0), ("tokenwise", 0.5)):
        decisions = with_alpha(base, recompute, alpha)
        bound, played = bounds.of(decisions), simulate(decisions, hardware, cluster).prediction
        assert played.step_s is not None
        assert 0.85 * played.step_s < bound.step_s <= played.step_s
        assert bound.device_bytes <= played.peak_device_bytes
        assert bound.host_bytes_per_node <= played.peak_host_bytes_per_node


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize(("recompute", "alpha"), [("none", 0.0), ("none", 1.0), ("full", 0.0), ("tokenwise", 0.5)])
@pytest.mark.parametrize(
    ("layout", "window"),
    [
        (Layout(tp=2, sequence_parallel=True, pp=2, subsequences=4), 0),
        (Layout(tp=2, sequence_parallel=True, pp=2, subsequences=4), 6000),
        (Layout(cp=2, pp=2, subsequences=4), 0),
        (Layout(cp=2, pp=2, subsequences=4), 256),
        (Layout(cp=4, cp_exchange="all_gather", subsequences=4), 0),
    ],
    ids=["tp", "tp-window", "ring", "ring-window", "all-gather"],
)
def test_subsequences_of_several_sequences_are_not_below_their_lower_bound(
    layout: Layout, window: int, sequences: int, recompute: Recompute, alpha: float
) -> None:
    cluster, hardware = with_memory(*load_cluster("a800-1x8"), device_bytes=ROOM, host_bytes=ROOM)
    base = Decisions(
        model=msgspec.structs.replace(shallow(8), window=window), layout=layout, seq_tokens=1 << 14,
        micro_batch=sequences, global_batch=4, loss_chunk_tokens=4096,
    )  # fmt: skip
    decisions = with_alpha(base, recompute, alpha)
    bound, played = LowerBounds(hardware, cluster).of(decisions), simulate(decisions, hardware, cluster).prediction
    assert bound.step_s <= played.step_s
    assert bound.device_bytes <= played.peak_device_bytes


@pytest.mark.parametrize("window", [0, 1, 2])
def test_offloaded_subsequences_are_not_below_their_lower_bound(window: int) -> None:
    cluster, hardware = with_memory(*load_cluster("a800-1x8"), device_bytes=ROOM, host_bytes=ROOM)
    base = Decisions(
        model=shallow(8), layout=Layout(pp=2, schedule="gpipe", subsequences=2), seq_tokens=1 << 14, global_batch=8,
        loss_chunk_tokens=0, offload_window=window,
    )  # fmt: skip
    decisions = with_alpha(base, "none", 1.0)
    bound, played = LowerBounds(hardware, cluster).of(decisions), simulate(decisions, hardware, cluster).prediction
    assert bound.step_s <= played.step_s
    assert bound.device_bytes <= played.peak_device_bytes


@pytest.mark.parametrize(
    ("schedule", "policy"),
    covering(["1f1b", "zero-bubble", "gpipe"], [("none", 1.0), ("none", 0.5), ("tokenwise", 0.5), ("full", 1.0)]),
)
def test_memory_of_offload_windows_is_bound_without_a_lowering(schedule: Schedule, policy: tuple[str, float]) -> None:
    """With one micro-batch, the host holds what the bound says, even where stages of unequal length share a node."""
    cluster, hardware = with_memory(*load_cluster("a800-1x8"), device_bytes=ROOM, host_bytes=ROOM)
    bounds = LowerBounds(hardware, cluster)
    for layers, pp, window, batch, host_allocator in (
        (4, 1, 1, 1, "exact"), (4, 2, 1, 3, "exact"), (6, 4, 2, 1, "power_of_two"), (6, 4, 1, 1, "exact"),
    ):  # fmt: skip
        layout = Layout(tp=2, sequence_parallel=True, pp=pp, schedule=schedule, subsequences=5)
        base = Decisions(
            model=shallow(layers), layout=layout, seq_tokens=1 << 14, global_batch=batch, loss_chunk_tokens=1024,
            offload_window=window, host_allocator=host_allocator,
        )  # fmt: skip
        decisions = with_alpha(base, *policy)
        bound, played = bounds.memory(decisions), simulate(decisions, hardware, cluster).prediction
        assert bound.device_bytes <= played.peak_device_bytes
        assert bound.host_bytes_per_node <= played.peak_host_bytes_per_node
        if batch == 1:
            assert bound.host_bytes_per_node == played.peak_host_bytes_per_node
            assert bound.device_bytes > bounds.memory(decisions, any_alpha=True).device_bytes  # states alone


def test_a_range_of_alphas_lies_above_its_lower_bound() -> None:
    cluster, hardware = with_memory(*load_cluster("a800-1x8"), device_bytes=ROOM, host_bytes=ROOM)
    bounds = LowerBounds(hardware, cluster)
    base = Decisions(
        model=shallow(8), layout=Layout(tp=4, sequence_parallel=True, cp=2, zero=1), seq_tokens=1 << 16,
        recompute="tokenwise", loss_chunk_tokens=4096,
    )  # fmt: skip
    for low, high in ((0.0, 1.0), (0.25, 0.5)):
        bound = bounds.between(with_alpha(base, "tokenwise", low), with_alpha(base, "tokenwise", high))
        for alpha in (low, (low + high) / 2, high):
            played = simulate(with_alpha(base, "tokenwise", alpha), hardware, cluster).prediction
            assert bound.step_s <= played.step_s
            assert bound.device_bytes <= played.peak_device_bytes
            assert bound.host_bytes_per_node <= played.peak_host_bytes_per_node


@pytest.mark.parametrize("free_bytes", [0, -1])
def test_no_time_is_bound_where_no_plan_fits(free_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, hardware = with_memory(*load_cluster("a800-1x8"), device_bytes=ROOM, host_bytes=ROOM)
    base = Decisions(model=shallow(8), layout=LAYOUTS[0], seq_tokens=1 << 16, recompute="tokenwise")
    low, high = (with_alpha(base, "tokenwise", alpha) for alpha in (0.25, 0.75))
    bounds = LowerBounds(hardware, cluster)
    wanted = bounds.between(low, high)
    bounds.device_room_bytes = wanted.device_bytes + wanted.beside_bytes + free_bytes
    if free_bytes < 0:
        wanted = msgspec.structs.replace(wanted, step_s=0.0)
        monkeypatch.delattr(LowerBounds, "step_s_between")
    assert bounds.where_it_fits(low, high) == wanted
    assert bounds.shortfall_bytes(wanted) == -free_bytes


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama3-8b", Layout(ulysses=4, dp=2, zero=3)),
        pytest.param("llama3-8b", Layout(cp=8, zero=1), marks=pytest.mark.slow),
        pytest.param("llama3-8b", Layout(metp=8), marks=pytest.mark.slow),
        ("qwen3-30b-a3b", Layout(cp=8, ep=4)),
        pytest.param("qwen3-30b-a3b", Layout(ulysses=4, dp=2, zero=3, ep=8), marks=pytest.mark.slow),
        pytest.param("gpt-7b", Layout(tp=2, sequence_parallel=True, ulysses=4), marks=pytest.mark.slow),
    ],
    ids=label,
)
def test_copies_that_compute_waits_for_and_that_slow_it_are_in_the_bound(name: str, layout: Layout) -> None:
    """Waits and slower kernels lengthen a step here. The bound has four fifths of that."""
    cluster, hardware = with_memory(*load_cluster("h100-1x8"), device_bytes=ROOM, host_bytes=ROOM)
    bounds, lost_s, found_s = LowerBounds(hardware, cluster), 0.0, 0.0
    model = msgspec.structs.replace(load_model(name), layers=12)
    base = Decisions(model=model, layout=layout, seq_tokens=1 << 15, global_batch=2 * layout.dp, loss_chunk_tokens=4096)
    for alpha in (0.0, 0.5, 1.0):
        decisions = with_alpha(base, "none", alpha)
        bound_s, played_s = bounds.of(decisions).step_s, simulate(decisions, hardware, cluster).prediction.step_s
        assert played_s is not None
        assert bound_s <= played_s
        if not alpha:
            bound_of_kept_s, kept_s = bound_s, played_s
        lost_s, found_s = lost_s + played_s - kept_s, found_s + bound_s - bound_of_kept_s
    assert lost_s > 0
    assert found_s > 0.8 * lost_s


def test_a_partial_swap_is_bound_by_the_fewest_rows_that_may_fit() -> None:
    cluster, hardware = load_cluster("h100-1x8")
    pins = Pins(ulysses=4, dp=2, tp=1, cp=1, pp=1, zero=3, ep=8)
    question = Question(
        load_model("qwen3-30b-a3b"), cluster, hardware, 1 << 15, system="any", global_batch=8, pins=pins
    )
    bounds = CandidateBounds(question, front=False)
    (one,) = (c for c in candidates(question)[0] if c.policy == PARTIAL_SWAP and c.base.layout.subsequences == 1)
    few = bounds.tightened(Bounded(one, bounds.of_plans.memory(one.base, any_alpha=True), 0, "layers"), inf)
    assert few.next_bound == "fitting"
    tighter = bounds.tightened(few, inf)
    best = best_partial_swap(one.base, lambda plan: simulate(plan, hardware, cluster).prediction)
    assert best is not None
    assert few.bound is not None
    assert tighter.bound is not None
    assert 0.95 * best.prediction.step_s < few.bound.step_s <= tighter.bound.step_s <= best.prediction.step_s


def test_attention_that_only_chunks_can_play_has_bounds() -> None:
    """As a whole, it has more elements than FlashAttention 2 counts with 32 bits."""
    cluster, hardware = with_memory(*load_cluster("a800-2x8"), device_bytes=ROOM, host_bytes=ROOM)
    bounds = LowerBounds(hardware, cluster)
    layout = Layout(ulysses=2, pp=4, dp=2, zero=1)
    base = Decisions(model=shallow(8), layout=layout, seq_tokens=1 << 20, global_batch=2, loss_chunk_tokens=4096)
    decisions = msgspec.structs.replace(with_alpha(base, "full", 1.0), attention_chunk_tokens=1 << 16)
    played = simulate(decisions, hardware, cluster).prediction
    assert 0.7 * played.step_s < bounds.of(decisions).step_s <= played.step_s


def costs(found: SearchResult) -> list[tuple[float, int, int]]:
    return sorted(e.costs for e in found.front)


ROOMS = [(80, 2000), (32, 2000), (32, 24), (18, 1), (10, 2000)]
"""GiB of a device, and of a host."""


@pytest.mark.parametrize(
    ("system", "room"),
    [
        *covering(["any", "megatron-lm", "metp"], ROOMS),
        *(pytest.param("every-layout", room, marks=pytest.mark.slow) for room in ROOMS),
    ],
)
def test_pruning_changes_neither_the_best_nor_their_order(system: str, room: tuple[int, int]) -> None:
    device_gib, host_gib = room
    asked = ask(2, device_gib=device_gib, host_gib=host_gib, system=system)
    space = len(candidates(asked)[0])
    everything = search(asked, prune=False)
    nearer = sum(e.policy in last_resorts(asked) for e in everything.ranked)  # they are no candidates
    assert everything.evaluated + everything.pruned == space + nearer
    for keep in (3, 1):
        found = search(asked, keep=keep)
        assert found.evaluated + found.pruned == everything.evaluated + everything.pruned
        assert [e.rank_key for e in found.ranked[:keep]] == [e.rank_key for e in everything.ranked[:keep]]
    if space > 3 * 3:  # with few candidates, there may be none to prune
        assert found.pruned > everything.pruned


@pytest.mark.parametrize(
    ("system", "room"),
    [
        *covering(["memo", "metp"], [(60, 24), (80, 2000)]),
        *(pytest.param(s, room, marks=pytest.mark.slow) for s in ("any", "every-layout") for room in ROOMS[:1]),
        *(pytest.param(s, (60, 24), marks=pytest.mark.slow) for s in ("any", "every-layout")),
    ],
)
def test_the_front_is_that_of_brute_force(system: str, room: tuple[int, int]) -> None:
    device_gib, host_gib = room
    asked = ask(2, device_gib=device_gib, host_gib=host_gib, system=system)
    brute, found = search(asked, prune=False, front=True), search(asked, front=True)
    assert costs(found) == costs(brute)
    space = found.evaluated + found.pruned
    assert space == brute.evaluated + brute.pruned > len(candidates(asked)[0])
    for one, other in itertools.permutations(found.front, 2):
        assert any(a < b for a, b in zip(one.costs, other.costs, strict=True))
    best = found.best
    assert best is not None
    assert best.prediction.step_s == min(e.prediction.step_s for e in brute.ranked if e.prediction.step_s)


@pytest.mark.parametrize(("space", "device_gib", "host_gib"), [("device", 22, 2000), ("host", 34, 24)])
def test_a_search_with_more_memory_goes_on_from_one_with_less(space: str, device_gib: int, host_gib: int) -> None:
    less = ask(2, device_gib=device_gib, host_gib=host_gib, system="any")
    more = ask(
        2, device_gib=device_gib + 2 * (space == "device"), host_gib=host_gib + 9 * (space == "host"), system="any"
    )
    found, alone = best_with_more_memory(more, search(less)), search(more).best
    assert found is not None
    assert alone is not None
    assert found.costs == alone.costs
    assert found.costs[0] < search(less).best.costs[0]


@pytest.mark.parametrize("device_gib", [80, 26])
def test_a_space_with_pipelines_is_pruned_exactly(monkeypatch: pytest.MonkeyPatch, device_gib: int) -> None:
    policies = (KEEP, TOKENWISE, FULL_RECOMPUTE)
    staged = replace(SYSTEMS["any"], degrees=("tp", "cp", "dp", "pp"), policies=policies)
    monkeypatch.setitem(SYSTEMS, "any", staged)
    asked = replace(ask(2, device_gib=device_gib, host_gib=2000, seq_tokens=1 << 15, system="any"), global_batch=4)
    assert {c.base.layout.pp for c in candidates(asked)[0]} == {1, 2}
    everything, found = search(asked, prune=False), search(asked, keep=2)
    assert found.evaluated + found.pruned == everything.evaluated + everything.pruned
    assert [e.rank_key for e in found.ranked[:2]] == [e.rank_key for e in everything.ranked[:2]]
    assert found.pruned > everything.pruned


def test_equal_plans_have_one_order() -> None:
    asked = replace(ask(2, device_gib=80, host_gib=2000), pins=Pins(tp=2))
    orders = [[e.decisions for e in search(asked, keep=5).ranked[:5]] for _ in range(2)]
    assert orders[0] == orders[1]
