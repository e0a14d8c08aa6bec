"""What the two commands print and write: a closed pipe, a full disk, files that are named twice or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from memo_exec.cli import cli as memo_exec
from memo_sim.cli import cli as memo_sim
from memo_sim.contract.catalog import DATA, HARDWARE_PROFILES
from memo_sim.contract.errors import UsageError
from tests.exec_cpu.plans import write_plan
from tests.refusals import check_fields

ROOT = Path(__file__).parents[2]


def printed_to(descriptor: int, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose standard output is kept back until it flushes, as Python does unasked."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, stdout=descriptor, stderr=subprocess.PIPE, text=True, env=env, check=False)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("memo_sim", ["list", "models"]), ("memo_sim", ["what-if", "--help"]), ("memo_exec", ["run", "--help"])],
)
def test_who_reads_no_more_ends_the_command_quietly(module: str, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = printed_to(writer, module, *arguments)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
def test_a_message_without_room_does_not_change_the_exit_code() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "memo_sim", "schema", "nothing"]
        done = subprocess.run(command, stderr=full, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
def test_an_output_without_room_is_said() -> None:
    with Path("/dev/full").open("w") as full:
        done = printed_to(full.fileno(), "memo_sim", "list", "models")
    assert done.returncode == 2
    assert "\n  where: standard output" in done.stderr


@pytest.mark.parametrize(
    ("command", "line", "named"),
    [
        (memo_sim, ["what-if", "llama-tiny", "--cluster", "a800-1x1", "--seq-len", "4k", "--plot="], "'--plot'"),
        (memo_sim, ["datasheet", "tflops=165,memory=24,pcie=4x16", "-o", ""], "'-o/--output'"),
        (memo_sim, ["compare", "plan.json", ""], "'A B ...'"),
        (memo_exec, ["run", ""], "'PLAN'"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else None,
)
def test_an_empty_value_is_refused(command: click.Group, line: list[str], named: str) -> None:
    """It is often a variable of the shell that is not set: the file that it should name would not be written."""
    done = CliRunner().invoke(command, line)
    assert done.exit_code == 2
    assert f"Error: Invalid value for {named}: the value is empty." in done.output


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a plan, its placement, and what else a command may be given to read."""
    write_plan(tmp_path / "tiny.json")
    for name in ("tiny.trace.json", "tiny.trace.stage1.json", "measured.json", "words.txt", "cases.csv"):
        (tmp_path / name).write_text("what was there")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("what was there")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "run tiny.json --measured tiny.json",
        "run tiny.json --trace ./tiny.json",
        "run tiny.json --measured tiny.placement.json",
        "run tiny.json --measured tiny.trace.json",
        "run tiny.json --trace tiny.trace.stage1.json",
        "run tiny.json --data words.txt --measured words.txt",
        "run tiny.json --weights weights --trace weights/config.json",
        "profile tiny.json -o tiny.json",
        "profile tiny.json --trace tiny.placement.json",
        "profile tiny.json --requests -o tiny.json",
        "compare tiny.json measured.json --trace tiny.json",
        "compare tiny.json measured.json --report measured.json",
        "compare tiny.json measured.json --trace measured.json",
        "compare tiny.json measured.json --trace tiny.trace.json",
    ],
)
def test_memo_exec_does_not_write_over_what_it_reads(folder: Path, line: str) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    found = CliRunner().invoke(memo_exec, line.split()).exception
    assert isinstance(found, UsageError)
    assert found.where is not None
    assert folder / found.where in before
    assert "another file" in str(found.hint)
    assert before == {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}


@pytest.mark.parametrize(
    "line",
    ["run tiny.json --trace a.json --measured ./a.json", "profile tiny.json --trace tiny.measured.json"],
)
def test_memo_exec_does_not_write_two_documents_into_one_file(folder: Path, line: str) -> None:
    found = CliRunner().invoke(memo_exec, line.split()).exception
    assert isinstance(found, UsageError)
    assert found.where in {"./a.json", "a.json", "tiny.measured.json"}
    assert found.got is None


@pytest.mark.parametrize("cases", ["cases.csv", str(DATA / "cases" / "memo-table5.csv"), "memo-table5"])
def test_a_report_does_not_replace_the_cases(folder: Path, cases: str) -> None:
    report = cases if cases.endswith(".csv") else str(DATA / "cases" / f"{cases}.csv")
    found = CliRunner().invoke(memo_sim, ["validate", cases, "--report", report]).exception
    check_fields(found, UsageError, where=report, hint="another file")


def test_a_plan_does_not_replace_the_profile_that_a_cluster_file_names(folder: Path) -> None:
    (folder / "here.json").write_bytes((HARDWARE_PROFILES / "a800-sxm4-80gb.json").read_bytes())
    (folder / "one.toml").write_text(
        'schema = "memo.cluster/1"\nname = "one"\nhardware = "here.json"\nnodes = 1\ndevices_per_node = 8\n'
    )
    asked = "what-if gpt-7b --cluster one.toml --seq-len 64k -o here.json"
    found = CliRunner().invoke(memo_sim, asked.split()).exception
    check_fields(found, UsageError, where="here.json", hint="another file")
