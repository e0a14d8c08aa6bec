"""``memo_exec.run``: the run of the command, as a typed result."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

import memo_exec
from memo_sim.contract import codec
from memo_sim.contract.comparison import Comparison
from memo_sim.contract.errors import OutOfTolerance, UsageError
from memo_sim.contract.verdict import Verdict
from tests.exec_cpu.plans import byte_decisions, plan_of, predicted, write_plan
from tests.refusals import check_fields


def test_a_run_is_compared_with_its_prediction(tmp_path: Path) -> None:
    seen: list[int] = []
    plan = write_plan(tmp_path / "plan.json", prediction=predicted())
    done = memo_exec.run(str(plan), steps=3, lr=1e-3, clip=0, tell=lambda figure: seen.append(figure.step))
    assert done is not None
    assert (seen, done.steps, done.stopped_by, len(done.losses)) == ([1, 2, 3], 3, 0, 3)
    rows = {row["figure"]: row for row in done.table()}
    measured_s = done.document.measured.step_s
    assert rows["step_s"] == pytest.approx(
        {"figure": "step_s", "predicted": 0.1, "measured": measured_s, "ratio": 0.1 / measured_s}
    )
    assert sum(float(row["measured"] or 0) for name, row in rows.items() if str(name).startswith("kind_")) > 0
    done.save(tmp_path / "comparison.json")
    assert codec.read(tmp_path / "comparison.json", Comparison) == done.document
    assert "measured on" in done._repr_html_()
    assert "3 steps" in repr(done)
    with pytest.raises(UsageError, match="no predicted timeline"):
        done.plot(tmp_path / "step.png")
    done.check(1e9)
    with pytest.raises(OutOfTolerance):
        done.check(0)
    done.save_report(tmp_path / "run.html", plan=plan)
    assert "measured" in (tmp_path / "run.html").read_text()
    for same in (pickle.loads(pickle.dumps(done)), copy.deepcopy(done)):
        assert (same, hash(same), str(same)) == (done, hash(done), str(done))
    codec.write(tmp_path / "measured.json", done.measured)
    found = memo_exec.compare(plan, tmp_path / "measured.json")
    assert isinstance(found, memo_exec.ComparisonResult)
    assert found.document.measured.step_s == done.measured.step_s
    assert found.document.predicted == done.document.predicted
    assert found != done
    assert "a step" in repr(found)
    both = memo_exec.compare(tmp_path / "measured.json", tmp_path / "measured.json")
    assert {row["ratio"] for row in both.table()} <= {1.0, None}
    assert "<svg" in both.plot().svg


def test_a_plan_without_a_file_runs_where_it_needs_no_placement() -> None:
    decisions = byte_decisions(memory_policy="caching")
    done = memo_exec.run(plan_of(decisions), steps=3)
    assert done is not None
    assert (done.steps, done.predicted) == (3, None)
    with pytest.raises(UsageError, match="planned memory"):
        memo_exec.run(plan_of(byte_decisions()))


@pytest.mark.slow
def test_a_plan_is_verified(tmp_path: Path) -> None:
    found = memo_exec.verify(write_plan(tmp_path / "plan.json"), layers=2)
    assert found is not None
    assert found.verified
    assert {row["reference"] for row in found.table()} == {"keep-everything", "autograd"}
    found.save(tmp_path / "verdict.json")
    assert codec.read(tmp_path / "verdict.json", Verdict) == found.document
    assert "VERIFIED" in found._repr_html_()


WRONG: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"step": 3}, {"got": "'step'", "hint": "did you mean 'steps'?"}),
    ({"steps": 0}, {"what": "not a value of steps", "wanted": "a whole number from 1"}),
    ({"steps": 1.5}, {"what": "not a value of steps"}),
    ({"lr": "much"}, {"what": "not a value of lr", "wanted": "a number or None"}),
    ({"lr": 0.0}, {"what": "not a value of a hyperparameter"}),
    ({"beta1": 1.0}, {"what": "not a value of a hyperparameter"}),
    ({"save_every": 3}, {"hint": "add --save DIR"}),
]


OTHERS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (memo_exec.verify, {"plan": "plan.json", "device": "gpu"}, {"wanted": "cpu, cuda or None"}),
    (memo_exec.verify, {"plan": "plan.json", "steps": 11}, {"wanted": "a whole number from 1 to 10"}),
    (memo_exec.verify, {"plan": "plan.json", "seed": -1}, {"got": "-1"}),
    (memo_exec.compare, {"predicted": "plan.json"}, {"what": "'measured'"}),
    (memo_exec.calibrate, {"budget_s": 0}, {"what": "not a value of budget_s"}),
    (memo_exec.calibrate, {"budget": 9}, {"hint": "did you mean 'budget_s'?"}),
]


@pytest.mark.parametrize(("function", "named", "fields"), OTHERS)
def test_wrong_arguments_of_others_are_refused(function: Any, named: dict[str, Any], fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        function(**named)
    check_fields(refused.value, UsageError, **fields)


@pytest.mark.parametrize(("named", "fields"), WRONG, ids=",".join)
def test_wrong_arguments_are_refused(named: dict[str, Any], fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        memo_exec.run("plan.json", **named)
    check_fields(refused.value, UsageError, **fields)


def test_names_are_listed_without_loading_torch() -> None:
    assert set(memo_exec.__all__) <= set(dir(memo_exec))
    assert sorted(memo_exec.__all__) == memo_exec.__all__
    assert not set(memo_exec.__all__) & {path.stem for path in Path(memo_exec.__file__).parent.iterdir()}
    with pytest.raises(AttributeError, match="runs"):
        memo_exec.runs  # type: ignore[attr-defined]  # noqa: B018
