"""Offloaded inputs go with full recompute under every system and memory policy, and are copied there and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import UsageError
from memo_sim.contract.knobs import MemoryPolicy, Pins
from memo_sim.contract.plan import Kernels, Layout
from memo_sim.planning.presets import SYSTEMS, Policy
from memo_sim.planning.question import Question
from memo_sim.planning.search import search
from memo_sim.planning.space import policies
from tests.pairs import covering
from tests.sim.small_programs import GPT, decide, faults_of


def ask(system: str = "any", **pins: Any) -> Question:
    cluster, hardware = load_cluster("h100-1x8")
    return Question(
        load_model("gpt-7b"), cluster, hardware, 2**16, system, Pins(**pins), global_batch=pins.get("dp", 1)
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_has_them(system: str) -> None:
    found = policies(ask(system, offload_inputs=True))
    assert {(policy.recompute, policy.alpha) for policy in found} == {("full", 1.0)}
    assert found == policies(ask(system, offload_inputs=True, recompute="full"))


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_can_be_without_them(system: str) -> None:
    own, left = policies(ask(system)), policies(ask(system, offload_inputs=False))
    assert not [policy for policy in left if policy.recompute == "full" and policy.alpha]
    assert set(left) >= {policy for policy in own if policy.recompute != "full" or policy.alpha == 0}


def test_unless_given_the_system_decides() -> None:
    assert Policy("full", 1.0) in policies(ask("any"))
    assert policies(ask("fsdp")) == SYSTEMS["fsdp"].policies


DEGREES = {"fsdp": "dp", "megatron-lm": "tp", "deepspeed-ulysses": "ulysses", "ring-attention": "cp"}


@pytest.mark.parametrize(("system", "memory"), covering(DEGREES, ["planned", "caching", "eager"]))
def test_all_inputs_but_two_travel_under_every_memory_policy(system: str, memory: MemoryPolicy) -> None:
    asked = ask(system, offload_inputs=True, memory_policy=memory, **{DEGREES[system]: 8})
    best, kept = (search(replace(asked, pins=replace(asked.pins, offload_inputs=on))).ranked[0] for on in (True, False))
    decisions = best.decisions
    assert (decisions.offload_inputs, kept.decisions.offload_inputs) == (True, False)
    model, of = decisions.model, decisions.layout
    size = 2 * decisions.local_tokens * model.hidden // (of.tp if of.sequence_parallel else 1)
    assert best.prediction.moved_bytes.d2h == decisions.micro_batches * (model.layers - 2) * size
    assert best.prediction.moved_bytes.h2d == best.prediction.moved_bytes.d2h
    assert kept.prediction.moved_bytes.d2h == 0
    assert best.prediction.peak_device_bytes <= kept.prediction.peak_device_bytes


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"offload_inputs": True, "recompute": "none"}, "--offload-inputs with --recompute none"),
        ({"offload_inputs": True, "recompute": "tokenwise"}, "--offload-inputs with --recompute tokenwise"),
        ({"offload_inputs": True, "recompute": "full", "alpha": 0.5}, "--offload-inputs with --alpha 0.5"),
        ({"offload_inputs": False, "recompute": "full", "alpha": 1.0}, "--no-offload-inputs with --alpha 1.0"),
    ],
)
def test_pins_that_contradict_them_are_refused(pins: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        policies(ask(**pins))
    assert caught.value.got == words


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(), {"kernels": Kernels(attention="plain"), "memory_policy": "caching"}),
        (Layout(cp=2, cp_exchange="rsa"), {}),
        (Layout(pp=5), {}),
        (Layout(pp=5, subsequences=5, multiplexed=True), {"global_batch": 1}),
    ],
    ids=["plain", "rsa", "pp", "multiplexed"],
)
def test_programs_pass_the_checkers_where_attention_is_rebuilt(layout: Layout, more: dict[str, Any]) -> None:
    decisions = decide(GPT, layout, ("full", 1.0), **more)
    assert decisions.offload_inputs
    assert faults_of(decisions) == []
