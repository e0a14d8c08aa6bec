"""A slice of the campaign at every run, and the whole of it when slow tests run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.campaign.inputs import Inputs, Totals
from tests.campaign.judge import judge
from tests.campaign.options import Options

SLICE = 250


def test_a_slice_of_changed_files_and_options_is_answered_or_refused(tmp_path: Path) -> None:
    inputs, totals = Inputs(tmp_path, seed=8, quick=True), Totals()
    for number in range(SLICE):
        totals.add(inputs.play(number))
    assert not totals.findings, totals.findings
    assert sum(totals.codes.values()) == SLICE


def test_every_option_of_every_command_has_a_legal_value(tmp_path: Path) -> None:
    """A new command, argument or option is drawn by itself; an argument of a new kind is named here."""
    options = Options(tmp_path / "options", [])
    for _, _, command in options.commands:
        for parameter in command.params:
            if isinstance(parameter, click.Argument):
                assert options.legal(parameter)


def test_the_judge_sees_what_it_is_there_for(tmp_path: Path) -> None:
    """A code that was not to come, a file that the command may not write, a process, and a place that is missing."""
    (tmp_path / "b.csv").write_text("id,lower,upper,size\na,0,3,700\n")
    ask = ("memo-sim", "plan-memory", "b.csv")
    assert judge(ask, tmp_path, codes=frozenset({0})).complaints == []
    assert "exit code 0" in judge(ask, tmp_path, codes=frozenset({3})).complaints[0]
    assert "made: p.json" in judge((*ask, "-o", "p.json"), tmp_path).complaints[0]
    outside = judge((*ask, "-o", str(tmp_path.parent / "p.json")), tmp_path).complaints
    assert any("outside of its folder" in each for each in outside)
    (tmp_path / "b.csv").write_text("id\n")
    assert "does not name the file" in judge(ask, tmp_path, places=("another",)).complaints[0]
    assert judge(ask, tmp_path, places=("b.csv",)).complaints == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_inputs_are_answered_or_refused() -> None:
    """In a process of its own: a fork of this one cannot use the fork server that another test has started."""
    command = [sys.executable, "-m", "tests.campaign", "--seed", "2", "--inputs", "10000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "\ninputs 0 to 9999 of seed 2" in done.stdout
