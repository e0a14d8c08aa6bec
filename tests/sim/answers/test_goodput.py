"""Goodput: what failures leave of a plan's speed, in the answer, its page, comparisons and explanations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from memo_sim.answers.difference import compare
from memo_sim.answers.explanation import explain
from memo_sim.answers.goodput import changed, checkpoint_bytes, goodput_of
from memo_sim.answers.named_values import failures_of, question_of
from memo_sim.answers.what_if import Answer, Outputs, plan_of, price, what_if, write_files
from memo_sim.contract import codec
from memo_sim.contract.errors import UsageError
from memo_sim.contract.goodput import Failures
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.result import Result
from memo_sim.costs.failures import daly_interval, shares
from memo_sim.costs.pace import pace
from memo_sim.planning.question import Question
from memo_sim.program.lower import lower
from memo_sim.views.difference_table import difference_table
from memo_sim.views.explanation_table import explanation_text
from memo_sim.views.summary_text import summary_lines

TINY = {"model": "gpt-tiny", "cluster": "a800-1x2", "seq_len": "1k", "system": "full-recompute", "tp": 2}
SAID = {"mtbf_hours": 100, "checkpoint_s": 5, "restart_s": 60}
FAILURES = Failures(device_mtbf_hours=100, checkpoint_s=5, restart_s=60)
SAVED = ("params", "master", "moment1", "moment2")


@pytest.fixture(scope="module")
def asked() -> Question:
    return question_of({**TINY, **SAID})


@pytest.fixture(scope="module")
def answer(asked: Question) -> Answer:
    return what_if(asked, price_per_device_hour=2.0)


def test_a_question_without_failures_has_no_goodput_and_the_same_plans(asked: Question, answer: Answer) -> None:
    plain = what_if(replace(asked, failures=None), price_per_device_hour=2.0).result
    assert plain.summary.goodput is None
    assert plain.plans == answer.result.plans
    assert not any("oodput" in line for line in [*plain.why, *summary_lines(plain.summary)])


def test_goodput_is_the_closed_form_of_the_jobs_failures(answer: Answer) -> None:
    verdict = answer.result.summary
    goodput, step_s = verdict.goodput, verdict.step_s
    mtbf_s = 100 * 3600 / 2
    assert (goodput.job_mtbf_s, goodput.checkpoint_s) == (mtbf_s, 5)
    assert goodput.interval_s == pytest.approx(daly_interval(5, mtbf_s), abs=step_s)
    assert goodput.interval_s == goodput.interval_steps * step_s
    assert goodput.goodput == shares(goodput.interval_s, 5, 60, mtbf_s).useful
    assert goodput.goodput + goodput.checkpoints + goodput.lost + goodput.restarts == pytest.approx(1)
    assert goodput.tokens_per_device_s == goodput.goodput * verdict.tokens_per_device_s
    days = 1e12 / (2 * goodput.tokens_per_device_s) / 86_400
    assert goodput.days_per_trillion_tokens == pytest.approx(days)
    assert goodput.price_per_billion_tokens == pytest.approx(verdict.price_per_billion_tokens / goodput.goodput)
    assert codec.decode(codec.encode(answer.result), Result, where="here") == answer.result


def test_the_answer_says_what_is_assumed_and_what_would_help(answer: Answer, asked: Question, tmp_path: Path) -> None:
    verdict = answer.result.summary
    (line,) = [line for line in summary_lines(verdict) if line.startswith("Goodput ")]
    assert f"{verdict.goodput.tokens_per_device_s:.0f} effective tokens per GPU and second" in line
    assert "the job fails every 2.1 days" in line
    options = {each.name: each.option for each in verdict.assumptions}
    assert {"failures": "--mtbf-hours", "restart": "--restart-s"}.items() <= options.items()
    assert options["checkpoints"] == "--checkpoint-s, --checkpoint-interval-s"
    assert any("The goodput with one thing changed: half the failures" in line for line in answer.result.why)
    write_files(answer, asked, Outputs(report=tmp_path / "r.html"), created="", command="")
    page = (tmp_path / "r.html").read_text()
    assert "Where the time of a long job goes" in page
    assert "days for a trillion tokens" in page


@pytest.mark.parametrize(
    ("states", "dtype"),
    [
        *((states, "bf16") for states in ("fp32", "bf16", "host", "pure-bf16", "pure-bf16-fp32-moments")),
        *((states, "fp32") for states in ("fp32", "bf16", "host")),
    ],
)
def test_a_checkpoint_has_the_bytes_of_the_programs_states(asked: Question, states, dtype) -> None:
    decisions = Decisions(model=asked.model, layout=Layout(), seq_tokens=1024, states=states, dtype=dtype)
    families = [f for program in lower(decisions) for f in program.families]
    held = sum(f.bytes * f.count for f in families if f.name.partition(".")[0] in SAVED)
    assert checkpoint_bytes(decisions) == held > 0


def test_a_rate_gives_the_seconds_of_a_checkpoint_and_an_interval_is_whole_steps(answer: Answer) -> None:
    decisions, rates = answer.result.decisions, {"step_s": 2.0, "tokens_per_device_s": 10.0}
    given = msgspec.structs.replace(FAILURES, checkpoint_s=None, checkpoint_bytes_per_s=1e6, interval_s=7.2)
    found = goodput_of(given, decisions, **rates)
    assert found.checkpoint_s == checkpoint_bytes(decisions) / 1e6
    assert (found.interval_steps, found.interval_s, found.interval_from) == (4, 8.0, "given")
    assert changed(found, 2.0)[0].change == "Daly's interval"
    short = goodput_of(msgspec.structs.replace(given, interval_s=0.1), decisions, **rates)
    assert short.interval_steps == 1
    hopeless = msgspec.structs.replace(given, device_mtbf_hours=1e-3, restart_s=1e5)
    none = goodput_of(hopeless, decisions, **rates)
    assert none.goodput < 1e-6
    assert none.days_per_trillion_tokens is None
    assert goodput_of(given, decisions, step_s=None, tokens_per_device_s=None) is None


def test_what_is_said_of_failures_is_whole_or_refused() -> None:
    assert failures_of({}) is None
    assert failures_of(SAID) == FAILURES
    for name, missing in {
        "mtbf_hours": "also --mtbf-hours",
        "checkpoint_s": "also --checkpoint-s or --checkpoint-gb-s",
        "restart_s": "also --restart-s",
    }.items():
        with pytest.raises(UsageError) as refusal:
            failures_of(SAID | {name: None})
        assert refusal.value.wanted == missing
    with pytest.raises(UsageError, match="both give the time of a checkpoint"):
        failures_of(SAID | {"checkpoint_gb_s": 1})
    for name, wrong in {"mtbf_hours": 0, "restart_s": -1, "checkpoint_s": "5", "straggler_spread": 2}.items():
        with pytest.raises(UsageError, match=f"not a value of {name}"):
            question_of({**TINY, **SAID, name: wrong})


def test_a_plan_that_is_priced_has_a_goodput(answer: Answer, asked: Question) -> None:
    plan, _ = plan_of(answer.best_simulation, answer.arena, asked, created="", command="")
    assert price(plan, asked).result.summary.goodput.goodput == answer.result.summary.goodput.goodput


def test_compare_and_explain_show_the_goodput_of_results(answer: Answer, asked: Question) -> None:
    rarer = what_if(replace(asked, failures=msgspec.structs.replace(FAILURES, device_mtbf_hours=1000))).result
    plain = what_if(replace(asked, failures=None)).result
    found = compare([answer.result, rarer, plain])
    first, second, third = (side.goodput for side in found.sides)
    assert first == msgspec.structs.replace(answer.result.summary.goodput, price_per_billion_tokens=None)
    assert first.goodput < second.goodput
    assert third is None
    assert "days/1e12 tokens" in difference_table(found)
    assert "goodput" not in difference_table(compare([plain, plain]))
    explained = explain(answer.result)
    assert explained.goodput == first
    gains = {each.change: each.goodput for each in explained.goodput_changes}
    assert gains.keys() == {"half the checkpoint", "half the restart", "half the failures"}
    assert min(gains.values()) > first.goodput
    assert "half the failures" in explanation_text(explained)


def test_a_spread_of_the_devices_slows_products_and_is_assumed() -> None:
    """The profile's own spread counts unless one is given; a spread of 0 leaves no straggler."""
    large = {"model": "gpt-tiny", "cluster": "a800-8x8", "seq_len": "1k", "system": "full-recompute", "dp": 64}
    steps, paces = {}, {}
    for spread in (None, 0, 0.02, 0.1):
        question = question_of({**large, "straggler_spread": spread})
        verdict = what_if(question).result.summary
        steps[spread], paces[spread] = verdict.step_s, pace(question.hardware, 64)
        named = [each.value for each in verdict.assumptions if each.name == "stragglers"]
        assert len(named) == (spread is not None)
    assert paces[0] == 1.0 < paces[None] < paces[0.02] < paces[0.1]
    assert steps[0] < steps[None] < steps[0.02] < steps[0.1]
    assert "GPUs differ by 10.0 %" in named[0]
