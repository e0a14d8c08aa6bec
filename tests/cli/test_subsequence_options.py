"""Subsequences on the command line: asked for, searched, refused; their plans written and priced again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from memo_exec.machine.preflight import checked_program
from memo_sim.cli import cli
from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput, MemoError
from memo_sim.contract.plan import Plan
from tests.cli import commands
from tests.cli.commands import Named, check_refused
from tests.refusals import check_fields, refused

QUESTION = ("what-if", "gpt-tiny", "--cluster", "a100-1x4", "--seq-len", "4k", "--tp", "2", "--pp", "2")
KEPT = ("--recompute", "none", "--alpha", "0")


def memo_sim(*arguments: str) -> Result:
    return CliRunner().invoke(cli, [*QUESTION, *arguments])


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        (("--subsequences", "4", *KEPT), {"subsequences": 4, "partition": "flops", "schedule": "1f1b"}),
        (("--subsequences", "3", "--partition", "length", "--recompute", "full"), {"partition": "length"}),
        (("--system", "sppo", "--subsequences", "4"), {"subsequences": 4, "sequence_parallel": True}),
        (("--system", "terapipe", "--subsequences", "4"), {"subsequences": 4, "schedule": "gpipe"}),
    ],
)
def test_a_plan_of_subsequences_is_written_and_priced_again(
    options: tuple[str, ...], layout: dict[str, object], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    done = memo_sim(*options, "--json", "-o", str(plan))
    assert done.exit_code == 0, done.output
    best = json.loads(done.stdout)["best"]
    assert layout.items() <= best["layout"].items()
    assert json.loads(plan.read_text())["decisions"]["layout"] == best["layout"]
    again = CliRunner().invoke(cli, ["what-if", "--plan", str(plan), "--cluster", "a100-1x4", "--json"])
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["best"]["step_s"] == best["step_s"]


def test_a_window_is_asked_for_and_shown_or_refused() -> None:
    swapped = ("--subsequences", "8", "--recompute", "none", "--alpha", "1", "--offload-window", "3")
    done = memo_sim(*swapped, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["best"]["offload_window"] == 3
    shown = memo_sim(*swapped, "--why", "--top", "1").stdout
    assert " 1.000 w3 " in shown
    assert "alpha 1.00, copied while the next 3 passes are computed" in shown
    for options in (("--subsequences", "8", *KEPT), ("--alpha", "1")):
        found = memo_sim(*options, "--offload-window", "3")
        assert isinstance(found.exception, MemoError)
        assert found.exception.exit_code == 4
        assert found.exception.where == "decisions.offload_window"


def test_part_of_each_subsequence_is_swapped_as_the_plan_says(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    done = memo_sim("--subsequences", "4", "--recompute", "tokenwise", "--alpha", "0.5", "--why", "-o", str(plan))
    assert done.exit_code == 0, done.output
    decisions = json.loads(plan.read_text())["decisions"]
    each = decisions["subsequence_swapped_tokens"]
    assert sum(each) == decisions["swapped_tokens"] == 2048
    assert each == [512] * 4
    assert "4 subsequences of 1792 to 512 tokens offload 512 tokens each" in done.stdout


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        ({"subsequence_swapped_tokens": [512, 512, 384, 640]}, "subsequence_swapped_tokens[2]"),
        ({"subsequence_swapped_tokens": [], "layout": {"subsequences": 1}, "swapped_tokens": 640}, "swapped_tokens"),
    ],
)
def test_a_plan_file_with_tokens_that_no_row_block_ends_at_is_a_bad_file(
    edit: dict[str, Any], told: str, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    done = memo_sim("--subsequences", "4", "--recompute", "tokenwise", "--alpha", "0.5", "-o", str(plan))
    assert done.exit_code == 0, done.output
    document = json.loads(plan.read_text())
    edit = edit | {"layout": document["decisions"]["layout"] | edit.get("layout", {})}
    plan.write_text(json.dumps(document | {"decisions": document["decisions"] | edit}))
    for command in (("what-if", "--cluster", "a100-1x4", "--plan"), ("plan-memory",)):
        found = CliRunner().invoke(cli, [*command, str(plan)]).exception
        check_fields(found, BadInput, where=f"{plan}: $.decisions.{told}", wanted="a multiple of 256")
    with refused(BadInput, where=f"{plan}: $.decisions.{told}", wanted="a multiple of 256"):
        checked_program(codec.read(plan, Plan), where=str(plan))


def test_numbers_are_searched(tmp_path: Path) -> None:
    done = memo_sim("--subsequences", "auto", *KEPT, "--json")
    assert done.exit_code == 0, done.output
    assert {row["layout"]["subsequences"] for row in json.loads(done.stdout)["plans"]} == {1, 2}


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (("--subsequences", "few"), 2, {"got": "'few'", "wanted": "from 1 to 65536, or auto"}),
        (("--subsequences", "0"), 2, {"got": "'0'", "wanted": "from 1 to 65536, or auto"}),
        (("--subsequences", "64"), 4, {"where": "layout.subsequences", "got": "64 of 4096 tokens", "wanted": "16"}),
        (("--subsequences", "4", "--partition", "thirds"), 2, "--partition"),
        (("--partition", "length"), 2, {"got": "partition length", "hint": "--subsequences"}),
        (
            ("--subsequences", "4", "--multiplexed", "--schedule", "zero-bubble"),
            *(4, {"where": "layout.schedule", "got": "zero-bubble", "wanted": "gpipe or 1f1b"}),
        ),
    ],
)
def test_what_subsequences_cannot_be_is_refused(options: tuple[str, ...], code: int, named: Named) -> None:
    check_refused(commands.memo_sim(*QUESTION, *options), code, named)
