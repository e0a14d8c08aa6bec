"""Explanations of a plan: sensitivities are fresh predictions with one resource changed, and rivals' losses sum up."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from memo_sim.answers.explanation import explain
from memo_sim.answers.what_if import Answer, plan_of, price, what_if
from memo_sim.contract import codec
from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.explanation import Explanation, Resource, Rival, Sensitivity
from memo_sim.contract.plan import Plan
from memo_sim.planning.plan_question import question_of_plan, with_open_policy
from memo_sim.planning.question import Question
from memo_sim.planning.search import search
from memo_sim.reasons.other_machine import MEMORIES, RATES, with_more
from memo_sim.views.explanation_table import explanation_text, why
from tests.refusals import refused
from tests.sim.answers.test_difference import asked


@pytest.fixture(scope="module")
def question() -> Question:
    return asked(recompute="none", alpha=1.0)


@pytest.fixture(scope="module")
def answer(question: Question) -> Answer:
    return what_if(question)


@pytest.fixture(scope="module")
def plan(answer: Answer, question: Question) -> Plan:
    assert answer.best is not None
    return plan_of(answer.best, answer.arena, question, created="", command="")[0]


@pytest.fixture(scope="module")
def found(plan: Plan) -> Explanation:
    return explain(plan)


def one(found: Explanation, resource: Resource) -> Sensitivity:
    return next(each for each in found.sensitivities if each.resource == resource)


def test_the_document_reads_back(found: Explanation) -> None:
    assert codec.decode(codec.encode(found), Explanation, where="") == found


@pytest.mark.parametrize("resource", [rate for rate in RATES if rate != "network"])
def test_a_rate_is_worth_what_the_plan_gains_on_that_machine(
    found: Explanation, plan: Plan, question: Question, resource: Resource
) -> None:
    machine = with_more(question.cluster, question.hardware, resource, 1.25)
    assert machine is not None
    cluster, hardware = machine
    fresh = price(plan, replace(question, cluster=cluster, hardware=hardware)).result.best
    assert fresh is not None
    each = one(found, resource)
    assert (each.step_s, each.decisions) == (fresh.step_s, "fixed")
    assert each.gain == pytest.approx(found.step_s / (fresh.step_s or 1) - 1)


@pytest.mark.parametrize("resource", MEMORIES)
def test_memory_is_worth_what_a_search_with_more_of_it_gains(
    found: Explanation, plan: Plan, question: Question, resource: Resource
) -> None:
    machine = with_more(question.cluster, question.hardware, resource, 1.25)
    assert machine is not None
    fresh = search(with_open_policy(question_of_plan(plan.decisions, *machine))).best
    assert fresh is not None
    each = one(found, resource)
    assert each.decisions == "searched"
    assert each.step_s == pytest.approx(fresh.prediction.step_s, rel=1e-9)


def test_a_doubled_batch_is_the_same_plan_with_twice_the_sequences(
    found: Explanation, plan: Plan, question: Question
) -> None:
    twice = msgspec.structs.replace(plan.decisions, global_batch=2 * plan.decisions.global_batch)
    fresh = price(msgspec.structs.replace(plan, decisions=twice), question).result.best
    assert fresh is not None
    assert one(found, "batch").step_s == fresh.step_s
    assert one(found, "batch").tgs == fresh.tgs


def test_a_machine_has_no_network_in_one_node(found: Explanation, question: Question) -> None:
    assert with_more(question.cluster, question.hardware, "network", 2) is None
    assert "network" not in {each.resource for each in found.sensitivities}
    machine = with_more(*load_cluster("a800-2x8"), "network", 2)
    assert machine is not None
    gains = [each.gain if each.gain is not None else -1.0 for each in found.sensitivities]
    assert gains == sorted(gains, reverse=True)


def check_losses(found: Explanation, rivals: list[Rival]) -> None:
    for rival in rivals:
        if rival.step_s is None:
            assert (rival.slower_s, rival.compute_s, rival.waits_s) == (None, None, None)
            continue
        assert rival.slower_s == pytest.approx(rival.step_s - found.step_s)
        assert (rival.compute_s or 0) + (rival.waits_s or 0) == pytest.approx(rival.slower_s)


def test_neighbours_change_one_decision_and_their_losses_sum_up(found: Explanation) -> None:
    check_losses(found, found.rivals)
    assert found.rivals_are == "one decision changed"
    assert all(rival.options for rival in found.rivals)
    steps = [rival.step_s for rival in found.rivals if rival.step_s is not None]
    assert steps == sorted(steps)
    assert any(rival.options == "--recompute full" for rival in found.rivals)
    assert any(rival.options.startswith("--alpha") for rival in found.rivals)
    first = found.rivals[0].slower_s
    assert first is not None
    assert ("A rival is faster" in explanation_text(found)) == (-first > 0.005 * found.step_s)
    assert any(rival.options == "--tp-overlap chunked" for rival in found.rivals)


def test_pairs_are_faster_than_every_single_change(found: Explanation) -> None:
    check_losses(found, found.pairs)
    assert 0 < found.pairs_tried <= 12
    to_beat = min(rival.step_s for rival in found.rivals if rival.step_s is not None)
    assert found.pairs
    assert all(rival.step_s is not None and rival.step_s < to_beat for rival in found.pairs)
    assert "Faster with two decisions changed" in explanation_text(found)
    none = explanation_text(msgspec.structs.replace(found, pairs=[]))
    assert f"none of {found.pairs_tried} pairs is faster" in none


def test_the_step_is_compute_and_its_waits(found: Explanation) -> None:
    compute = found.uses[0]
    assert compute.lane == "compute"
    assert compute.busy_s + sum(use.compute_waits_s for use in found.uses) == pytest.approx(found.step_s)
    text = explanation_text(found, top=2)
    assert "What would help most" in text
    assert f"... and {len(found.rivals) - 2} more" in text


@pytest.mark.slow
def test_the_rivals_of_a_result_are_its_ranked_plans(question: Question) -> None:
    wide = what_if(replace(question, pins=replace(question.pins, recompute=None, alpha=None))).result
    found = explain(wide)
    assert found.rivals_are == "ranked plans"
    assert [rival.step_s for rival in found.rivals] == [row.step_s for row in wide.plans[1:]]
    check_losses(found, found.rivals)
    assert found.notes == []
    check_losses(found, found.changed)
    assert found.changes_tried == len(found.changed) > 0
    assert all(rival.options for rival in found.changed)
    assert "The best plan with one decision changed" in explanation_text(found)


def test_a_loss_reads_as_a_sentence(found: Explanation) -> None:
    rival = Rival(
        plan="",
        status="ok",
        step_s=10.41,
        slower_s=0.41,
        compute_s=0.3,
        waits_s=0.11,
        waits_for="all_gather",
        peak_device_bytes=0,
        peak_host_bytes_per_node=0,
    )
    assert why(rival) == "410 ms slower: 300 ms more compute, 110 ms more waits for all_gather"
    faster = msgspec.structs.replace(rival, slower_s=-0.41, compute_s=-0.41, waits_s=0.0)
    assert why(faster) == "410 ms faster: 410 ms less compute"
    assert why(msgspec.structs.replace(rival, slower_s=0.0)) == "equally fast"
    short = msgspec.structs.replace(rival, status="gpu_oom", step_s=None, slower_s=None, shortfall_bytes=2**30)
    assert why(short) == "does not fit: short by 1.00 GiB of device memory"


def test_what_cannot_be_explained_is_refused(plan: Plan, answer: Answer) -> None:
    with refused(UsageError, what="the cluster to simulate on is not known"):
        explain(msgspec.structs.replace(plan, provenance=type(plan.provenance)()))
    with refused(BadInput, what="does not hold the decisions", hint="-o plan.json"):
        explain(msgspec.structs.replace(answer.result, decisions=None))
    large = msgspec.structs.replace(plan.decisions, seq_tokens=2**21, swapped_tokens=0)
    with refused(BadInput, what="does not fit a800-1x8", hint="memo-sim oom"):
        explain(msgspec.structs.replace(plan, decisions=large, prediction=None))
