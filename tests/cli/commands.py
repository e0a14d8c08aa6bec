"""Run ``memo-sim`` and ``memo-exec``: in this process by click's test runner, or in a process of their own."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import click
from click.testing import CliRunner

from memo_sim.contract.errors import MemoError
from memo_sim.planning import processes
from tests.refusals import Expected, check_fields

ROOT = Path(__file__).parents[2]
Argument = str | Path | int


@dataclass(frozen=True)
class Done:
    """What a command left: its exit code, what it printed, and the error it ended with."""

    returncode: int
    stdout: str
    stderr: str
    error: BaseException | None = None


def memo_sim(*arguments: Argument, cwd: Path | None = None) -> Done:
    """Run ``memo-sim`` in this process."""
    from memo_sim.cli import main

    return _invoke("memo-sim", main, arguments, cwd)


def memo_exec(*arguments: Argument, cwd: Path | None = None) -> Done:
    """Run ``memo-exec`` in this process: torch is loaded once for all tests."""
    from memo_exec.cli import main

    return _invoke("memo-exec", main, arguments, cwd)


def shell(module: str, *arguments: Argument, cwd: Path | None = None) -> Done:
    """Run ``python -m module`` the way a shell does."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def _invoke(name: str, main: Callable[[], None], arguments: tuple[Argument, ...], cwd: Path | None) -> Done:
    """Run the whole ``main``, so that errors become messages and exit codes as they do in a shell.

    Unless it is asked to, it forks no processes: this one has torch's threads.
    """
    thresholds = gc.get_threshold()
    given = mock.patch.object(sys, "argv", [name, *map(str, arguments)])
    alone = mock.patch.object(processes, "usable_cpus", return_value=1)
    try:
        with contextlib.chdir(cwd or Path.cwd()), given, alone:
            found = CliRunner().invoke(click.Command(name, callback=main), [])
    finally:
        gc.set_threshold(*thresholds)
    left = found.exception
    assert left is None or isinstance(left, SystemExit), repr(left)
    return Done(found.exit_code, found.stdout, found.stderr, None if left is None else left.__context__)


Named = str | dict[str, Expected]
"""What a refusal names: the option or argument that click refused, or an error's fields."""


def check_refused(done: Done, code: int, named: Named) -> None:
    """Assert the exit code, an empty standard output, and one message that names what is wrong."""
    assert (done.returncode, done.stdout) == (code, ""), done
    assert "Traceback" not in done.stderr
    if isinstance(named, str):
        assert isinstance(done.error, click.BadParameter), done
        assert done.error.param is not None
        assert named in done.error.param.opts
        assert done.error.format_message() in done.stderr
    else:
        check_fields(done.error, MemoError, **named)
        assert str(done.error) in done.stderr
