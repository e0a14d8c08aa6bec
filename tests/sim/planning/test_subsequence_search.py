"""The search over numbers of subsequences and their offload: bounds hold, the best is found, systems have rules."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout, Prediction
from memo_sim.engine.simulate import simulate
from memo_sim.planning.aims import Aims
from memo_sim.planning.alpha_search import Grid
from memo_sim.planning.bandwidth import offload_bandwidth
from memo_sim.planning.evaluation import Evaluation
from memo_sim.planning.layouts import put_off
from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.offload_windows import with_best_window
from memo_sim.planning.outcome import Evaluated
from memo_sim.planning.pipeline_lower_bound import is_known, kept, least_step_s
from memo_sim.planning.plays import Plays
from memo_sim.planning.presets import FULL_SWAP, SYSTEMS
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.rivals import Rivals
from memo_sim.planning.rowwise_kernels import RowwiseChoice
from memo_sim.planning.search import search
from memo_sim.planning.space import candidates, layouts, with_alpha
from memo_sim.planning.sppo import solve
from memo_sim.planning.subsequences import PartPrices, counts, offloaded_bytes, swap_each
from memo_sim.program.layout.partition import partition, swapped_parts

K = 1024
GIB = 2**30
POLICIES = [("none", 0.0), ("none", 0.5), ("tokenwise", 0.5), ("full", 1.0)]


def shallow(layers: int) -> Model:
    return msgspec.structs.replace(load_model("gpt-7b"), layers=layers)


def asked(
    system: str = "sppo", *, layers: int = 4, seq_tokens: int = 32 * K, device_gib: int = 80, **pins: object
) -> Question:
    cluster, hardware = with_memory(*load_cluster("a100-2x2-hdr4"), device_bytes=device_gib * GIB, host_bytes=None)
    return Question(shallow(layers), cluster, hardware, seq_tokens, system=system, pins=Pins(**pins))  # type: ignore[arg-type]


TP = {"tp": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("schedule", "sequences", "pp", "degrees"),
    [
        *[("1f1b", 1, 1, TP), ("1f1b", 3, 4, TP), ("gpipe", 2, 2, TP), ("zero-bubble", 3, 4, TP)],
        *[("1f1b", 1, 2, {"ulysses": 2}), ("1f1b", 1, 2, {"cp": 4}), ("gpipe", 2, 2, TP | {"cp": 2})],
        ("1f1b", 1, 2, {"cp": 4, "cp_exchange": "all_gather"}),
        *[("1f1b", 4, 2, {"dp": 4, "zero": 3}), ("gpipe", 2, 4, {"dp": 2, "zero": 2})],
    ],
)
def test_no_plan_of_subsequences_is_below_its_lower_bound(
    schedule: str, sequences: int, pp: int, degrees: dict[str, object]
) -> None:
    cluster, hardware = with_memory(*load_cluster("a800-1x8"), device_bytes=2**50, host_bytes=2**50)
    bounds = LowerBounds(hardware, cluster)
    layout = Layout(**degrees, pp=pp, schedule=schedule, subsequences=4)  # type: ignore[arg-type]
    base = Decisions(model=shallow(8), layout=layout, seq_tokens=32 * K, global_batch=sequences, loss_chunk_tokens=4096)
    for recompute, alpha in [*POLICIES, ("selective", 0.0), ("operators", 0.0)]:
        decisions = with_alpha(base, recompute, alpha)
        bound, played = bounds.of(decisions), simulate(decisions, hardware, cluster).prediction
        assert played.step_s is not None
        assert 0.4 * played.step_s < bound.step_s <= played.step_s
        rough = bounds.rough(decisions, keep=None)
        assert 0.4 * played.step_s < rough.step_s <= bound.step_s
        assert rough.device_bytes <= bound.device_bytes
        assert 0.45 * played.peak_device_bytes < bound.device_bytes <= played.peak_device_bytes
        assert bound.host_bytes_per_node <= played.peak_host_bytes_per_node


WHOLE_EXPERTS = TP | {"expert_tp": 1}
EXPERTS: dict[str, tuple[str, tuple[int, ...], dict[str, object], dict[str, object]]] = {
    "all experts on a rank": ("qwen3-30b-a3b", (0, 0, 0, 0), TP | {"pp": 2}, {}),
    "ep": ("qwen3-30b-a3b", (0, 0, 0, 0), WHOLE_EXPERTS | {"pp": 2, "dp": 2, "ep": 4, "zero": 1}, {}),
    "ep, exchanges beside compute": (
        "qwen3-30b-a3b",
        (0, 0, 0, 0),
        TP | {"pp": 2, "dp": 2, "ep": 2},
        {"expert_capacity": 2.0, "expert_overlap": True},
    ),
    "ep of a ring, uneven load": ("qwen3-30b-a3b", (0, 0), {"cp": 2, "dp": 2, "ep": 4}, {"expert_load": "zipf-1"}),
    "a stage without experts": ("deepseek-v3", (0, 0, 3, 3), WHOLE_EXPERTS | {"tp": 4, "pp": 2, "ep": 4}, {}),
    "the last stage without experts": (
        "deepseek-v3",
        (3, 3, 0, 0),
        WHOLE_EXPERTS | {"tp": 4, "pp": 2, "ep": 4},
        {"expert_load": "zipf-1"},
    ),
    "windows in every second layer": ("gpt-oss-20b", (0, 1, 0, 1), TP | {"pp": 2, "dp": 2, "ep": 2}, {}),
}
"""By case: a model, which of its layers, degrees, and more decisions."""
QUICK_EXPERTS = {"ep", "a stage without experts"}


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n in QUICK_EXPERTS else pytest.mark.slow) for n in EXPERTS]
)
def test_no_plan_of_subsequences_with_experts_is_below_its_lower_bound(case: str) -> None:
    name, layers, degrees, more = EXPERTS[case]
    cluster, hardware = with_memory(*load_cluster("h100-1x8"), device_bytes=2**50, host_bytes=2**50)
    model = load_model(name)
    cut = {"partition": "length" if len(set(layers)) > 1 else "flops"}
    layout = Layout(**degrees, **cut, subsequences=4)  # type: ignore[arg-type]
    base = Decisions(
        model=model.of_layers([model.layer(n) for n in layers]),
        layout=layout,
        seq_tokens=32 * K,
        global_batch=layout.dp,
        loss_chunk_tokens=4096,
        **more,  # type: ignore[arg-type]
    )
    for recompute, alpha, window in [("none", 0.0, 0), ("none", 1.0, 1), ("tokenwise", 0.5, 0), ("full", 1.0, 0)]:
        decisions = msgspec.structs.replace(with_alpha(base, recompute, alpha), offload_window=window)
        check_bounds(decisions, cluster, hardware)


def check_bounds(decisions: Decisions, cluster: Cluster, hardware: Hardware) -> None:
    """Play a plan, and compare it with every lower bound of it."""
    bounds, played = LowerBounds(hardware, cluster), simulate(decisions, hardware, cluster).prediction
    assert played.step_s is not None
    found, rough, memory = bounds.of(decisions), bounds.rough(decisions, keep=None), bounds.memory(decisions)
    assert 0.5 * played.step_s < rough.step_s <= played.step_s
    assert 0.5 * played.step_s < found.step_s <= played.step_s
    for each in (found, rough, memory):
        assert each.device_bytes <= played.peak_device_bytes
        assert 0.5 * played.peak_host_bytes_per_node <= each.host_bytes_per_node <= played.peak_host_bytes_per_node
    if is_known(decisions):
        assert 0.5 * played.step_s < least_step_s(kept(decisions), hardware, cluster) <= played.step_s


@pytest.mark.parametrize(
    ("windows", "parts"), [((4096,) * 4, 16), ((0, 4096, 0, 4096), 16), ((1024, 1024, 0, 0), 4)], ids=str
)
def test_windows_that_are_longer_than_a_subsequence_are_not_below_their_lower_bound(
    windows: tuple[int, ...], parts: int
) -> None:
    """A subsequence of 2K tokens has no window of 4K inside itself, but beside earlier keys it has."""
    cluster, hardware = with_memory(*load_cluster("a800-1x8"), device_bytes=2**50, host_bytes=2**50)
    one = load_model("llama3-8b").layer(0)
    model = load_model("llama3-8b").of_layers([msgspec.structs.replace(one, window=window) for window in windows])
    layout = Layout(tp=2, sequence_parallel=True, pp=2, subsequences=parts, partition="length")
    base = Decisions(model=model, layout=layout, seq_tokens=32 * K, global_batch=1, loss_chunk_tokens=4096)
    for recompute, alpha in (("none", 0.0), ("full", 1.0)):
        check_bounds(with_alpha(base, recompute, alpha), cluster, hardware)


@pytest.mark.parametrize("change", ["window", "multiplexed", "multiplexed, several sequences", "multiplexed, Ulysses"])
def test_lower_bounds_hold_for_windows_and_multiplexing(change: str) -> None:
    cluster, hardware = with_memory(*load_cluster("a800-1x8"), device_bytes=2**50, host_bytes=2**50)
    bounds = LowerBounds(hardware, cluster)
    layout = Layout(tp=2, sequence_parallel=True, pp=4, subsequences=6, multiplexed="multiplexed" in change)
    base = Decisions(model=shallow(8), layout=layout, seq_tokens=32 * K, loss_chunk_tokens=4096)
    if "Ulysses" in change:
        changed = msgspec.structs.replace(layout, tp=1, sequence_parallel=False, ulysses=2)
        base = msgspec.structs.replace(base, layout=changed, seq_tokens=64 * K)
    if "several" in change:
        base = msgspec.structs.replace(base, micro_batch=2, global_batch=2)
    for alpha in (0.5, 1.0):
        decisions = with_alpha(base, "none", alpha)
        if change == "window":
            decisions = msgspec.structs.replace(decisions, offload_window=1)
        bound, played = bounds.of(decisions), simulate(decisions, hardware, cluster).prediction
        assert played.step_s is not None
        assert 0.4 * played.step_s < bound.step_s <= played.step_s
        assert 0.37 * played.step_s < bounds.rough(decisions, keep=None).step_s <= bound.step_s
        assert 0 < bound.device_bytes <= played.peak_device_bytes
        assert bound.host_bytes_per_node <= played.peak_host_bytes_per_node


def test_sppo_offloads_while_the_next_pass_is_computed() -> None:
    windows = {c.policy.label: c.base.offload_window for c in candidates(asked(tp=2, pp=2, subsequences=4))[0]}
    assert windows == {"sequence-aware offload": 1, "full swap": 1}
    assert {c.base.offload_window for c in candidates(asked("any", tp=2, pp=2, subsequences=4))[0]} == {0}


def test_a_pinned_alpha_keeps_the_systems_recompute_mode() -> None:
    """SPPO keeps what it does not offload; MEMO and the open search recompute it."""
    for system, mode in (("sppo", "none"), ("memo", "tokenwise"), ("any", "tokenwise")):
        degrees = {"tp": 4} if system == "memo" else {"tp": 2, "pp": 2, "subsequences": 4}
        for alpha in (0.0, 0.5):
            found, _ = candidates(asked(system, alpha=alpha, **degrees))
            assert {c.base.recompute for c in found} == {mode}
    rebuilt, _ = candidates(asked(tp=2, pp=2, subsequences=4, alpha=0.5, recompute="tokenwise"))
    assert {c.base.recompute for c in rebuilt} == {"tokenwise"}


def test_a_window_can_be_pinned_and_wants_something_to_swap() -> None:
    cut = {"tp": 2, "pp": 2, "subsequences": 8}
    for system, window in (("sppo", 3), ("sppo", 0), ("any", 2)):
        found, _ = candidates(asked(system, offload_window=window, **cut))  # type: ignore[arg-type]
        assert {c.base.offload_window for c in found} == {window}
        assert any(c.policy.label == "full swap" for c in found)
        assert window == 0 or all(c.base.swapped_tokens or c.base.recompute == "tokenwise" for c in found)
    for pins in ({**cut, "alpha": 0.0, "recompute": "none"}, {"tp": 2, "pp": 2, "alpha": 1.0}):
        with pytest.raises(Infeasible) as error:
            candidates(asked("any", offload_window=2, **pins))  # type: ignore[arg-type]
        assert error.value.where == "decisions.offload_window"


def test_a_pinned_window_keeps_only_plans_that_swap() -> None:
    """Rounded down, nothing is swapped, so no window applies; the plan that rounds up is still found."""
    cluster, hardware = load_cluster("a100-1x8")
    pins = Pins(tp=4, pp=2, subsequences=8, multiplexed=False)
    question = Question(shallow(4), cluster, hardware, 8 * K, system="sppo", pins=pins)
    free, _ = candidates(question)
    pinned, _ = candidates(replace(question, pins=replace(pins, offload_window=1)))
    assert sorted(c.base.swapped_tokens > 0 for c in free if c.policy.hides) == [False, True]
    assert [c.base for c in pinned if c.policy.hides] == [c.base for c in free if c.policy.hides and c.base.alpha]


@pytest.mark.parametrize("alpha", [None, 0.5])
def test_every_plan_found_has_the_pinned_window(alpha: float | None) -> None:
    """This holds for token-wise and partly swapped plans, at any alpha that the search takes."""
    pins = {"tp": 2, "pp": 2, "subsequences": 8, "offload_window": 2, "alpha": alpha}
    found = search(asked("any", device_gib=16, **pins), prune=False)  # type: ignore[arg-type]
    swapped = [e.decisions for e in found.ranked if e.prediction.status == "ok"]
    assert swapped
    assert {d.offload_window for d in swapped} == {2}


def test_searching_the_number_also_tries_windows_and_multiplexing() -> None:
    """The plan that wins when it is pinned also wins in an open search: SP inside a node, with multiplexed stages."""
    windows = {
        (c.policy.label, c.base.offload_window) for c in candidates(asked("any", tp=2, pp=2, subsequences="auto"))[0]
    }
    assert {("full swap", w) for w in (0, 1, 4)} <= windows
    assert {("partial swap", w) for w in (0, 1, 4)} <= windows
    assert {w for label, w in windows if label in ("keep", "token-wise")} == {0}
    inside = replace(asked("any", tp=2, pp=4, subsequences="auto"), cluster=load_cluster("a100-1x8")[0])
    assert {(n.subsequences, n.multiplexed) for n in layouts(inside)} >= {(4, False), (4, True)}
    for others in ("terapipe", "megatron-lm"):
        asked_for = asked(others, tp=2, pp=4, subsequences="auto")
        assert not any(n.multiplexed for n in layouts(replace(asked_for, cluster=inside.cluster)))


def test_the_solvers_own_number_is_searched() -> None:
    question = asked(tp=2, seq_tokens=160 * K)
    choice = solve(question, sps=[2])[0]
    assert choice.subsequences not in counts(160 * K, 1)
    tried = {layout.subsequences for layout in layouts(question) if layout.pp == choice.pp}
    assert tried == {*counts(160 * K, 1), choice.subsequences}
    # No other system has that solver; a pinned number is used as it is.
    for other in (replace(question, system="seq1f1b"), asked(tp=2, pp=2, subsequences=5)):
        assert choice.subsequences not in {layout.subsequences for layout in layouts(other)}


def test_a_full_swap_that_hides_is_not_played_twice() -> None:
    asked_for = {"tp": 2, "pp": 2, "subsequences": 4}
    (only,), _ = candidates(asked(seq_tokens=512 * K, **asked_for))  # type: ignore[arg-type]
    assert only.policy.hides
    assert only.base.alpha == 1
    short = candidates(asked(seq_tokens=8 * K, tp=2, pp=2, subsequences=8))[0]
    alphas = [c.base.alpha for c in short if c.policy.hides]
    assert len(alphas) == 2
    assert alphas[0] < alphas[1] < 1
    assert [c.base.offload_window for c in short if not c.policy.hides] == [1, 4]


@pytest.mark.parametrize(
    ("pins", "where", "wanted"),
    [
        ({"tp": 2, "pp": 2, "subsequences": 1000}, "layout.subsequences", "at most 128"),
        (
            {"tp": 2, "pp": 2, "subsequences": 1, "multiplexed": True},
            "layout.subsequences",
            "as many as stages, or more",
        ),
        ({"cp": 2, "pp": 2, "subsequences": 4, "multiplexed": True}, "layout.multiplexed", "false"),
    ],
)
def test_a_single_reason_is_reported_in_full(pins: dict[str, object], where: str, wanted: str) -> None:
    with pytest.raises(Infeasible) as error:
        candidates(asked("any", **pins))  # type: ignore[arg-type]
    assert error.value.where == where
    assert str(error.value.wanted) == wanted


def test_a_system_has_its_own_numbers_and_others_one_unless_asked() -> None:
    def numbers(question: Question) -> set[int]:
        return {layout.subsequences for layout in layouts(question)}

    assert numbers(asked(seq_tokens=128 * K)) == {8, 16, 32, 64} == set(counts(128 * K, 1))
    assert numbers(asked(subsequences=12)) == {12}
    assert numbers(asked("any")) == {1}
    assert numbers(asked("any", subsequences="auto", seq_tokens=128 * K)) == {1, 8, 16, 32, 64}
    others = [name for name in SYSTEMS if name not in ("sppo", "terapipe", "seq1f1b")]
    assert all(numbers(asked(name)) == {1} for name in others)


def test_sppo_keeps_tensor_parallelism_inside_a_node() -> None:
    found = {(layout.tp, layout.pp) for layout in layouts(asked()) if layout.dp == 1}
    assert found == {(1, 4), (2, 2)}
    assert (4, 1) in {(layout.tp, layout.pp) for layout in layouts(asked(tp=4))}


def test_hidden_tokens_are_offloaded_and_alpha_grows_as_subsequences_shrink() -> None:
    question = asked(tp=2, pp=2, subsequences=8, seq_tokens=128 * K)
    aware = next(c for c in candidates(question)[0] if c.policy.label == "sequence-aware offload")
    parts, swapped = partition(aware.base), swapped_parts(aware.base)
    assert len(set(swapped)) > 1 or max(swapped) < min(parts)
    alphas = [some / part for some, part in zip(swapped, parts, strict=True)]
    assert all(before <= after for before, after in pairwise(alphas))
    assert aware.policy.alpha == aware.base.alpha == sum(swapped) / sum(parts)
    # As many tokens as can be offloaded during one subsequence at the node's rate; one row block more would not hide.
    forward_s = [part.forward_s for part in PartPrices(question.hardware, question.cluster).parts(aware.base)]
    token_bytes = offloaded_bytes(aware.base)
    hidden_bytes = sum(forward_s) / 8 * offload_bandwidth(question, aware.base, 10**9)
    assert max(swapped) * token_bytes <= hidden_bytes * 1.01
    assert (max(swapped) + aware.base.swap_granule) * token_bytes > hidden_bytes


def test_alpha_is_searched_by_tokens_that_every_subsequence_swaps() -> None:
    base = Decisions(model=shallow(4), seq_tokens=32 * K, layout=Layout(tp=2, sequence_parallel=True, subsequences=6))
    grid = Grid.of(base)
    assert 1 < grid.steps <= 64
    plans = [grid.at(step) for step in range(grid.steps + 1)]
    assert [grid.step_of(plan) for plan in plans] == list(range(grid.steps + 1))
    assert plans[0].swapped_tokens == 0
    assert plans[-1].swapped_tokens == 32 * K
    assert all(a.swapped_tokens < b.swapped_tokens for a, b in pairwise(plans))


@pytest.mark.parametrize(("system", "device_gib"), [("sppo", 80), ("seq1f1b", 16), ("terapipe", 12)])
def test_pruning_does_not_change_the_best(system: str, device_gib: int) -> None:
    question = asked(system, device_gib=device_gib, tp=2, seq_tokens=16 * K)
    everything, pruned = search(question, prune=False), search(question)
    assert everything.ranked[0].rank_key == pruned.ranked[0].rank_key
    assert pruned.evaluated + pruned.pruned == everything.evaluated + everything.pruned
    assert pruned.evaluated < everything.evaluated


@pytest.mark.parametrize(
    ("name", "layers", "device_gib", "pins"),
    [
        ("qwen3-30b-a3b", (0, 0), 14, {"recompute": "full"}),
        pytest.param("qwen3-30b-a3b", (0, 0), 14, {}, marks=pytest.mark.slow),
        pytest.param("qwen3-30b-a3b", (0, 0), 80, {}, marks=pytest.mark.slow),
        pytest.param("gpt-oss-20b", (0, 1), 40, {}, marks=pytest.mark.slow),
    ],
)
def test_pruning_does_not_change_the_best_with_experts(
    name: str, layers: tuple[int, ...], device_gib: int, pins: dict[str, object]
) -> None:
    """Degrees of ep are open; a full search finds nothing faster."""
    model = load_model(name)
    cluster, hardware = with_memory(*load_cluster("h100-1x8"), device_bytes=device_gib * GIB, host_bytes=None)
    cluster = msgspec.structs.replace(cluster, devices_per_node=4)
    question = Question(
        model.of_layers([model.layer(n) for n in layers]),
        cluster,
        hardware,
        32 * K,
        system="any",
        global_batch=2,
        pins=Pins(pp=2, subsequences=4, tp=1, **pins),  # type: ignore[arg-type]
    )
    pruned, every = search(question), search(question, prune=False)
    assert pruned.best is not None
    assert every.best is not None
    assert pruned.pruned > 0
    assert pruned.best.decisions == every.best.decisions
    assert pruned.best.prediction.step_s == every.best.prediction.step_s


def test_a_bubble_is_worth_subsequences_and_one_stage_is_not() -> None:
    staged = search(asked("any", tp=2, pp=2, subsequences="auto", recompute="none", alpha=0)).best
    assert staged is not None
    assert staged.decisions.layout.subsequences > 1
    alone = search(asked("any", tp=4, pp=1, subsequences="auto", recompute="none", alpha=0)).best
    assert alone is not None
    assert alone.decisions.layout.subsequences == 1


def test_row_wise_kernels_are_chosen_for_subsequences_that_swap_a_part() -> None:
    _, hardware = load_cluster("h100-1x8")
    base = Decisions(model=shallow(2), layout=Layout(ulysses=2, subsequences=4), seq_tokens=16 * K, global_batch=1)
    part = msgspec.structs.replace(with_alpha(base, "tokenwise", 0.5), offload_window=1)
    assert part.subsequence_swapped_tokens
    choose = RowwiseChoice(hardware)
    assert choose.faster(part).kernels.rowwise == choose.faster(base).kernels.rowwise != "torch"


@pytest.mark.parametrize(
    ("parts", "device_gib", "window"), [(8, 26, 3), pytest.param(16, 24, 5, marks=pytest.mark.slow)]
)
def test_the_best_plans_window_is_the_best_of_all(parts: int, device_gib: int, window: int) -> None:
    """Windows 1 and 4 are tried for every plan: here 1 is slower, and one step wider than the best does not fit."""
    question = asked(layers=8, seq_tokens=64 * K, device_gib=device_gib, subsequences=parts, pp=4, tp=1)
    found = search(question).ranked[0]
    assert found.decisions.offload_window == window
    plans = [msgspec.structs.replace(found.decisions, offload_window=each) for each in range(1, parts)]
    predicted = [simulate(each, question.hardware, question.cluster).prediction for each in plans]
    assert found.prediction.step_s == min(each.step_s for each in predicted if each.step_s is not None)
    assert found.prediction.step_s is not None
    assert predicted[0].step_s is not None
    assert predicted[0].step_s > found.prediction.step_s
    assert predicted[window].status == "gpu_oom"


def test_wider_windows_play_no_plan_that_bounds_show_not_to_fit() -> None:
    """In 4 GiB no plan fits; without bounds, the evaluation of a wide window plays those it is compared with."""
    question = asked(tp=2, pp=2, subsequences=8, device_gib=4)
    wide = next(c for c in candidates(question)[0] if c.narrow is not None)
    hiding = next(c for c in candidates(question)[0] if c.policy.hides and c.base.layout == wide.base.layout)
    compared = [swap_each(wide.base, 0), wide.narrow, hiding.base]
    bounds = LowerBounds(question.hardware, question.cluster)
    for prune in (True, False):
        plays = Plays(question)
        rivals = Rivals(kept=compared[0], hiding=hiding.base)
        assert wide.narrow is not None
        assert not Evaluation(question, bounds, plays, Aims(prune=prune)).wider_gains_nothing(wide.narrow, rivals)
        assert list(plays.known) == ([] if prune else compared)
    assert {each.status for each in plays.known.values()} == {"gpu_oom"}


@pytest.mark.parametrize(
    ("most", "window", "asked_for"), [(11, 8, [2, 4, 8, 11]), (6, 6, [2, 4, 8, 6, 7]), (1, 1, [2])]
)
def test_a_window_is_widened_until_nothing_is_gained(most: int, window: int, asked_for: list[int]) -> None:
    """``most``: the widest window that fits; from window 8 on no copy is late."""
    played = list[int]()

    def predict(decisions: Decisions) -> Prediction:
        played.append(decisions.offload_window)
        if decisions.offload_window > most:
            return Prediction(status="gpu_oom")
        return Prediction(status="ok", step_s=10.0 - min(8, decisions.offload_window))

    base = Decisions(model=shallow(2), layout=Layout(subsequences=12), seq_tokens=32 * K, swapped_tokens=32 * K)
    start = msgspec.structs.replace(base, offload_window=1)
    found = with_best_window(Evaluated(FULL_SWAP, start, Prediction(status="ok", step_s=9.0)), predict)
    assert found.decisions.offload_window == window
    assert played == asked_for


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"tp": 2, "pp": 2}, {"tp": 1, "pp": 4}])
def test_the_plan_nearest_to_fitting_is_exact_where_both_memories_are_short(degrees: dict[str, int]) -> None:
    """Pruning by what both memories lack leaves the first plan as it is, with one or two stages on a node."""
    few = asked(layers=6, seq_tokens=64 * K, **degrees)
    cluster, hardware = with_memory(few.cluster, few.hardware, device_bytes=6 * GIB, host_bytes=GIB // 8)
    short = replace(few, cluster=cluster, hardware=hardware)
    every, pruned = search(short, prune=False), search(short)
    first = every.ranked[0]
    assert any(e.prediction.status == "gpu_oom" and e.prediction.host_shortfall_bytes for e in every.ranked)
    assert pruned.ranked[0].rank_key == first.rank_key
    assert pruned.evaluated <= every.evaluated
    bounds = LowerBounds(hardware, cluster)
    for one in every.ranked:
        if one.prediction.status == "ok":
            continue
        bound = bounds.memory(one.decisions)
        assert bounds.shortfall_bytes(bound) <= one.prediction.missing_bytes
        last = bounds.of_last_stage(one.decisions)
        held = msgspec.structs.replace(bound, device_bytes=last.buffers, beside_bytes=last.beside) if last else bound
        assert bounds.shortfall_bytes(held) <= one.prediction.missing_bytes


@pytest.mark.parametrize("window", [0, 1])
def test_the_last_stage_shows_what_a_device_lacks(window: int) -> None:
    """The last stage has the head, so its bytes are those of the fullest device, with its communicators."""
    cluster, hardware = with_memory(*load_cluster("a100-2x2-hdr4"), device_bytes=2 * GIB, host_bytes=None)
    layout = Layout(tp=2, sequence_parallel=True, pp=2, subsequences=4)
    plan = Decisions(model=shallow(4), layout=layout, seq_tokens=16 * K, swapped_tokens=16 * K, offload_window=window)
    prediction, bounds = simulate(plan, hardware, cluster).prediction, LowerBounds(hardware, cluster)
    assert prediction.status == "gpu_oom"
    last = bounds.of_last_stage(plan)
    assert last is not None
    lacking_bytes = last.total - bounds.device_room_bytes
    assert bounds.shortfall_bytes(bounds.memory(plan)) < lacking_bytes == prediction.shortfall_bytes


def of_one_stage(device_gib: float, **pins: object) -> Question:
    """Return a question whose four ranks divide tokens alone; Ulysses copies the model's only key/value head."""
    room = {"device_bytes": int(device_gib * GIB), "host_bytes": None}
    cluster, hardware = with_memory(*load_cluster("a100-2x2-hdr4"), **room)
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=2, kv_heads=1, ffn_hidden=1024, vocab=1024)
    fixed = {"tp": 1, "pp": 1, "zero": 1, "dp": 1, "subsequences": 4, "recompute": "full", "alpha": 0.0} | pins
    return Question(model, cluster, hardware, 64 * K, system="every-layout", global_batch=1, pins=Pins(**fixed))  # type: ignore[arg-type]


