"""Questions about one plan: every knob pinned to what a plan decides gives that plan again."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from memo_sim.contract.knobs import Pins
from memo_sim.planning.plan_question import pinned_to, question_of_plan, with_open_policy
from memo_sim.planning.question import Question
from memo_sim.planning.search import search
from memo_sim.planning.space import candidates, policies
from tests.sim.planning.test_search import question

ASKED = {
    "any": Pins(tp=2),
    "memo": Pins(tp=4),
    "full-recompute": Pins(tp=2),
    "fsdp": Pins(),
    "trl-fsdp2": Pins(cp=2),
    "deepspeed-alst": Pins(ulysses=2),
    "megatron-core": Pins(tp=4, pp=1),
    "sppo": Pins(tp=4, pp=2, subsequences=4),
}


def asked(system: str) -> Question:
    return replace(question(8 * 1024, system=system), pins=ASKED[system], global_batch=8)


SLOW = {"sppo", "megatron-core"}


@pytest.mark.parametrize("system", [pytest.param(s, marks=pytest.mark.slow if s in SLOW else ()) for s in ASKED])
def test_a_question_pinned_to_a_plan_has_that_plan_alone(system: str) -> None:
    before = asked(system)
    plan = search(before, enough_s=float("inf")).ranked[0].decisions
    for pinned in (pinned_to(before, plan), question_of_plan(plan, before.cluster, before.hardware)):
        found, _ = candidates(pinned)
        assert [candidate.base for candidate in found] == [plan]


def test_an_open_policy_leaves_the_layout_alone() -> None:
    before = asked("any")
    plan = search(before, enough_s=float("inf")).ranked[0].decisions
    pinned = with_open_policy(pinned_to(before, plan))
    assert len(policies(pinned)) > 3
    assert {candidate.base.layout for candidate in candidates(pinned)[0]} == {plan.layout}


def test_a_cpu_that_has_bf16_too_computes_in_fp32_unless_asked() -> None:
    gpu = question(1024)
    rate = gpu.hardware.peak_flops["bf16"]
    both = msgspec.structs.replace(gpu.hardware, device="cpu", peak_flops={"bf16": rate, "fp32": rate})
    cpu = replace(gpu, hardware=both)
    assert (gpu.dtype, cpu.dtype) == ("bf16", "fp32")
    assert replace(cpu, pins=Pins(dtype="bf16")).dtype == "bf16"
