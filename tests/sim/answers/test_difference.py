"""What differs between plans, results and measured runs: the shares of the difference sum to the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from memo_sim.answers.difference import compare
from memo_sim.answers.what_if import Answer, plan_of, price, what_if
from memo_sim.contract import codec
from memo_sim.contract.comparison import Comparison, StepFigures
from memo_sim.contract.difference import Difference
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.plan import Plan
from memo_sim.contract.trace import Trace
from memo_sim.planning.question import Pins, Question
from memo_sim.views.busy import busy_by
from memo_sim.views.difference_chart import draw_difference, stacked
from memo_sim.views.difference_table import difference_table
from tests.refusals import refused
from tests.sim.planning.test_search import question

CLUSTER = "a800-1x8"


def asked(**knobs: object) -> Question:
    small = question(16 * 1024)
    return replace(small, model=msgspec.structs.replace(small.model, layers=3), pins=Pins(tp=8, **knobs))


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    return {"swap": what_if(asked(recompute="none", alpha=1.0)), "full": what_if(asked(recompute="full"))}


@pytest.fixture(scope="module")
def plans(answers: dict[str, Answer]) -> dict[str, Plan]:
    return {
        name: plan_of(answer.best, answer.arena, asked(), created="", command="")[0]
        for name, answer in answers.items()
        if answer.best is not None
    }


def check_sums(found: Difference) -> None:
    for shares in (found.groups, found.shares):
        for at, side in enumerate(found.sides):
            assert sum(share.seconds[at] for share in shares) == pytest.approx(side.step_s, rel=1e-9)
            total = side.step_s - found.sides[0].step_s
            assert sum(share.difference_s[at] for share in shares) == pytest.approx(total, abs=1e-6 * side.step_s)
            of = [share.of_difference[at] for share in shares]
            if None not in of:
                assert sum(of) == pytest.approx(1, abs=1e-4)
    assert codec.decode(codec.encode(found), Difference, where="") == found


def test_the_shares_of_a_difference_sum_to_the_difference_of_the_steps(plans: dict[str, Plan]) -> None:
    found = compare([plans["swap"], plans["full"]])
    check_sums(found)
    assert found.detail == "kinds"
    assert {"recompute", "forward", "backward", "waits"} <= {share.group for share in found.groups}
    by_group = {share.group: share for share in found.groups}
    assert by_group["recompute"].seconds[0] == 0 < by_group["recompute"].difference_s[1]
    assert {choice.option: choice.values for choice in found.decisions}["--recompute"] == ["none", "full"]
    assert "recompute +" in found.verdict[0]


def test_steps_of_other_tokens_compare_by_tokens_per_second(plans: dict[str, Plan]) -> None:
    plan = plans["full"]
    twice = msgspec.structs.replace(plan.decisions, global_batch=2 * plan.decisions.global_batch)
    found = compare([plan, msgspec.structs.replace(plan, decisions=twice)])
    check_sums(found)
    assert found.verdict[0].startswith("B does ")
    assert any("different numbers of tokens" in note for note in found.notes)
    assert any("its file says" in note for note in found.notes)


def test_a_result_compares_as_its_plan(answers: dict[str, Answer], plans: dict[str, Plan]) -> None:
    found = compare([plans["full"], answers["full"].result])
    check_sums(found)
    assert found.decisions == []
    assert found.sides[0].step_s == found.sides[1].step_s
    assert "as fast as A" in found.verdict[0]


def test_a_result_without_decisions_compares_by_its_row(answers: dict[str, Answer], plans: dict[str, Plan]) -> None:
    found = compare([plans["swap"], msgspec.structs.replace(answers["full"].result, decisions=None)])
    check_sums(found)
    assert found.detail == "lanes"
    assert {share.group for share in found.groups} == {"compute", "waits"}
    assert "are not known" in difference_table(found)


def test_a_plan_has_its_own_prediction_where_its_trace_lies_beside_it(
    answers: dict[str, Answer], plans: dict[str, Plan], tmp_path: Path
) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        codec.write(path, plans["swap"])
    simulation = answers["swap"].best
    assert simulation is not None
    codec.write(tmp_path / "a.trace.json", simulation.trace())
    found = compare(paths)
    check_sums(found)
    assert [side.source for side in found.sides] == [
        f"its own prediction, for {CLUSTER}",
        f"simulated anew on {CLUSTER}",
    ]
    assert found.sides[0].lanes == found.sides[1].lanes
    again = compare(paths, cluster="h100-1x8")
    assert {side.source for side in again.sides} == {"simulated anew on h100-1x8"}
    assert any("its file says" in note for note in again.notes)


def measured(trace: Trace, factor: float) -> Trace:
    """The trace as if it had been measured, and everything had taken ``factor`` times as long."""
    spans = trace.spans
    times = {name: [factor * value for value in getattr(spans, name)] for name in ("start_s", "end_s")}
    longer = msgspec.structs.replace(spans, **times)
    waits = [msgspec.structs.replace(w, start_s=factor * w.start_s, seconds=factor * w.seconds) for w in trace.waits]
    return msgspec.structs.replace(trace, origin="measured", step_s=factor * trace.step_s, spans=longer, waits=waits)


def test_measured_runs_compare_with_predictions(answers: dict[str, Answer], plans: dict[str, Plan]) -> None:
    simulation = answers["full"].best
    assert simulation is not None
    run = measured(simulation.trace(), 1.5)
    lanes, ops = busy_by(run)
    figures = StepFigures(step_s=run.step_s, peak_device_bytes=1, moved_bytes=None, lanes=lanes, ops=ops)
    comparison = Comparison(
        program_sha256=run.program_sha256, machine="a test", predicted=None, measured=figures, ratio=None
    )
    found = compare([plans["full"], run])
    check_sums(found)
    assert found.detail == "kinds"
    assert [side.origin for side in found.sides] == ["predicted", "measured"]
    assert found.sides[1].step_s == pytest.approx(1.5 * found.sides[0].step_s)
    assert found.sides[1].decisions == plans["full"].decisions
    assert found.sides[1].tgs == pytest.approx((found.sides[0].tgs or 0) / 1.5)
    assert any(note.startswith("Predicted: number 1; measured: number 2") for note in found.notes)
    assert any("the same program" in note for note in found.notes)
    coarse = compare([plans["full"], comparison])
    check_sums(coarse)
    assert coarse.detail == "operators"
    attention = next(share for share in coarse.shares if share.name == "attention.bwd")
    assert attention.seconds[1] == pytest.approx(1.5 * attention.seconds[0])
    alone = compare([comparison, comparison])
    check_sums(alone)
    assert alone.detail == "lanes"


def test_what_cannot_be_compared_is_refused(plans: dict[str, Plan], answers: dict[str, Answer], tmp_path: Path) -> None:
    with refused(UsageError, what="nothing to compare"):
        compare([plans["full"]])
    unnamed = msgspec.structs.replace(plans["full"], provenance=type(plans["full"].provenance)())
    with refused(UsageError, what="the cluster to simulate on is not known", hint="--cluster"):
        compare([unnamed, plans["full"]])
    nothing = msgspec.structs.replace(answers["full"].result, best=None)
    with refused(UsageError, what="no plan of this result fits", hint="memo-sim oom"):
        compare([nothing, plans["full"]])
    model = tmp_path / "model.json"
    codec.write(model, plans["full"].decisions.model)
    with refused(BadInput, wanted="memo.plan/3"):
        compare([model, plans["full"]])
    small = price(plans["full"], asked()).result
    assert small.decisions == plans["full"].decisions


def test_the_picture_has_the_whole_step_of_every_side(plans: dict[str, Plan], tmp_path: Path) -> None:
    found = compare([plans["swap"], plans["full"]])
    for at, side in enumerate(found.sides):
        assert sum(share.seconds[at] for share in stacked(found)) == pytest.approx(side.step_s, rel=1e-9)
    draw_difference(found, tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    assert "recompute: attention" in text
    assert "skeletal" in text
    assert found.verdict[0] in text
