"""Questions that are legal and huge: refused at once, with the place and what helps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from memo_sim.contract import codec
from memo_sim.contract.catalog import load_cluster, load_hardware, load_model
from memo_sim.contract.errors import BadInput, Infeasible, UsageError
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.units import MOST_DEVICES, MOST_LAYERS
from memo_sim.engine.simulate import simulate
from memo_sim.planning import bounded_candidates, few_layers
from memo_sim.planning import search as searching
from memo_sim.planning.layouts import _degrees, layouts
from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.presets import KEEP
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.rowwise_kernels import RowwiseChoice
from memo_sim.planning.search import SearchResult, best_with_more_memory, search
from memo_sim.planning.space import with_alpha
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.shape import MOST_RING, shape_of
from tests.refusals import refused


@pytest.mark.parametrize(
    ("model", "memory_gib"), [("llama-tiny", 2.0), pytest.param("qwen3-moe-tiny", 80.0, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_layouts_that_are_opened_one_by_one_give_the_same_plans(
    model: str, memory_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipelines, expert parallelism and several micro-batches are among them."""
    cluster, hardware = load_cluster("h100-1x4")
    memory = msgspec.structs.replace(hardware.device_memory_bytes, value=memory_gib * 2**30)
    hardware = msgspec.structs.replace(hardware, device_memory_bytes=memory)
    pins = Pins(cp=1, ulysses=1)
    question = Question(load_model(model), cluster, hardware, 4096, system="every-layout", global_batch=4, pins=pins)
    at_once = search(question, keep=3)
    monkeypatch.setattr(searching, "MOST_LAYOUTS_AT_ONCE", 0)
    one_by_one = search(question, keep=3)
    assert [e.rank_key for e in one_by_one.ranked[:3]] == [e.rank_key for e in at_once.ranked[:3]]
    assert one_by_one.evaluated <= at_once.evaluated + at_once.pruned <= one_by_one.evaluated + one_by_one.pruned


def test_layouts_that_are_all_slower_than_a_known_plan_stay_unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, hardware = load_cluster("h100-1x4")
    question = Question(load_model("llama-tiny"), cluster, hardware, 4096, system="any")
    found = search(question).best
    assert found is not None
    known = replace(found, prediction=msgspec.structs.replace(found.prediction, step_s=1e-12))
    monkeypatch.setattr(searching, "MOST_LAYOUTS_AT_ONCE", 0)
    assert best_with_more_memory(question, SearchResult([known], 1, 0, [])) == known


def test_long_rings_are_pruned_by_their_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans are those of a search that prices all kernels of each layout; it lowers more of them."""
    cluster, hardware = load_cluster("h100-2x8")
    pins = Pins(tp=1, ulysses=1, pp=1, zero=1, recompute="none", alpha=0.0)
    question = Question(load_model("llama-tiny"), cluster, hardware, 4096, "every-layout", global_batch=16, pins=pins)
    monkeypatch.setattr(searching, "MOST_LAYOUTS_AT_ONCE", 0)
    priced: list[Layout] = []
    of_layout = LowerBounds.beside_s

    def counted(self: LowerBounds, keep: Decisions, *policies: object, **options: bool) -> float:
        priced.append(keep.layout)
        return of_layout(self, keep, *policies, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(LowerBounds, "beside_s", counted)
    by_steps, few = search(question), {layout.cp for layout in priced}
    priced.clear()
    monkeypatch.setattr(bounded_candidates, "steps_repeat", lambda _: False)
    by_kernels, more = search(question), {layout.cp for layout in priced}
    assert few < more
    assert by_steps.ranked[0].rank_key == by_kernels.ranked[0].rank_key
    assert by_steps.evaluated + by_steps.pruned == by_kernels.evaluated + by_kernels.pruned


def test_layouts_that_gather_are_pruned_by_what_they_share_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans are those of a search that lowers what ZeRO 3 gathers for each layout, which lowers more passes."""
    cluster, hardware = load_cluster("a800-2x8")
    pins = Pins(pp=1, cp=1, zero=3, recompute="none", alpha=0.0)
    question = Question(load_model("llama-7b"), cluster, hardware, 4096, "every-layout", global_batch=16, pins=pins)
    monkeypatch.setattr(searching, "MOST_LAYOUTS_AT_ONCE", 0)
    lowered: list[Layout] = []
    lower_passes = few_layers.lower_passes

    def counted(decisions: Decisions) -> Program:
        lowered.append(decisions.layout)
        return lower_passes(decisions)

    monkeypatch.setattr(few_layers, "lower_passes", counted)
    shared, few = search(question), sum(layout.zero == 3 for layout in lowered)
    lowered.clear()
    monkeypatch.setattr(bounded_candidates, "MOST_ZERO", 4)
    apart, more = search(question), sum(layout.zero == 3 for layout in lowered)
    assert 0 < few < more
    assert shared.ranked[0].rank_key == apart.ranked[0].rank_key
    assert shared.evaluated + shared.pruned == apart.evaluated + apart.pruned


