"""Answers carry an interval: in every row, in the plan file, and in the first sentence."""

from __future__ import annotations

from dataclasses import replace
from math import exp, expm1

import msgspec
import pytest

from memo_sim.answers.what_if import UNNAMED_FRAMEWORK, plan_of, price, what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.planning.question import Question
from memo_sim.validation.intervals import setting_of, shipped_spread
from tests.sim.planning.test_search import question


@pytest.fixture(scope="module")
def asked():
    return question(32 * 1024, system="full-recompute")


def test_every_plan_that_fits_has_an_interval_around_its_step(asked) -> None:
    result = what_if(asked).result
    for row in (*result.plans, *result.front):
        assert (row.interval is not None) == (row.status == "ok")
        if row.interval is not None:
            assert row.interval.low_s <= row.step_s <= row.interval.high_s
            assert (row.interval.generation, row.interval.framework) == ("Ampere", "planned")
    assert result.why[0].startswith("Step ")
    assert f"from the errors of {result.best.interval.rows} published rows of Ampere, planned class" in result.why[0]


def test_a_profile_of_an_unknown_gpu_says_why_there_is_none(asked) -> None:
    unknown = replace(asked, hardware=msgspec.structs.replace(asked.hardware, generation=""))
    result = what_if(unknown).result
    assert result.best.interval is None
    assert result.why[0].startswith("The step has no interval: the hardware profile names no GPU generation")


def test_a_plan_file_holds_the_interval_and_a_priced_plan_has_it_again(asked) -> None:
    answer = what_if(asked)
    plan, _ = plan_of(answer.best, answer.arena, asked, created="", command="")
    assert plan.prediction.interval == answer.result.best.interval
    again = price(plan, replace(asked, system="any")).result
    assert again.best.interval == answer.result.best.interval
    assert again.why[0] == answer.result.why[0]


def test_an_unplanned_plan_does_not_name_its_framework(asked) -> None:
    eager = question(32 * 1024, system="full-recompute", memory_policy="eager")
    answer = what_if(eager)
    plan, _ = plan_of(answer.best, answer.arena, eager, created="", command="")
    again = price(plan, replace(eager, system="any")).result
    assert (again.best.interval, again.why[0]) == (None, UNNAMED_FRAMEWORK)


@pytest.mark.parametrize("generation", ["Ampere", "Hopper"])
def test_plans_that_a_comparison_cannot_tell_apart_are_counted(generation: str) -> None:
    """Hopper has no row in planned memory, so no interval; pairs of other classes say how exact a comparison is."""
    cluster, hardware = load_cluster("h100-1x8")
    asked = Question(
        model=msgspec.structs.replace(load_model("llama3-8b"), layers=2),
        cluster=cluster,
        hardware=msgspec.structs.replace(hardware, generation=generation),
        seq_tokens=64 * 1024,
        system="any",
    )
    answer = what_if(asked, top=100)
    result = answer.result
    mine = setting_of(asked.system, answer.best.decisions, asked.hardware, answer.best.prediction)
    half = shipped_spread().margin(mine, mine).half
    near = [p for p in result.plans[1:] if p.step_s and p.step_s <= result.best.step_s * exp(half)]
    said = next(line for line in result.why if "measured, one of them may be faster" in line)
    assert len(near) > 0
    assert said.startswith(f"{len(near)} other evaluated plan")
    assert f"within {100 * expm1(half):.1f} % of the best" in said
    assert result.why[0].startswith(
        "Step" if generation == "Ampere" else "The step has no interval: 0 published rows of Hopper"
    )
