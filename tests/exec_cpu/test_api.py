"""``memo_exec.run``: the run of the command, as a typed result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import memo_exec
from memo_sim.contract import codec
from memo_sim.contract.comparison import Comparison
from memo_sim.contract.errors import UsageError
from tests.exec_cpu.plans import predicted, write_plan
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


WRONG: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"step": 3}, {"got": "'step'", "hint": "did you mean 'steps'?"}),
    ({"steps": 0}, {"what": "not a value of steps", "wanted": "a whole number from 1"}),
    ({"steps": 1.5}, {"what": "not a value of steps"}),
    ({"lr": "much"}, {"what": "not a value of lr", "wanted": "a number or None"}),
    ({"lr": 0.0}, {"what": "not a value of a hyperparameter"}),
    ({"beta1": 1.0}, {"what": "not a value of a hyperparameter"}),
    ({"save_every": 3}, {"hint": "add --save DIR"}),
]


@pytest.mark.parametrize(("named", "fields"), WRONG, ids=",".join)
def test_wrong_arguments_are_refused(named: dict[str, Any], fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        memo_exec.run("plan.json", **named)
    check_fields(refused.value, UsageError, **fields)


def test_names_are_listed_without_loading_torch() -> None:
    assert {"run", "RunResult", "offload_activations"} <= set(dir(memo_exec))
    with pytest.raises(AttributeError, match="runs"):
        memo_exec.runs  # type: ignore[attr-defined]  # noqa: B018
