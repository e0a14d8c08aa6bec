"""A case row without overlap: compute waits while a collective runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.program.ir.instruction import Lane
from memo_sim.validation.cases import CaseQuestion, load_cases
from memo_sim.validation.validate import predict, question_of


@pytest.fixture(scope="module")
def asked() -> CaseQuestion:
    """A small model over tp 4 with sequence parallelism; its backward gathers and scatters beside products."""
    question = next(c.question for c in load_cases("simumax-b200") if c.question.integers["tp"] == 4)
    sizes = {"layers": 2, "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 2048, "vocab": 4096}
    layout = {"tp": 4, "dp": 1, "pp": 1, "global_batch": 1}
    return replace(question, cluster="b200-1x4", integers={**question.integers, **sizes, **layout})


def played(asked: CaseQuestion) -> Simulation:
    question = question_of(asked, None)
    decisions = Decisions(
        model=question.model,
        layout=Layout(tp=4, sequence_parallel=True),
        seq_tokens=asked.seq_tokens,
        kernels=Kernels(attention="torch-cudnn"),
    )
    return simulate(decisions, question.hardware, question.cluster)


def one_after_the_other_s(simulation: Simulation) -> float:
    both = np.isin(simulation.columns.lane, (Lane.COMPUTE, Lane.TP))
    return float(simulation.seconds[both].sum())


def test_without_overlap_a_step_is_the_sum_of_both_lanes(asked: CaseQuestion) -> None:
    turns = played(asked)
    assert turns.prediction.step_s == pytest.approx(one_after_the_other_s(turns), rel=2e-3)


def test_by_default_products_overlap_with_collectives(asked: CaseQuestion) -> None:
    words = {name: word for name, word in asked.words.items() if name != "overlap"}
    lapped = played(replace(asked, words=words))
    assert lapped.prediction.step_s is not None
    # A step without overlap is within 0.2 % of the sum, so this gain comes from overlap.
    assert lapped.prediction.step_s < 0.99 * one_after_the_other_s(lapped)


def test_the_profile_itself_is_not_changed(asked: CaseQuestion) -> None:
    _, hardware = load_cluster(asked.cluster)
    assert hardware.compute_slowdown["collective"].value < 2
    assert question_of(asked, None).hardware.compute_slowdown["copy"] == hardware.compute_slowdown["copy"]
    assert predict(asked)[0].status == "ok"