@pytest.mark.parametrize("more", [{}, {"tp": 2, "sequence_parallel": True}, {"ulysses": 2}, {"pp": 3}], ids=str)
@pytest.mark.parametrize("cp", [8, 16])
def test_steps_of_long_rings_take_no_longer_than_all_kernels(cp: int, more: dict[str, int]) -> None:
    layout = Layout(cp=cp, **more)  # type: ignore[arg-type]
    cluster, hardware = with_memory(*load_cluster("h100-8x8"), device_bytes=2**50, host_bytes=2**50)
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=7)
    keep = Decisions(model=model, layout=layout, seq_tokens=32_768, global_batch=6)
    bounds = LowerBounds(hardware, cluster)
    steps, chunked = bounds.of_steps(keep, [KEEP]), bounds.of_steps(keep, [KEEP, replace(KEEP, attention_chunks=True)])
    assert 0 < chunked.step_s < steps.step_s < bounds.beside_s(keep, [KEEP])
    assert chunked.device_bytes == steps.device_bytes == bounds.of_layout(keep, [KEEP]).device_bytes
    if cp == 8:
        assert steps.step_s < (simulate(keep, hardware, cluster).prediction.step_s or 0.0)


PIPELINES = {
    "fullest stage": ({"pp": 4}, "none", 0.0),
    "interleaved": ({"pp": 2, "schedule": "interleaved", "virtual_stages": 2}, "none", 1.0),
    "zero-bubble": ({"pp": 4, "schedule": "zero-bubble"}, "tokenwise", 0.5),
    "token-wise": ({"pp": 4}, "tokenwise", 0.5),
    "swapped": ({"pp": 4}, "none", 1.0),
    "gathered": ({"dp": 8, "zero": 3}, "tokenwise", 1.0),
    "reduced": ({"dp": 8, "zero": 1}, "none", 0.0),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_lower_bounds_of_many_micro_batches_hold(name: str) -> None:
    """Ten layers on four stages are three on the fullest; what ZeRO gathers and reduces counts."""
    fields, recompute, alpha = PIPELINES[name]
    cluster, hardware = with_memory(*load_cluster("h100-1x8"), device_bytes=2**50, host_bytes=2**50)
    layout = Layout(**fields)  # type: ignore[arg-type]
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=10)
    base = Decisions(model=model, layout=layout, seq_tokens=8192, global_batch=32)
    bounds, decisions = LowerBounds(hardware, cluster), with_alpha(base, recompute, alpha)
    played = simulate(decisions, hardware, cluster).prediction
    assert played.step_s is not None
    of_all_alphas = bounds.between(with_alpha(base, recompute, 0.0), with_alpha(base, recompute, 1.0))
    own, of_layout = bounds.of(decisions), bounds.of_layout(base, [KEEP])
    for bound in (own, of_all_alphas, of_layout):
        assert bound.step_s <= played.step_s
        assert bound.device_bytes <= played.peak_device_bytes
    if recompute == "none" and not alpha:
        assert own.step_s > 0.9 * played.step_s


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "interleaved"])
@pytest.mark.parametrize("recompute", ["none", "tokenwise", "full"])
def test_rowwise_kernels_of_pipelines_are_those_of_all_stages(schedule: str, recompute: str) -> None:
    _, hardware = load_cluster("a800-1x8")
    layout = Layout(pp=2, schedule=schedule, virtual_stages=2 if schedule == "interleaved" else 1)  # type: ignore[arg-type]
    model = msgspec.structs.replace(load_model("llama-tiny"), layers=8)
    base = Decisions(model=model, layout=layout, seq_tokens=4096, global_batch=2, recompute=recompute)  # type: ignore[arg-type]
    choice = RowwiseChoice(hardware)
    assert choice.faster(base).kernels.rowwise == choice.fastest(base)


