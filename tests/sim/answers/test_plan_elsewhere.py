"""A plan on a machine without its kernels: played on those that the machine has, and the answer says which changed."""

from __future__ import annotations

import pytest

import memo_sim as memo
from memo_sim.answers.given_plan import of_plan
from memo_sim.contract.plan import Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return memo.what_if("llama-tiny", cluster="h100-1x1", seq_len="8k", global_batch=1, rowwise="triton").plan


def changed(answer: memo.WhatIfResult) -> list[str]:
    assert answer.summary is not None
    return [each.value for each in answer.summary.assumptions if each.name == "changed"]


def test_kernels_without_rates_are_replaced_and_named(plan: Plan) -> None:
    found = memo.simulate(plan, cluster="a800-1x1")
    assert found.best is not None
    assert (found.best.attention, found.best.rowwise) == ("flash2", "torch")
    attention, others = changed(found)
    assert "flash2" in attention
    assert "plan's flash3" in attention
    assert "plan's triton" in others
    assert found.document.decisions == found.plan.decisions
    given = of_plan(plan, "plan", cluster="a800-1x1")
    assert given.decisions == found.document.decisions
    assert attention in given.note


def test_the_plan_keeps_its_kernels_and_cluster_unless_asked(plan: Plan) -> None:
    same = memo.simulate(plan)
    assert (same.document.cluster, same.document.decisions, changed(same)) == ("h100-1x1", plan.decisions, [])
    other = memo.simulate(plan, attention="flash2", rowwise="compiled")
    assert other.best is not None
    assert (other.best.attention, other.best.rowwise) == ("flash2", "compiled")
    assert changed(other) == [
        "attention kernel flash2 as asked, flash3 in the plan",
        "other kernels compiled as asked, triton in the plan",
    ]


def test_a_kernel_that_is_asked_for_is_not_replaced(plan: Plan) -> None:
    with pytest.raises(memo.Infeasible, match="no rates of this attention kernel"):
        memo.simulate(plan, cluster="a800-1x1", attention="flash3")
    refused = memo.simulate(plan, cluster="a800-1x1", rowwise="triton").refused
    assert refused is not None
    assert "triton" in refused.what
