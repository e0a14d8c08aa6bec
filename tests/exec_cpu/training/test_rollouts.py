"""Rollouts of a JSONL file, made-up ones, and runs of plans with the objective grpo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memo_exec.commands.run import run
from memo_exec.commands.run_options import RunOptions
from memo_exec.training.rollouts import load_rollouts
from memo_sim.contract.errors import BadInput, UsageError
from tests.exec_cpu.plans import byte_decisions, write_plan
from tests.exec_cpu.small import llama
from tests.refusals import refused

LINE: dict[str, Any] = {
    "prompt_ids": [4, 5],
    "completion_ids": [6, 7, 8],
    "advantage": 0.5,
    "old_logprobs": [-1.0, -2.0, -3.0],
    "ref_logprobs": [-1.5, -2.5, -3.5],
}


def lines_in(folder: Path, *lines: Any) -> Path:
    file = folder / "rollouts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


def test_numbers_stand_at_the_label_that_they_belong_to(tmp_path: Path) -> None:
    found = load_rollouts(lines_in(tmp_path, LINE, LINE | {"advantage": [1, 2, 3]}), 16, 6, kl=True)
    drawn = found.batch(0, 1, 2, 6)
    assert drawn.labels[0].tolist() == [-100, 6, 7, 8, -100, -100]
    assert drawn.rollout is not None
    assert drawn.rollout[0, :, 1].tolist() == [0, -1, -2, -3, 0, 0]
    assert drawn.rollout[0, :, 2].tolist() == [0, -1.5, -2.5, -3.5, 0, 0]
    assert sorted(rows[1:4, 0].tolist() for rows in drawn.rollout) == [[0.5] * 3, [1, 2, 3]]


def test_log_probabilities_of_the_reference_are_needed_for_its_term_alone(tmp_path: Path) -> None:
    file = lines_in(tmp_path, {name: value for name, value in LINE.items() if name != "ref_logprobs"})
    assert load_rollouts(file, 16, 6, kl=False).batch(0, 1, 1, 6).rollout is not None
    with refused(BadInput, what="ref_logprobs", wanted="3 numbers"):
        load_rollouts(file, 16, 6, kl=True)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"advantage": "high"}, "advantage"),
        ({"advantage": [1.0]}, "advantage"),
        ({"old_logprobs": [-1.0]}, "old_logprobs"),
        ({"old_logprobs": [-1.0, True, 0.0]}, "old_logprobs"),
        ({"old_logprobs": [-1.0, float("nan"), 0.0]}, "not finite"),
        ({"completion_ids": [99]}, "outside the model's vocabulary"),
    ],
)
def test_lines_that_are_refused(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    with refused(BadInput, what=what, where="line 1"):
        load_rollouts(lines_in(tmp_path, LINE | changes), 16, 6, kl=True)


def test_a_run_on_rollouts_and_one_on_made_up_ones(tmp_path: Path) -> None:
    changes = {"model": llama(vocab=256), "objective": "grpo", "loss_chunk_tokens": 64}
    plan = write_plan(tmp_path / "plan.json", byte_decisions(**changes))
    notes: list[str] = []
    assert run(plan, RunOptions(steps=2), note=notes.append) is not None
    assert any("made up" in note for note in notes)
    data, policy = lines_in(tmp_path, LINE), {"kl_weight": 0.1, "clip_ratio_high": 0.28}
    assert run(plan, RunOptions(steps=2, data=data, hyperparameters=policy), note=notes.append) is not None
    with refused(UsageError, what="needs rollouts"):
        run(plan, RunOptions(data=plan))
    with refused(UsageError, what="tokens already"):
        run(plan, RunOptions(tokenizer=tmp_path))


def test_hyperparameters_of_a_policy_need_its_objective(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.json", byte_decisions())
    with refused(UsageError, what="--kl-weight is for plans with the objective grpo"):
        run(plan, RunOptions(hyperparameters={"kl_weight": 0.1}))
