"""The commands that the pages show exist, run, and print what the page says.

``python -m tests.documentation`` writes today's output into the pages.
"""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from tests.documentation.blocks import PAGES, ROOT, blocks_of, matches, shortened
from tests.documentation.session import Session

WITH_COMMANDS = [page for page in PAGES if blocks_of(page)]
NAMES = [str(page.relative_to(ROOT)) for page in WITH_COMMANDS]


def parse(words: list[str]) -> None:
    """Parse a command line of memo-sim or memo-exec without running it.

    Raises:
        click.UsageError: when a command, an option or a choice does not exist.
    """
    from memo_exec.cli import cli as memo_exec
    from memo_sim.cli import cli as memo_sim

    command: click.Command = {"memo-sim": memo_sim, "memo-exec": memo_exec}[words[0]]
    name, rest = words[0], words[1:]
    context = None
    while isinstance(command, click.Group):
        if not rest or rest[0].startswith("-"):
            return
        context = click.Context(command, info_name=name, parent=context)
        found = command.get_command(context, rest[0])
        if found is None:
            raise click.UsageError(f"no such command: {rest[0]}")
        command, name, rest = found, rest[0], rest[1:]
    if not {"--help", "-h"} & set(rest):
        command.make_context(name, list(rest), parent=context)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=NAMES)
def test_commands_and_options_exist(page: Path) -> None:
    unknown = []
    for block in blocks_of(page):
        for command in block.commands:
            for words in command.of_memo:
                try:
                    parse(words)
                except click.UsageError as error:
                    unknown.append(f"{block.name}: {' '.join(words)}: {error.format_message()}")
    assert unknown == []


def test_a_wrong_option_is_found() -> None:
    with pytest.raises(click.UsageError, match="--no-such-option"):
        parse(["memo-sim", "what-if", "gpt-7b", "--cluster", "a800-1x8", "--no-such-option"])
    with pytest.raises(click.UsageError, match="whatif"):
        parse(["memo-sim", "whatif"])


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=NAMES)
def test_what_is_not_run_has_a_reason(page: Path) -> None:
    assert [block.name for block in blocks_of(page) if block.note.startswith("not run") and not block.not_run] == []


def check(page: Path, folder: Path) -> None:
    """Run the page's commands in ``folder`` and compare what they print with what the page shows."""
    session = Session(folder)
    for block in blocks_of(page):
        if block.not_run:
            continue
        for command in block.commands:
            printed = session.run(block, command)
            if command.output is not None and block.compared:
                same = matches(command.output, printed, times=block.times_count)
                assert same, f"{block.name}: $ {command.line}\n" + "\n".join(printed)


@pytest.mark.parametrize("name", ["README.md"])
def test_the_readme_prints_what_it_says(name: str, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from memo_sim.cli import cli

    shown = [(b, c) for b in blocks_of(ROOT / name) if b.compared for c in b.commands if c.output is not None]
    assert shown
    for block, command in shown:
        ((_, *arguments),) = command.of_memo
        done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert done.exit_code == 0, block.name
        assert matches(command.output or [], done.stdout.splitlines()), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=NAMES)
def test_every_command_runs_and_prints_what_the_page_says(page: Path, tmp_path: Path) -> None:
    check(page, tmp_path)


def test_dots_stand_for_any_lines() -> None:
    assert matches(["a", "...", "d"], ["a", "b", "c", "d "])
    assert not matches(["a", "...", "d"], ["a", "b", "c"])
    assert not matches(["a"], ["a", "b"])
    assert shortened(["a", "...", "d"], ["1", "2", "3", "4"]) == ["1", "...", "4"]
