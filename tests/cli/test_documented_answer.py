"""The answers that README.md and the pages of docs/ show are those that memo-sim prints today.

When an answer or its wording changes, run the command and copy what it prints into the page.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from memo_sim.cli import cli

ROOT = Path(__file__).parents[2]
FILES = {"-o", "--plot", "--trace"}
"""Options of the command in README.md that only write files."""

SLOWER = {
    "docs/questions.md: gpt-7b on a800-1x8, any": "longest gpt-7b --cluster a800-1x8 --step 128k --why",
    "docs/subsequences.md:     system           layout": "what-if gpt-7b --cluster a100-4x8-hdr4 --seq-len 512k "
    "--system sppo --tp 8 --pp 4 --subsequences 32 --top 1 --why",
    "docs/metp.md:     system ": "what-if gpt-7b --cluster a100-1x8 --seq-len 2m --system metp --top 3",
    "docs/validation.md: case  ": "validate memo-table5",
}
"""By page and how the block on it begins, the command that prints every line of that block."""


def documented(page: str, begins: str) -> str:
    """Return the one block of ``page`` that begins so."""
    pattern = rf"^```\n({re.escape(begins)}.*?)^```$"
    (block,) = re.findall(pattern, (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return str(block)


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def command_of_the_readme() -> list[str]:
    """Return the arguments of README.md's command, without the files that it writes."""
    command = re.search(r"^<!-- run -->\n```sh\n.+/memo-sim (.+)\n```$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert command is not None
    words = shlex.split(command[1])
    before = ["", *words[:-1]]
    return [word for word, option in zip(words, before, strict=True) if not {word, option} & FILES]


def test_the_documented_answer_is_todays() -> None:
    answer = printed(*command_of_the_readme())
    assert documented("docs/questions.md", "gpt-7b on a800-1x8, 1m tokens") == answer
    assert answer.startswith(documented("README.md", "gpt-7b on a800-1x8, 1m tokens"))


@pytest.mark.slow
@pytest.mark.parametrize("block", SLOWER)
def test_documented_lines_are_todays(block: str) -> None:
    page, begins = block.split(": ", 1)
    lines = set(printed(*shlex.split(SLOWER[block])).splitlines())
    assert [line for line in documented(page, begins).splitlines() if line not in lines] == []


@pytest.mark.slow
def test_the_documented_memory_plan_is_todays(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    printed(*command_of_the_readme(), "-o", str(plan))
    elapsed = re.compile(r"\s+[\d.]+ m?s\b")
    shown = documented("docs/memory.md", "memory         size")
    assert elapsed.sub("", shown) == elapsed.sub("", printed("plan-memory", str(plan)))
