"""What a pipeline stage holds for other passes is never more than what it needs when it is lowered."""

from __future__ import annotations

import random

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.engine.simulate import simulate
from memo_sim.planning.in_flight_bytes import bytes_of_layers, in_flight_bytes, order_tells
from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.question import with_memory
from memo_sim.planning.space import with_alpha

ROOM = 2**50
POLICIES = [("none", 0.0), ("none", 0.5), ("none", 1.0), ("tokenwise", 0.0), ("tokenwise", 0.5), ("full", 0.0)]
POLICIES += [("full", 1.0), ("selective", 0.0), ("rowwise", 0.0), ("mlp", 0.0)]


def pipeline(schedule: str, *, model: str = "llama3-8b", layers: int = 8, batch: int = 16, **fields) -> Decisions:
    layout = Layout(schedule=schedule, **fields)
    some = msgspec.structs.replace(load_model(model), layers=layers)
    return Decisions(model=some, layout=layout, seq_tokens=8192, global_batch=batch * layout.dp)


PIPELINES = {
    "1f1b": pipeline("1f1b", pp=4),
    "chunks": pipeline("interleaved", pp=2, virtual_stages=2, layers=14, pp_layers=(5, 3, 2, 4)),
    "zero-bubble": pipeline("zero-bubble", pp=4, tp=2, sequence_parallel=True),
    "few": pipeline("zero-bubble", pp=4, batch=2),
}


def check(decisions: Decisions, least: float = 0.0) -> None:
    cluster, hardware = with_memory(*load_cluster("h100-1x8"), device_bytes=ROOM, host_bytes=ROOM)
    played = simulate(decisions, hardware, cluster, predict=False)
    dynamic = []
    for stage in played.stages:
        lasting = sum(
            family.bytes * family.count
            for family in stage.program.families
            if family.space == "device" and family.lifetime == "step" and not family.name.startswith("skeletal")
        )
        dynamic.append(stage.memory.device.bytes - lasting)
    assert order_tells(decisions)
    held = in_flight_bytes(decisions, bytes_of_layers(decisions))
    assert all(more <= dynamic[stage] for stage, more in held.items())
    assert max(held.values()) >= least * max(dynamic)
    needed = max(stage.memory.device.bytes for stage in played.stages)
    assert LowerBounds(hardware, cluster).of(decisions).device_bytes <= needed


@pytest.mark.parametrize(
    ("name", "recompute", "alpha"),
    [
        (name, *policy)
        for name, plan in PIPELINES.items()
        for policy in POLICIES
        if plan.layout.schedule != "zero-bubble" or policy[0] != "rowwise"  # not written (``layout/rules``)
    ],
)
def test_no_stage_holds_less_than_its_passes_in_flight(name: str, recompute: str, alpha: float) -> None:
    check(with_alpha(PIPELINES[name], recompute, alpha))


@pytest.mark.parametrize("policy", ["caching", "eager"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full", "mlp"])
@pytest.mark.parametrize("name", PIPELINES)
def test_allocators_serve_no_less_than_the_passes_in_flight(name: str, recompute: str, policy: str) -> None:
    check(msgspec.structs.replace(PIPELINES[name], recompute=recompute, memory_policy=policy))


@pytest.mark.parametrize("name", PIPELINES)
def test_passes_in_flight_are_most_of_a_stage(name: str) -> None:
    check(PIPELINES[name], least=0.45)


def test_other_pipelines_are_not_known() -> None:
    assert not order_tells(pipeline("gpipe", pp=4))
    assert not order_tells(pipeline("1f1b", pp=1))
    assert not order_tells(pipeline("1f1b", pp=2, subsequences=2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_pipelines_hold_no_less_than_their_passes_in_flight(seed: int) -> None:
    chance = random.Random(seed)
    schedule = chance.choice(["1f1b", "interleaved", "zero-bubble"])
    pp, chunks = chance.choice([2, 4]), chance.choice([2, 3]) if schedule == "interleaved" else 1
    tp = chance.choice([1, 2])
    layers = pp * chunks * chance.choice([1, 2, 3]) + chance.choice([0, 1])
    fields = {"tp": tp, "sequence_parallel": tp > 1, "overlap_p2p": chunks > 1 or chance.random() < 0.5}
    model, batch = chance.choice(["llama3-8b", "gpt-7b"]), pp * chance.choice([1, 2, 4])
    base = pipeline(schedule, model=model, layers=layers, batch=batch, pp=pp, virtual_stages=chunks, **fields)
    recompute, alpha = chance.choice([each for each in POLICIES if each[0] != "rowwise" or schedule != "zero-bubble"])
    base = msgspec.structs.replace(base, memory_policy=chance.choice(["planned", "caching", "eager"]))
    check(with_alpha(base, recompute, alpha))
