"""Who names no system gets every layout, wherever a system can be named."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import click
import msgspec
import pytest

import memo_sim as memo
from memo_sim.answers.named_values import question_of
from memo_sim.cli import cli
from memo_sim.contract.systems import DEFAULT_SYSTEM, OPEN
from memo_sim.planning.layouts import layouts
from memo_sim.planning.presets import SYSTEMS
from memo_sim.planning.question import Question
from tests.cli.commands import memo_sim

ASKED = {"model": "llama-tiny", "cluster": "a800-1x4", "seq_len": "16k", "global_batch": 4}
EVERY_ROW = ("validate", "fit")
"""Commands whose --system chooses rows of published cases; without it they take all."""


def test_the_default_has_every_way_to_divide_work_that_other_open_systems_have() -> None:
    assert DEFAULT_SYSTEM == "every-layout" == OPEN[-1]
    for name in OPEN:
        assert set(SYSTEMS[name].degrees) <= set(SYSTEMS[DEFAULT_SYSTEM].degrees)
        assert SYSTEMS[name].policies == SYSTEMS[DEFAULT_SYSTEM].policies
        narrow = question_of({**ASKED, "system": name})
        assert set(layouts(narrow)) <= set(layouts(question_of(ASKED)))


def test_a_question_without_a_system_is_of_the_default() -> None:
    assert question_of(ASKED).system == DEFAULT_SYSTEM
    assert inspect.signature(Question).parameters["system"].default == DEFAULT_SYSTEM


@pytest.mark.parametrize("function", [memo.what_if, memo.longest, memo.gpus, memo.oom], ids=lambda f: f.__name__)
def test_every_python_function_that_searches_has_the_default(function: object) -> None:
    assert inspect.signature(function).parameters["system"].default == DEFAULT_SYSTEM  # type: ignore[arg-type]


def test_every_command_that_searches_has_the_default() -> None:
    found = {
        name: option.default
        for name, command in cli.commands.items()
        for option in command.params
        if isinstance(option, click.Option) and "--system" in option.opts and name not in EVERY_ROW
    }
    assert {"what-if", "longest", "gpus", "oom"} <= set(found)
    assert {name: default for name, default in found.items() if default not in (DEFAULT_SYSTEM, None)} == {}


def test_a_sweep_without_a_system_asks_the_default(tmp_path: Path) -> None:
    options = ["--cluster", "a800-1x2", "--seq-len", "1k", "--global-batch", "2", "--recompute", "full"]
    done = memo_sim("sweep", "gpt-tiny", *options, "-o", "s.jsonl", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["system"] == DEFAULT_SYSTEM


def test_the_default_answer_is_no_slower_than_a_narrower_search_and_does_not_name_its_system(tmp_path: Path) -> None:
    options = ["--cluster", "a800-1x2", "--seq-len", "8k", "--global-batch", "2", "--json"]
    done = memo_sim("what-if", "gpt-tiny", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    asked = {"cluster": "a800-1x2", "seq_len": "8k", "global_batch": 2}
    default, narrower = memo.what_if("gpt-tiny", **asked), memo.what_if("gpt-tiny", **asked, system="any")
    assert printed["system"] == default.document.system == DEFAULT_SYSTEM
    assert printed["best"] == json.loads(msgspec.json.encode(default.document.best))
    assert default.document.best.step_s <= narrower.document.best.step_s
    assert str(default).startswith("gpt-tiny on a800-1x2, 8k tokens\n")
    assert str(narrower).startswith("gpt-tiny on a800-1x2, 8k tokens, system any\n")