def test_expert_parallelism_is_searched_without_being_asked_for() -> None:
    cluster, hardware = load_cluster("h100-1x4")
    question = Question(load_model("qwen3-moe-tiny"), cluster, hardware, 4096, system="any", global_batch=4)
    assert {layout.ep for layout in layouts(question)} > {1}


@pytest.mark.parametrize("devices", [1, 2, 12, 36, 97, 360, 65536])
def test_degrees_are_the_divisors(devices: int) -> None:
    assert _degrees(None, devices, searched=True) == [d for d in range(1, devices + 1) if devices % d == 0]


def test_clusters_larger_than_any_are_refused(tmp_path: Path) -> None:
    with refused(UsageError, got="a800-999999x8", wanted=str(MOST_DEVICES)):
        load_cluster("a800-999999x8")
    assert load_cluster("a800-16384x8")[0].devices == MOST_DEVICES
    fields = json.loads(codec.encode(load_cluster("a800-2x8")[0]))
    for name, value, where in (
        ("devices_per_node", 2**20, "$.devices_per_node"),
        ("nodes", 2**20, "$"),
        ("nics_per_node", 2**31, "$.network.nics_per_node"),
        ("leaf_ports", 2**31, "$.network.leaf_ports"),
    ):
        changed = (
            {**fields, name: value} if name in fields else {**fields, "network": {**fields["network"], name: value}}
        )
        (tmp_path / "c.json").write_text(json.dumps(changed))
        with refused(BadInput, where=where):
            load_cluster(str(tmp_path / "c.json"))


def test_a_profile_of_two_billion_devices_is_refused(tmp_path: Path) -> None:
    fields = json.loads(codec.encode(load_hardware("a800-sxm4-80gb")))
    (tmp_path / "h.json").write_text(json.dumps({**fields, "devices": 2**31 - 1}))
    with refused(BadInput, where="$.devices", got=str(2**31 - 1), wanted="1024"):
        load_cluster(str(tmp_path / "h.json"))


def test_ten_thousand_layers_are_refused(tmp_path: Path) -> None:
    fields = json.loads(codec.encode(msgspec.structs.replace(load_model("gpt-7b"), layers=MOST_LAYERS)))
    (tmp_path / "m.json").write_text(json.dumps(fields))
    assert load_model(str(tmp_path / "m.json")).layers == MOST_LAYERS
    (tmp_path / "m.json").write_text(json.dumps({**fields, "layers": 10_000}))
    with refused(BadInput, where="$.layers", got="10000", wanted=str(MOST_LAYERS)):
        load_model(str(tmp_path / "m.json"))


def test_a_ring_of_a_hundred_thousand_ranks_is_refused() -> None:
    layout = Layout(cp=2 * MOST_RING)
    with refused(Infeasible, where="cp", got=str(2 * MOST_RING), wanted=str(MOST_RING), hint="--cp"):
        shape_of(Decisions(model=load_model("gpt-7b"), layout=layout, seq_tokens=2**24))
