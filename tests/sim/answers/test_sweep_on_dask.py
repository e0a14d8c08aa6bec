"""A sweep on dask: a real scheduler and two workers on loopback, one of which is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import memo_sim as memo
from memo_sim.answers.sweep import answer_to, asked_by, dask_executor, sweep
from memo_sim.answers.sweep_file import read_lines
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.sweep import SweepLine

pytestmark = pytest.mark.dask
ROOT = Path(__file__).parents[3]
QUESTIONS = memo.grid(model="gpt-tiny", cluster="a800-1x2", system="full-recompute", tp=2, seq_len=["1k", "2k", "4k"])


@pytest.fixture(scope="module", autouse=True)
def distributed() -> None:
    pytest.importorskip("distributed")


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A scheduler and two workers; yields the scheduler's address."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DASK_DISTRIBUTED__WORKER__DAEMON": "False"}
    begin = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    begin += ["--no-dashboard", "--scheduler-file", str(folder / "scheduler.json")]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", str(folder / "scheduler.json")]
    worker += ["--nthreads", "1", "--host", "127.0.0.1", "--no-dashboard", "--local-directory", str(folder)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [subprocess.Popen(command, env=environment, **quiet) for command in (begin, worker, worker)]  # type: ignore[call-overload]
    try:
        until = time.monotonic() + 60
        while not (folder / "scheduler.json").exists() and time.monotonic() < until:
            time.sleep(0.1)
        import json

        address = json.loads((folder / "scheduler.json").read_text())["address"]
        from distributed import Client

        with Client(address, timeout=30) as client:
            client.wait_for_workers(2, timeout=60)
        yield address
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def kills_its_worker_first(asked: object) -> SweepLine:
    """Answer, but for the first time that a question is asked anywhere: then the worker's process is killed."""
    from memo_sim.answers.sweep import Asked

    assert isinstance(asked, Asked)
    note = Path(os.environ["MEMO_TEST_NOTES"])
    try:
        note.touch(exist_ok=False)
    except FileExistsError:
        return answer_to(asked)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_two_workers_answer_and_one_that_dies_costs_a_second_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMO_TEST_NOTES", str(tmp_path / "note"))
    wanted = [asked_by(each).key for each in QUESTIONS]
    with cluster(tmp_path) as address:
        with dask_executor(address) as executor:
            found = sweep(QUESTIONS, tmp_path / "s.jsonl", executor=executor)
        with dask_executor(address) as executor:
            again = sweep(QUESTIONS, executor=executor, unit=kills_its_worker_first)
        from click.testing import CliRunner

        from memo_sim.cli import cli

        arguments = ["sweep", "gpt-tiny", "--cluster", "a800-1x2", "--seq-len", "8k", "--dask", address]
        done = CliRunner().invoke(cli, [*arguments, "-o", str(tmp_path / "c.jsonl")])
    assert [line.key for line in found] == [line.key for line in again] == wanted
    assert [line.status for line in [*found, *again]] == ["fits"] * 6
    assert (
        [line.best for line in again]
        == [line.best for line in found]
        == [answer_to(asked_by(q)).best for q in QUESTIONS]
    )
    assert (tmp_path / "note").exists()
    assert len(read_lines(tmp_path / "s.jsonl")) == 3
    assert done.exit_code == 0, done.output
    assert [line.seq_tokens for line in read_lines(tmp_path / "c.jsonl")] == [8192]


def test_no_scheduler_is_said() -> None:
    with pytest.raises(CannotRun, match="no dask scheduler answers"), dask_executor("tcp://127.0.0.1:9"):
        pass