def test_cp_beside_subsequences_is_put_off_where_ulysses_can_replace_it() -> None:
    def divided(question: Question) -> list[tuple[int, int]]:
        return [(layout.cp, layout.ulysses) for layout in put_off(question, layouts(question))]

    question = of_one_stage(80)
    assert divided(question) == [(2, 2), (4, 1)]
    assert divided(of_one_stage(80, subsequences=1)) == []
    assert divided(of_one_stage(80, cp=2)) == []
    assert divided(of_one_stage(80, ulysses=1)) == []
    few_heads = msgspec.structs.replace(question.model, heads=2)  # Ulysses of four ranks would have half a head each
    assert divided(replace(question, model=few_heads)) == []


def test_cp_that_is_put_off_is_found_where_nothing_else_fits() -> None:
    plentiful = search(of_one_stage(80))
    assert plentiful.best is not None
    assert plentiful.best.decisions.layout.cp == 1
    everything = search(of_one_stage(80), prune=False)
    with_ulysses = [e.decisions for e in everything.ranked if e.decisions.layout.cp == 1]
    assert plentiful.best.decisions == with_ulysses[0]
    short = search(of_one_stage(1), prune=False).ranked  # the nearest to fitting first
    least = {e.decisions.layout.cp: 1 + e.prediction.shortfall_bytes / GIB for e in reversed(short)}
    assert least[4] < least[1]
    scarce = search(of_one_stage((least[4] + least[1]) / 2)).best
    assert scarce is not None
    assert scarce.decisions.layout.cp == 4
