"""Passes that wait for each other are never slower than the pipeline that they are taken from."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.engine.simulate import simulate
from memo_sim.planning.alpha_search import Grid
from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.presets import KEEP, PARTIAL_SWAP, SYSTEMS, TOKENWISE
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.search import search
from memo_sim.planning.space import with_alpha
from memo_sim.planning.stage_passes import ChunkSeconds, StagePasses
from memo_sim.program.layout.schedule import Kind, passes_of

ROOM = 2**50
POLICIES = [("none", 0.0), ("full", 0.0), ("full", 1.0), ("none", 0.5), ("none", 1.0), ("tokenwise", 0.5)]


def machine(name: str = "h100-1x8") -> tuple[Cluster, Hardware]:
    return with_memory(*load_cluster(name), device_bytes=ROOM, host_bytes=ROOM)


def pipeline(model: str, layers: int, batch: int, seq_tokens: int = 8192, **fields) -> Decisions:
    layout, whole = Layout(**fields), load_model(model)
    few = whole.of_layers([whole.layer(whole.layers - 1)] * layers)
    return Decisions(model=few, layout=layout, seq_tokens=seq_tokens, global_batch=batch * layout.dp)


def step_s(decisions: Decisions, cluster: Cluster, hardware: Hardware) -> float:
    found = simulate(decisions, hardware, cluster).prediction.step_s
    assert found is not None
    return found


UNEVEN = {"pp": 4, "schedule": "interleaved", "virtual_stages": 2}


@pytest.mark.parametrize(
    ("model", "layers", "fields", "recompute", "alpha"),
    [
        ("llama3-8b", 12, UNEVEN, "none", 0.0),
        ("llama3-8b", 11, {**UNEVEN, "tp": 2, "sequence_parallel": True}, "tokenwise", 0.5),
        ("llama3-8b", 6, {"pp": 4}, "full", 0.0),
        ("llama3-8b", 12, {**UNEVEN, "metp": 2}, "tokenwise", 0.5),
        ("qwen3-235b-a22b", 12, {**UNEVEN, "ulysses": 2, "ep": 2}, "none", 0.0),
        ("gpt-7b", 12, {**UNEVEN, "cp": 2}, "rowwise", 0.5),
    ],
)
def test_no_pipeline_is_faster_than_its_passes(model, layers, fields, recompute, alpha) -> None:
    cluster, hardware = machine()
    plan = with_alpha(pipeline(model, layers, 24, **fields), recompute, alpha)
    played_s = step_s(plan, cluster, hardware)
    assert 0.6 * played_s < LowerBounds(hardware, cluster).of_passes(plan, plan) <= played_s


def test_chunks_of_unequal_lengths_wait_for_the_longest() -> None:
    """One stage's own work does not show these waits: most stages have chunks of two layers and of one."""
    cluster, hardware = machine()
    plan = pipeline("gpt-7b", 22, 32, pp=8, schedule="interleaved", virtual_stages=2)
    bounds = LowerBounds(hardware, cluster)
    found_s = bounds.of_passes(plan, plan)
    assert found_s > 1.15 * max(bounds.of(plan).step_s, bounds.of_one_stage(plan, plan))
    assert 0.95 * step_s(plan, cluster, hardware) < found_s <= step_s(plan, cluster, hardware)


@pytest.mark.parametrize("device_gib", [7, 9])
def test_chunks_of_unequal_lengths_are_pruned_exactly(monkeypatch: pytest.MonkeyPatch, device_gib: int) -> None:
    policies = (KEEP, TOKENWISE, PARTIAL_SWAP)
    staged = replace(SYSTEMS["any"], degrees=("pp", "dp"), policies=policies, schedules=("1f1b", "interleaved"))
    monkeypatch.setitem(SYSTEMS, "any", staged)
    cluster, hardware = with_memory(*load_cluster("h100-1x4"), device_bytes=device_gib << 30, host_bytes=200 << 30)
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=11, hidden=1024, ffn_hidden=4096, heads=8)
    question = Question(model, cluster, hardware, 2048, system="any", global_batch=16, pins=Pins(zero=1, pp=4))
    everything = search(question, prune=False)
    for keep in (2, 1):
        found = search(question, keep=keep)
        assert found.evaluated + found.pruned == everything.evaluated + everything.pruned
        assert [e.rank_key for e in found.ranked[:keep]] == [e.rank_key for e in everything.ranked[:keep]]


@pytest.mark.parametrize("recompute", ["none", "tokenwise"])
def test_a_range_of_alphas_is_not_faster_than_its_passes(recompute: str) -> None:
    cluster, hardware = machine()
    base = pipeline("llama3-8b", 12, 16, **UNEVEN, tp=2, sequence_parallel=True)
    grid, bounds = Grid.of(with_alpha(base, recompute, 0.0)), LowerBounds(hardware, cluster)
    found_s = bounds.of_passes(grid.at(0), grid.at(grid.steps))
    assert 0 < found_s <= min(step_s(grid.at(step), cluster, hardware) for step in (0, 8, 24, 40, grid.steps))


