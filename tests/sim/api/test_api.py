"""The public Python functions: typed results, names and values checked, one path from named values to a question."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import memo_sim as memo
from memo_sim import api
from memo_sim.answers.named_knobs import named_knobs
from memo_sim.answers.named_values import checked, question_about, question_of
from memo_sim.cli import cli
from memo_sim.contract import codec
from memo_sim.contract import named_knobs as module
from memo_sim.contract.catalog import load_model
from memo_sim.contract.difference import Difference
from memo_sim.contract.knobs import ARGUMENTS, OF_A_QUESTION
from memo_sim.contract.longest import Longest
from memo_sim.contract.memory_report import MemoryReport
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Plan
from memo_sim.contract.result import Result
from memo_sim.contract.trace import Trace
from tests.refusals import check_fields

TINY: dict[str, Any] = {"cluster": "a800-1x2", "seq_len": "1k", "system": "full-recompute", "tp": 2}
NOTHING_FITS: dict[str, Any] = {**TINY, "device_memory_gib": 0.5}
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def answer() -> memo.WhatIfResult:
    return memo.what_if("gpt-tiny", **TINY)


def test_every_public_name_is_there_and_no_other() -> None:
    assert sorted(memo.__all__) == memo.__all__
    assert {name: getattr(memo, name) for name in memo.__all__}
    assert set(memo.__all__) - set(api.__all__) == {"__version__", *memo._ERRORS}
    assert set(api.__all__) <= set(memo.__all__) <= set(dir(memo))
    with pytest.raises(AttributeError, match="what_is"):
        memo.what_is  # type: ignore[attr-defined]  # noqa: B018


def test_the_typed_knobs_are_those_that_are_declared() -> None:
    write = (
        "python -c \"from memo_sim.answers.named_knobs import named_knobs; print(named_knobs(), end='')\""
        " > memo_sim/contract/named_knobs.py"
    )
    assert Path(module.__file__).read_text() == named_knobs(), f"write the module again: {write}"
    assert memo.Knobs.__annotations__.keys() == ARGUMENTS.keys()
    assert not memo.Knobs.__annotations__.keys() & set(OF_A_QUESTION)


def test_an_answer_is_the_document_of_the_command(answer: memo.WhatIfResult) -> None:
    options = ["what-if", "gpt-tiny", "--cluster", "a800-1x2", "--seq-len", "1k", "--system", "full-recompute"]
    printed = CliRunner().invoke(cli, [*options, "--tp", "2", "--json"]).stdout
    assert codec.decode(printed.encode(), Result, where="stdout") == answer.document
    assert json.loads(answer.to_json()) == json.loads(printed)
    text = CliRunner().invoke(cli, [*options, "--tp", "2", "--why"]).stdout
    assert text == f"{answer}\n"


def test_rows_have_memory_by_class_and_seconds_that_add_up(answer: memo.WhatIfResult) -> None:
    rows = answer.table()
    assert [row["rank"] for row in rows] == list(range(1, len(answer.plans) + 1))
    assert len({tuple(row) for row in rows}) == 1
    best = rows[0]

    def summed(pattern: str) -> float:
        return sum(float(value or 0) for name, value in best.items() if re.fullmatch(pattern, name))

    assert answer.best is not None
    assert answer.summary is not None
    assert answer.summary.fits
    assert (best["model"], best["tp"], best["seq_tokens"]) == ("gpt-tiny", 2, 1024)
    assert summed("memory_.*_bytes") == sum(answer.best.peak_by_class.values()) <= answer.best.peak_device_bytes
    assert summed("busy_compute_s") + summed("wait_.*_s") == pytest.approx(answer.best.step_s)
    kinds = answer.table("kinds")
    for lane, busy_s in answer.best.lanes.items():
        mine = [float(row["seconds"] or 0) for row in kinds if row["lane"] == lane]
        assert sum(mine) == pytest.approx(busy_s)
        assert mine == sorted(mine, reverse=True)
    with pytest.raises(memo.UsageError) as refused:
        answer.table("lanes")  # type: ignore[arg-type]
    assert refused.value.wanted == "plans, front, kinds"


def test_rows_of_plans_that_do_not_fit_have_no_seconds() -> None:
    both = memo.what_if("gpt-tiny", **{**TINY, "system": "any", "device_memory_gib": 1.72, "seq_len": "16k"})
    rows = {row["status"]: row for row in both.table()}
    assert {"ok", "gpu_oom"} <= rows.keys()
    assert rows["gpu_oom"]["busy_compute_s"] is rows["gpu_oom"]["step_s"] is None
    assert rows["ok"]["memory_skeletal_bytes"]


def test_a_plan_is_saved_read_and_simulated_again(answer: memo.WhatIfResult, tmp_path: Path) -> None:
    answer.save(tmp_path / "plan.json")
    answer.save_timeline(tmp_path / "timeline.json")
    assert answer.best is not None
    plan = memo.load_plan(tmp_path / "plan.json")
    assert plan.decisions == answer.plan.decisions
    assert plan.provenance.command.startswith("memo_sim.what_if(model='gpt-tiny', cluster='a800-1x2', seq_len='1k'")
    assert codec.read(tmp_path / "plan.placement.json", Placement) == answer.placement
    assert [codec.read(tmp_path / "plan.trace.json", Trace)] == answer.traces
    for given in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        again = memo.simulate(given)  # on the cluster that the plan names
        assert again.best is not None
        assert (again.best.step_s, again.document.cluster) == (answer.best.step_s, "a800-1x2")
    made = memo.plan_memory(tmp_path / "plan.json")
    assert made.placement.arena_bytes == made.document.peak_bytes
    assert sum(int(row["size_bytes"] or 0) for row in made.table()) == sum(made.placement.size_bytes)
    made.save(tmp_path / "placement.csv")
    assert (tmp_path / "placement.csv").read_text().startswith("id,lower,upper,size,class,offset\n")
    assert codec.decode(made.to_json().encode(), MemoryReport, where="") == made.document


def test_pictures_are_drawn_with_and_without_a_file(answer: memo.WhatIfResult, tmp_path: Path) -> None:
    picture = answer.plot(tmp_path / "step.svg")
    assert picture.svg == (tmp_path / "step.svg").read_text() == picture._repr_svg_()
    assert "<svg" in picture.svg
    with pytest.raises(memo.UsageError):
        answer.plot(tmp_path / "step.txt")


def test_a_missing_package_is_said(answer: memo.WhatIfResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(memo.CannotRun) as refused:
        answer.plot().svg  # noqa: B018
    check_fields(refused.value, memo.CannotRun, got="matplotlib", hint="pip install '.[sim]'")
    without = (
        "import sys; sys.modules['simpy'] = None; import memo_sim as memo",
        "try: memo.what_if",
        "except memo.CannotRun as error: print(error.got)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(without)], capture_output=True, text=True, check=True)
    assert done.stdout == "simpy\n"


def test_the_longest_sequence_brings_the_answer_there() -> None:
    found = memo.longest("gpt-tiny", cluster="a800-1x2", step="8k", system="full-recompute", tp=2)
    assert found.seq_tokens == max(int(row["seq_tokens"] or 0) for row in found.table() if row["fits"])
    assert found.at_longest is not None
    assert found.at_longest.document.seq_tokens == found.seq_tokens
    assert found.at_longest.plan.provenance.command.startswith("memo_sim.longest(model='gpt-tiny', cluster='a800-1x2'")
    assert codec.decode(found.to_json().encode(), Longest, where="") == found.document
    assert f"{found.seq_tokens // 1024}k tokens" in repr(found)
    assert "fits" in found._repr_html_()
    nothing = memo.longest("gpt-tiny", cluster="a800-1x2", step="4k", max_step_s=1e-9)
    assert (nothing.seq_tokens, nothing.best, nothing.at_longest) == (0, None, None)
    with pytest.raises(memo.Infeasible):
        nothing.save("never.json")


def test_that_nothing_fits_is_a_result() -> None:
    for found in (memo.what_if("gpt-tiny", **NOTHING_FITS), memo.what_if("gpt-tiny", **{**TINY, "seq_len": "64k"})):
        assert found.best is None
        assert found.why
        assert (found.refused.what if found.refused else "no plan fits") in repr(found)
        assert escape(found.why[0]) in found._repr_html_()
        for act in (found.save, found.plot, found.save_timeline):
            with pytest.raises(memo.Infeasible):
                act("never.json")
        with pytest.raises(memo.Infeasible):
            found.table("kinds")
    assert found.refused is not None
    assert found.table() == []


WRONG_NAMES = [
    ({"tpp": 2}, "'tpp'", "did you mean 'tp'?"),
    ({"loss_chunk_tokens": "1k"}, "'loss_chunk_tokens'", "did you mean 'loss_chunk'?"),
    ({"seq_length": "1k"}, "'seq_length'", "did you mean 'seq_len'?"),
]


@pytest.mark.parametrize(("named", "got", "hint"), WRONG_NAMES)
def test_a_wrong_name_is_refused_with_the_nearest(named: dict[str, Any], got: str, hint: str) -> None:
    for ask in (memo.what_if, memo.longest) if "seq_length" not in named else (memo.what_if,):
        arguments = {**TINY, **named} if ask is memo.what_if else {"cluster": "a800-1x2", **named}
        with pytest.raises(memo.UsageError) as refused:
            ask("gpt-tiny", **arguments)
        check_fields(refused.value, memo.UsageError, got=got, hint=hint)
    with pytest.raises(memo.UsageError) as refused:
        question_of({"model": "gpt-tiny", **TINY, **named})
    assert refused.value.hint == hint


def test_a_missing_name_is_refused_as_a_wrong_one_is() -> None:
    with pytest.raises(memo.UsageError, match="no seq_len"):
        memo.what_if("gpt-tiny", cluster="a800-1x2")  # type: ignore[call-overload]
    with pytest.raises(memo.UsageError, match="'seq_len'"):
        memo.gpus("gpt-tiny")  # type: ignore[call-arg]
    with pytest.raises(memo.UsageError) as refused:
        question_of({"model": "gpt-tiny", "cluster": "a800-1x2"})
    assert refused.value.got == "no seq_len"


WRONG_VALUES = [
    *[("tp", "2"), ("tp", 0), ("tp", 2.0), ("tp", True), ("zero", 4), ("alpha", 1.5), ("alpha", float("nan"))],
    *[("recompute", "nothing"), ("uneven_heads", 1), ("rounding_buffers", "yes"), ("mlp_chunk", -1)],
    *[("loss_chunk", 1.5), ("subsequences", "many"), ("subsequences", 0), ("subsequences", "9" * 5000)],
    *[("pp_layers", [1, 0]), ("pp_layers", 3.5), ("recompute_layers", "some"), ("micro_batch", 10**400)],
    *[("device_memory_gib", 0), ("host_memory_gib", "2"), ("power_w", float("inf")), ("seq_len", "long")],
    *[("cluster", 8), ("system", 3), ("model", 3), ("seq_len", 0)],
]


@pytest.mark.parametrize(("name", "value"), WRONG_VALUES, ids=lambda value: str(value)[:20])
def test_a_wrong_value_is_refused(name: str, value: object) -> None:
    with pytest.raises(memo.UsageError):
        question_of({"model": "gpt-tiny", **TINY, name: value})


WRONG_TYPES = [
    (memo.simulate, {"plan": 3}, "Plan or text or a path"),
    (memo.plan_memory, {"path": "plan.json", "solver": "gredy"}, "portfolio, bilevel-mip, mip, greedy, cp-sat"),
    (memo.plan_memory, {"path": "plan.json", "time_limit": -1}, "a number from"),
    (memo.longest, {"model": "gpt-tiny", "cluster": "a800-1x2", "max_step_s": "long"}, "a number or None"),
    (memo.longest, {"model": "gpt-tiny", "cluster": "a800-1x2", "max_step_s": 0}, "a number from"),
    (memo.longest, {"model": "gpt-tiny", "cluster": "a800-1x2", "step": "long"}, "a whole number"),
    (memo.what_if, {"model": "gpt-tiny", **TINY, "top": "3"}, "a whole number"),
    (memo.what_if, {"model": "gpt-tiny", **TINY, "top": 0}, "from 1"),
    (memo.what_if, {"model": "gpt-tiny", **TINY, "pareto": "yes"}, "True or False"),
    (memo.what_if, {"model": "gpt-tiny", **TINY, "price_per_gpu_hour": -1}, "a number from"),
    (memo.longest, {"model": "gpt-tiny", "cluster": "a800-1x2", "price_per_gpu_hour": -1}, "a number from"),
    (memo.sweep, {"questions": 3}, "mappings"),
    (memo.sweep, {"questions": [3]}, "a mapping"),
    (memo.sweep, {"questions": [], "executor": 3}, "Executor or None"),
]


@pytest.mark.parametrize(("function", "named", "wanted"), WRONG_TYPES)
def test_a_value_of_another_type_is_refused(function: Any, named: dict[str, Any], wanted: str) -> None:
    with pytest.raises(memo.UsageError) as refused:
        function(**named)
    check_fields(refused.value, memo.UsageError, wanted=wanted)


def test_a_name_that_is_no_text_is_refused() -> None:
    wrong: Any = {3: 4}
    with pytest.raises(memo.UsageError) as refused:
        memo.sweep([wrong])
    check_fields(refused.value, memo.UsageError, got="3", where="question 1", hint="docs/knobs.md")


def test_values_are_those_of_the_command_line() -> None:
    same = [
        ("loss_chunk", "4k", 4096),
        ("mlp_chunk", 0, 0),
        ("subsequences", "32", 32),
        ("subsequences", "auto", "auto"),
        ("pp_layers", "7,8,8,7", (7, 8, 8, 7)),
        ("pp_layers", [7, 8, 8, 7], (7, 8, 8, 7)),
        ("recompute_layers", "every-2", "every-2"),
        ("tp", None, None),
        ("states", None, "fp32"),
        ("alpha", 1, 1.0),
    ]
    assert [checked(ARGUMENTS[name], given) for name, given, _ in same] == [wanted for _, _, wanted in same]
    named = question_of({"model": Path("gpt-tiny"), **TINY})
    assert named == question_of({"model": load_model("gpt-tiny"), **TINY, "seq_len": 1024, "states": "fp32"})
    powered = question_of({"model": "gpt-tiny", **TINY, "cluster": "h100-1x8", "power_w": 500})
    assert powered.hardware != question_of({"model": "gpt-tiny", **TINY, "cluster": "h100-1x8"}).hardware


def test_a_plan_without_a_cluster_needs_one(answer: memo.WhatIfResult) -> None:
    plan = codec.decode(codec.encode(answer.plan), Plan, where="")
    nameless = type(plan)(decisions=plan.decisions, program_sha256=plan.program_sha256)
    with pytest.raises(memo.UsageError, match="which cluster"):
        memo.simulate(nameless)
    larger = memo.simulate(nameless, cluster="a800-1x1")
    assert (larger.best, larger.refused and larger.refused.what) == (None, "the layout is larger than the cluster")
    assert question_about(plan, {"cluster": "a800-1x2"}).seq_tokens == 1024


def test_a_price_is_in_the_summary(answer: memo.WhatIfResult) -> None:
    for found in (
        memo.what_if("gpt-tiny", **TINY, price_per_gpu_hour=2),
        memo.simulate(answer.plan, price_per_gpu_hour=2),
    ):
        assert found.summary is not None
        assert found.summary.price_per_device_hour == 2
        assert found.summary.price_per_step == pytest.approx(2 * 2 * (found.summary.step_s or 0) / 3600)


def test_answers_and_files_are_compared(answer: memo.WhatIfResult, tmp_path: Path) -> None:
    other = memo.what_if("gpt-tiny", **{**TINY, "system": "any", "device_memory_gib": 40})
    answer.save(tmp_path / "plan.json")
    found = memo.compare(answer, other, tmp_path / "plan.json")
    assert answer.best is not None
    assert other.best is not None
    assert [side.step_s for side in found.document.sides[:2]] == [answer.best.step_s, other.best.step_s]
    assert found.document.sides[1].source == "as simulated on a800-1x2"
    rows = found.table()
    assert sum(float(row["B_s"] or 0) for row in rows) == pytest.approx(other.best.step_s)
    more = (other.best.step_s or 0) - (answer.best.step_s or 0)
    assert sum(float(row["B_minus_A_s"] or 0) for row in rows) == pytest.approx(more)
    assert {row["C_minus_A_s"] for row in rows} == {0.0}
    assert found.verdict[0].split()[0] in str(found)
    assert "<table>" in found._repr_html_()
    found.save(tmp_path / "difference.json")
    assert codec.read(tmp_path / "difference.json", Difference) == found.document
    with pytest.raises(memo.UsageError, match="nothing to compare"):
        memo.compare(answer)
    elsewhere = memo.compare(answer, other, cluster="a100-1x2")
    assert {side.cluster for side in elsewhere.document.sides} == {"a100-1x2"}


def test_a_cluster_comes_from_a_name_or_a_data_sheet() -> None:
    sheet = {**TINY, "cluster": None, "from_datasheet": "tflops=165,memory=24,pcie=4x16", "tp": None}
    found = memo.what_if("gpt-tiny", **sheet, safety_gib=1)
    assert found.best is not None
    for wrong in ({"cluster": None}, {"from_datasheet": "tflops=165,memory=24,pcie=4x16"}, {"safety_gib": -1}):
        with pytest.raises(memo.UsageError):
            memo.what_if("gpt-tiny", **{**TINY, **wrong})


def test_names_from_files_are_escaped(answer: memo.WhatIfResult) -> None:
    hostile = "<img src=x onerror=alert(1)>\x1b[2J\u202e"
    question = replace(
        answer.question,
        model=type(answer.question.model)(
            **{
                **{name: getattr(answer.question.model, name) for name in answer.question.model.__struct_fields__},
                "name": hostile,
            }
        ),
    )
    found = api.answered(question)
    assert "<img" not in found._repr_html_()
    assert "&lt;img" in found._repr_html_()
    for shown in (str(found), repr(found), found._repr_html_()):
        assert "\x1b" not in shown
        assert "\u202e" not in shown


@pytest.mark.slow
def test_mypy_checks_a_users_code() -> None:
    from mypy import api as mypy

    out, _, code = mypy.run(["--strict", "--config-file", str(ROOT / "pyproject.toml"), "tests/sim/api/user_code.py"])
    assert code == 0, out
