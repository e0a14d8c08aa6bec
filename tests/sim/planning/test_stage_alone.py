"""A stage that is played alone is never slower than in its pipeline, and never needs more memory."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.costs.pricing import NodeRates, Pricer
from memo_sim.engine.repetition import period_of
from memo_sim.engine.simulate import simulate
from memo_sim.planning import stage_alone
from memo_sim.planning.alpha_ranges import least_step_s
from memo_sim.planning.alpha_search import Grid
from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.presets import FULL_SWAP, KEEP, PARTIAL_SWAP, SYSTEMS, TOKENWISE
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.search import search
from memo_sim.planning.space import candidates, with_alpha
from memo_sim.planning.stage_alone import StagesAlone
from memo_sim.program.ir.instruction import Lane, Mode
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.lower import lower

ROOM = 2**50


def machine(name: str = "h100-1x8") -> tuple[Cluster, Hardware]:
    return with_memory(*load_cluster(name), device_bytes=ROOM, host_bytes=ROOM)


def pipeline(schedule: str, *, pp: int = 4, chunks: int = 1, layers: int = 10, batch: int = 32, **fields) -> Decisions:
    layout = Layout(pp=pp, schedule=schedule, virtual_stages=chunks, **fields)
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=layers)
    return Decisions(model=model, layout=layout, seq_tokens=8192, global_batch=batch * layout.dp)


PIPELINES = {
    "1f1b": pipeline("1f1b", dp=2, zero=1, layers=6),
    "chunks": pipeline("interleaved", pp=2, chunks=2, layers=14, pp_layers=(5, 3, 2, 4), batch=24),
    "zero-bubble": pipeline("zero-bubble", pp=2, layers=6, tp=2, sequence_parallel=True),
}
POLICIES = [("none", 0.0), ("full", 0.0), ("full", 1.0), ("none", 0.5), ("none", 1.0), ("tokenwise", 0.5)]


def check(decisions: Decisions, cluster: Cluster, hardware: Hardware, least: float) -> None:
    alone, bounds = StagesAlone(hardware, cluster), LowerBounds(hardware, cluster)
    played = simulate(decisions, hardware, cluster, predict=False)
    step_s = played.prediction.step_s
    assert step_s is not None
    found_s = bounds.of_one_stage(decisions, decisions)
    assert least * step_s < found_s <= step_s
    reserve_bytes = sum(int(quantity.value) for quantity in hardware.reserve_bytes.values())
    for stage in range(len(stages_of(decisions))):
        assert 0 < (alone.step_s(decisions, decisions, stage, before_s=0.0, after_s=0.0) or 0.0) <= step_s
        memory, found = played.stages[stage].memory, alone.device_bytes(decisions, stage)
        assert found.buffers <= memory.device.bytes
        assert found.beside <= memory.reserve_bytes - reserve_bytes
        kernels_s = alone.kernels_s(decisions, decisions, stage) or 0.0
        kernels = played.stages[stage].columns.lane == Lane.COMPUTE
        busy_s = float((played.stages[stage].seconds * played.stages[stage].weights)[kernels].sum())
        assert 0.7 * busy_s < kernels_s <= step_s


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("1f1b", "none"), ("chunks", "tokenwise"), ("zero-bubble", "tokenwise"), ("1f1b", "rowwise")],
)
def test_no_pipeline_is_faster_than_one_of_its_stages_alone(name: str, recompute: str) -> None:
    check(with_alpha(PIPELINES[name], recompute, 1.0 if recompute == "none" else 0.5), *machine(), least=0.75)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize(("recompute", "alpha"), [("none", 1.0), ("tokenwise", 0.5)])
def test_more_micro_batches_of_a_stage_alone_change_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, recompute: str, alpha: float
) -> None:
    cluster, hardware = machine()
    decisions = with_alpha(PIPELINES[name], recompute, alpha)
    stages, fewest = range(decisions.layout.pp), stage_alone.fewest_micro_batches
    few, many = StagesAlone(hardware, cluster), StagesAlone(hardware, cluster)
    found = [few.step_s(decisions, decisions, stage, before_s=0.0, after_s=0.0) for stage in stages]
    held = [few.device_bytes(decisions, stage) for stage in stages]
    more = 2 * period_of(decisions.layout)
    monkeypatch.setattr(stage_alone, "fewest_micro_batches", lambda plan, stage: fewest(plan, stage) + more)
    assert fewest(decisions, 0) + more < decisions.micro_batches
    assert [many.device_bytes(decisions, stage) for stage in stages] == held
    again = [many.step_s(decisions, decisions, stage, before_s=0.0, after_s=0.0) for stage in stages]
    assert found == pytest.approx(again, rel=1e-9)


@pytest.mark.parametrize("fields", [{"dp": 4, "zero": 3}, {"tp": 2, "sequence_parallel": True}, {"ulysses": 2}])
@pytest.mark.parametrize(("recompute", "alpha"), POLICIES)
def test_no_plan_without_stages_is_faster_than_its_lanes_alone(fields, recompute: str, alpha: float) -> None:
    cluster, hardware = machine()
    decisions = with_alpha(pipeline("1f1b", pp=1, layers=6, batch=8, **fields), recompute, alpha)
    step_s = simulate(decisions, hardware, cluster).prediction.step_s
    assert step_s is not None
    assert 0.75 * step_s < LowerBounds(hardware, cluster).of_one_stage(decisions, decisions) <= step_s


def test_a_range_of_alphas_without_stages_is_not_faster_than_its_lanes_alone() -> None:
    cluster, hardware = machine()
    plan = pipeline("1f1b", pp=1, layers=8, batch=8, tp=2, sequence_parallel=True)
    bounds, grid = LowerBounds(hardware, cluster), Grid.of(with_alpha(plan, "tokenwise", 0.0))
    found_s = bounds.of_one_stage(grid.at(8), grid.at(12))
    inside = [simulate(grid.at(step), hardware, cluster).prediction.step_s or 0.0 for step in (8, 10, 12)]
    assert 0.75 * min(inside) < found_s <= min(inside)


def test_a_range_of_alphas_is_not_faster_than_one_of_its_stages_alone() -> None:
    cluster, hardware = machine()
    bounds, grid = LowerBounds(hardware, cluster), Grid.of(with_alpha(PIPELINES["chunks"], "tokenwise", 0.0))
    found_s = bounds.of_one_stage(grid.at(24), grid.at(32))
    inside = {step: simulate(grid.at(step), hardware, cluster).prediction.step_s or 0.0 for step in range(24, 33)}
    step_s = min(inside.values())
    assert 0.9 * step_s < found_s <= step_s
    assert not bounds.of_one_stage(grid.at(0), grid.at(32))  # other instructions: nothing is swapped at 0
    assert least_step_s(bounds, grid, 24, 32, found_s) >= found_s
    least_s = least_step_s(bounds, grid, 24, 32, step_s)
    assert found_s <= least_s < step_s
    assert least_s < least_step_s(bounds, grid, 24, 32, step_s, played_s=inside.__getitem__) == step_s
    assert least_step_s(bounds, grid, 24, 32, 1.01 * step_s, played_s=inside.__getitem__) == least_s


@pytest.mark.parametrize(
    ("name", "fields", "recompute", "changed"),
    [
        ("llama3-8b", {"tp": 2, "sequence_parallel": True, "tp_overlap": "chunked"}, "none", {}),
        ("llama3-8b", {"cp": 2}, "full", {"attention_chunk_tokens": 2048}),
        ("gpt-7b", {"ulysses": 2}, "tokenwise", {"fp8": "tensor"}),
        ("llama3-8b", {"metp": 2}, "tokenwise", {}),
        ("deepseek-v3", {"dp": 2, "ep": 2}, "none", {}),
        ("gemma3-4b", {}, "none", {"adapters": "r=16,alpha=16,targets=qkv+proj"}),
    ],
)
def test_a_backward_ends_with_the_gradient_that_the_next_stage_waits_for(name, fields, recompute, changed) -> None:
    """Otherwise stages overlap more than ``LowerBounds`` counts, and most in deep pipelines."""
    model = load_model(name)
    model = model.of_layers([model.layer(model.layers - 1)] * 2)
    base = Decisions(model=model, layout=Layout(pp=2, **fields), seq_tokens=8192, global_batch=2, **changed)
    template = next(t for t in lower(with_alpha(base, recompute, 0.5))[1].templates if t.name == "layer.bwd")
    gradients = {slot for slot, bound in enumerate(template.slots) if bound == "grad.x"}
    kernels = [i for i in template.instructions if i.lane is Lane.COMPUTE]
    modes = [{o.mode & Mode.ACCUMULATE for o in i.operands if o.slot in gradients} for i in kernels]
    assert any(mode & Mode.WRITE for mode in modes[-1])
    before = kernels[: next(n for n, found in enumerate(modes) if any(mode & Mode.READ for mode in found))]
    of_backward = {i.op for i in before if i.phase is not Phase.RECOMPUTE}
    # METP computes the MLP's first rows again before it reads their gradient; the bound leaves a forward out for it.
    assert of_backward == ({"linear", "swiglu"} if "metp" in fields else set())


@pytest.mark.parametrize("cluster", ["h100-2x8", "a800-2x8", "l40s-1x8"])
def test_no_lane_is_faster_beside_others(cluster: str) -> None:
    """Otherwise a bound that lets every lane run alone would be too high."""
    found, hardware = load_cluster(cluster)
    layout = Layout(tp=2, sequence_parallel=True, cp=2, pp=2)
    rates, chance = NodeRates(hardware, found, demands=Pricer(hardware, found, layout).demands), random.Random(1)
    for _ in range(300):
        busy = [lane for lane in Lane if chance.random() < 0.5]
        together = rates.rates(sum(1 << lane for lane in busy))
        for lane in busy:
            assert 0 < together[lane] <= rates.rates(1 << lane)[lane] <= 1


@pytest.mark.parametrize(
    ("devices", "device_gib"), [(2, 7), *(pytest.param(4, gib, marks=pytest.mark.slow) for gib in (80, 24))]
)
def test_interleaved_pipelines_with_open_alpha_are_pruned_exactly(
    monkeypatch: pytest.MonkeyPatch, devices: int, device_gib: int
) -> None:
    small = devices == 2
    schedules = ("interleaved",) if small else ("1f1b", "interleaved", "zero-bubble")
    policies = (TOKENWISE, PARTIAL_SWAP) if small else (KEEP, TOKENWISE, FULL_SWAP, PARTIAL_SWAP)
    staged = replace(SYSTEMS["any"], degrees=("pp", "dp"), policies=policies, schedules=schedules)
    monkeypatch.setitem(SYSTEMS, "any", staged)
    cluster, hardware = with_memory(*load_cluster("h100-1x4"), device_bytes=device_gib << 30, host_bytes=200 << 30)
    cluster = msgspec.structs.replace(cluster, devices_per_node=devices)
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=8)
    if small:
        model = msgspec.structs.replace(model, hidden=1024, ffn_hidden=4096, heads=8)
    pins = Pins(zero=1, pp=2, schedule="interleaved", virtual_stages=2) if small else Pins(zero=1)
    seq_tokens, batch = (2048, 8) if small else (8192, 16)
    asked = Question(model, cluster, hardware, seq_tokens, system="any", global_batch=batch, pins=pins)
    assert {(c.base.layout.schedule, c.base.layout.pp > 1) for c in candidates(asked)[0]} >= {("interleaved", True)}
    everything = search(asked, prune=False)
    for keep in (2, 1):
        found = search(asked, keep=keep)
        assert found.evaluated + found.pruned == everything.evaluated + everything.pruned
        assert [e.rank_key for e in found.ranked[:keep]] == [e.rank_key for e in everything.ranked[:keep]]
        assert small or len(found.played) < len(everything.played) / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_pipelines_are_not_faster_than_one_of_their_stages_alone(seed: int) -> None:
    chance = random.Random(seed)
    cluster, hardware = machine(chance.choice(["h100-2x8", "a800-2x8", "h100-1x8"]))
    schedule = chance.choice(["1f1b", "interleaved", "interleaved", "zero-bubble"])
    pp, chunks = chance.choice([2, 4, 8]), chance.choice([2, 3, 4]) if schedule == "interleaved" else 1
    tp = 1 if pp == 8 else chance.choice([1, 2])
    cp = 2 if pp * tp <= 4 and chance.random() < 0.3 else 1
    room = cluster.devices // (pp * tp * cp)
    fields = {"tp": tp, "sequence_parallel": tp > 1, "cp": cp, "dp": chance.choice([1, room]), "zero": 1}
    layers = pp * chunks * chance.choice([2, 3, 5]) + chance.choice([0, 1])
    base = pipeline(schedule, pp=pp, chunks=chunks, layers=layers, batch=pp * chance.choice([1, 4, 16]), **fields)
    recompute, alpha = chance.choice(POLICIES)
    check(with_alpha(base, recompute, chance.random() if alpha == 0.5 else alpha), cluster, hardware, least=0.3)