def test_subsequences_and_w_passes_give_no_bound() -> None:
    cluster, hardware = machine()
    bounds = LowerBounds(hardware, cluster)
    for fields in ({"pp": 2, "schedule": "zero-bubble"}, {"pp": 2, "subsequences": 2}, {"tp": 2}):
        plan = pipeline("llama3-8b", 4, 4, **fields)
        assert bounds.of_passes(plan, plan) == 0


@pytest.mark.parametrize("seed", range(12))
def test_repeated_windows_are_not_slower_than_every_pass_played(seed: int) -> None:
    """Any times: those of stages, of transfers, and of what follows the passes."""
    chance = random.Random(seed)
    pp, chunks = chance.choice([2, 3, 4, 8]), chance.choice([1, 2, 3])
    layout = Layout(pp=pp, schedule="interleaved" if chunks > 1 else "1f1b", virtual_stages=chunks)
    times = pp * chance.choice([1, 7, 16])
    seconds = [[_seconds(chance) for _ in range(chunks)] for _ in range(pp)]
    hops, ends = ([chance.choice([0.0, chance.random()]) for _ in range(pp)] for _ in range(2))
    found_s = StagePasses().step_s(layout, times, seconds, hops_s=hops, ends_s=ends)
    played_s = _played_s(layout, times, seconds, hops, ends)
    assert 0.9 * played_s < found_s <= played_s


def _seconds(chance: random.Random) -> ChunkSeconds:
    backward_s = 2 * chance.random()
    return ChunkSeconds(chance.random(), backward_s, backward_s * chance.choice([0.0, 0.7, 1.0]))


def _played_s(layout: Layout, times: int, chunks, hops: list[float], ends: list[float]) -> float:
    """Return the end of all micro-batches, each pass looked up by the stage and chunk that make its input."""
    waiting = [list(passes_of(layout, stage, times)) for stage in range(layout.pp)]
    free, ended = [0.0] * layout.pp, dict[tuple[Kind, int, int], float]()
    runs = layout.pp * layout.virtual_stages
    while any(waiting):
        for stage, passes in enumerate(waiting):
            while passes:
                each = passes[0]
                run, of = each.chunk * layout.pp + stage, chunks[stage][each.chunk]
                forward = each.kind is Kind.FORWARD
                source = run - 1 if forward else run + 1
                arrived = 0.0 if not 0 <= source < runs else ended.get((each.kind, each.micro_batch, source))
                if arrived is None:
                    break
                after, hop = (of.forward_s, hops[stage - 1]) if forward else (of.from_gradient_s, hops[stage])
                late = arrived + hop + after if 0 <= source < runs else 0.0
                free[stage] = max(free[stage] + (of.forward_s if forward else of.backward_s), late)
                ended[each.kind, each.micro_batch, run] = free[stage]
                passes.pop(0)
    return max(at + more for at, more in zip(free, ends, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_pipelines_are_not_faster_than_their_passes(seed: int) -> None:
    chance = random.Random(seed)
    cluster, hardware = machine(chance.choice(["h100-2x8", "a800-2x8", "h100-1x8"]))
    schedule = chance.choice(["1f1b", "interleaved", "interleaved"])
    pp, chunks = chance.choice([2, 4, 8]), chance.choice([2, 3]) if schedule == "interleaved" else 1
    tp = 1 if pp == 8 else chance.choice([1, 2])
    cp = 2 if pp * tp <= 4 and chance.random() < 0.3 else 1
    room = cluster.devices // (pp * tp * cp)
    fields = {"tp": tp, "sequence_parallel": tp > 1, "cp": cp, "dp": chance.choice([1, room]), "zero": 1}
    overlap_p2p = schedule == "interleaved" or chance.random() < 0.5
    fields |= {"pp": pp, "schedule": schedule, "virtual_stages": chunks, "overlap_p2p": overlap_p2p}
    layers = pp * chunks * chance.choice([1, 2, 3]) + chance.choice([0, 1, pp - 1])
    model = chance.choice(["llama3-8b", "gpt-7b"])
    base = pipeline(model, layers, pp * chance.choice([1, 4, 16]), chance.choice([2048, 8192]), **fields)
    recompute, alpha = chance.choice(POLICIES)
    base = with_alpha(base, recompute, chance.random() if alpha == 0.5 else alpha)
    assert 0 < LowerBounds(hardware, cluster).of_passes(base, base) <= step_s(base, cluster, hardware)
