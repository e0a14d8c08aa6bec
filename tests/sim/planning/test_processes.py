"""Processes beside this one: what they send back, and what is left when they fail, die or are no longer needed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memo_sim.contract.errors import UsageError
from memo_sim.planning import processes as beside
from memo_sim.planning.processes import Kind, Message, Team, command_processes, current_team, processes
from tests.refusals import refused

ROOT = Path(__file__).parents[3]


def counts_up(here: dict[str, Any], most: int) -> Iterator[int]:
    here["calls"] = here.get("calls", 0) + 1
    yield here["calls"]
    yield from range(most)


def fails(here: dict[str, Any]) -> Iterator[int]:
    yield 1
    raise ValueError(here)


def dies(here: dict[str, Any], when: Path) -> Iterator[int]:
    yield 1
    while not when.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps(here: dict[str, Any]) -> Iterator[int]:
    yield 1
    time.sleep(600)


def says_much(here: dict[str, Any], heard: bytes) -> Iterator[bytes]:
    yield heard
    yield heard


def is_forked(here: dict[str, Any]) -> Iterator[object]:
    yield here.get("kept"), current_team() is None, signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def received(team: Team, *, until: int) -> list[Message]:
    """Return the messages up to the one that ends a task."""
    found: list[Message] = []
    while not any(one.name == until and one.kind is not Kind.PART for one in found):
        found.extend(team.messages(block=True))
    return found


def test_tasks_are_done_in_their_order_and_one_that_fails_or_dies_is_lost(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    team, now = Team(1), tmp_path / "now"
    (helper,) = team.helpers(__name__, {})
    try:
        assert helper.give(0, counts_up, 2)
        assert helper.give(1, fails)
        assert helper.give(2, counts_up, 0)
        assert received(team, until=2) == [
            *(Message(0, Kind.PART, part) for part in (1, 0, 1)),
            Message(0, Kind.ENDED),
            Message(1, Kind.PART, 1),
            Message(1, Kind.LOST),
            Message(2, Kind.PART, 2),
            Message(2, Kind.ENDED),
        ]
        assert helper.give(3, dies, now)
        assert helper.give(4, counts_up, 0)
        now.touch()  # a task that is given to a dead process is never answered
        with caplog.at_level(logging.WARNING):
            found = received(team, until=4)
        assert found == [Message(3, Kind.PART, 1), Message(3, Kind.LOST), Message(4, Kind.ENDED)]
        assert caplog.messages == [
            "a process of the search ended (signal 9); the others go on, and the answer is the same"
        ]
        assert team.helpers(__name__, {}) == []
        assert not helper.give(5, counts_up, 0)
        assert list(team.messages(block=False)) == []
    finally:
        team.end()


@pytest.mark.timeout(60)
def test_tasks_and_parts_larger_than_a_pipe_keep_no_process_waiting() -> None:
    """This process gives tasks while the other one waits until its parts are read."""
    team, much = Team(1), bytes(2**22)
    (helper,) = team.helpers(__name__, {})
    try:
        assert helper.give(0, says_much, much)
        found = [next(team.messages(block=True))]  # the other process has begun, and sends its second part
        assert helper.give(1, says_much, much)
        assert helper.give(2, says_much, much)
        found += received(team, until=2)
    finally:
        team.end()
    expected = [[Message(name, Kind.PART, much)] * 2 + [Message(name, Kind.ENDED)] for name in range(3)]
    assert found == [message for of_task in expected for message in of_task]


def test_a_task_that_has_not_begun_can_be_taken_back_and_the_end_waits_for_none() -> None:
    team = Team(1)
    (helper,) = team.helpers(__name__, {})
    try:
        helper.give(0, counts_up, 0)
        helper.give(1, counts_up, 0)
        helper.drop(1)
        helper.give(2, sleeps)
        found = [*received(team, until=0)]
        while found[-1].name != 2:
            found.extend(team.messages(block=True))
        assert [one.name for one in found] == [0, 0, 2]
        process = helper.process.pid
    finally:
        team.end()
    assert process is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_number_of_processes_that_cannot_be() -> None:
    for jobs in (0, 65):
        with refused(UsageError, what="not a number of processes", got=str(jobs)), processes(jobs):
            pass
    with processes(1):
        assert current_team() is None
    with processes(2):  # none starts before it is needed
        team = current_team()
        assert team is not None
        assert team.others == 1
    assert current_team() is None


def seen_by_tasks(threads: int) -> list[object]:
    """Return what tasks see in two processes that are forked beside other threads, if they may be; one is killed."""
    told = threading.Event()
    waiting = [threading.Thread(target=told.wait) for _ in range(threads)]
    for one in waiting:
        one.start()
    team = Team(2, forks=True)
    try:
        helpers = team.helpers(__name__, {"kept": [threads]})
        for name, helper in enumerate(helpers):
            assert helper.give(name, is_forked)
        found: list[object] = []
        while len(found) < 2:
            found += [one.part for one in team.messages(block=True) if one.kind is Kind.PART]
        os.kill(helpers[0].process.pid or 0, signal.SIGKILL)  # the other one does not hold its connection
        assert helpers[0].connection.poll(60)
    finally:
        told.set()
        team.end()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="others are forked on Linux alone")
@pytest.mark.parametrize(("threads", "kept"), [(0, [0]), (1, None)])
def test_processes_of_a_command_are_forked_with_what_is_kept_unless_there_is_a_thread(
    threads: int, kept: list[int] | None
) -> None:
    asked = f"from {__name__} import seen_by_tasks; print(seen_by_tasks({threads}))"  # pytest's workers have threads
    done = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{[(kept, True, True)] * 2}\n", "")


def test_processes_that_nobody_has_asked_for_wait_for_much_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "usable_cpus", lambda: 1)
    with command_processes(None):
        assert current_team() is None
    monkeypatch.setattr(beside, "usable_cpus", lambda: 500)
    with command_processes(None):
        team = current_team()
        assert team is not None
        assert team.others + 1 == beside.MOST_UNASKED
        assert team.helpers(__name__, {}) == []
        team.hurry()
        assert len(team.helpers(__name__, {})) == team.others
    with command_processes(3):
        team = current_team()
        assert team is not None
        assert team.others == 2
        with processes(1):  # what a function of Python asks for unless told otherwise
            assert current_team() is team


@pytest.mark.slow
@pytest.mark.parametrize("ended", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_no_process_and_no_file(tmp_path: Path, ended: signal.Signals) -> None:
    options = "--cluster a800-8x8 --seq-len 1m --system every-layout --jobs 3 -o plan.json"
    command = ["what-if", "gpt-7b", *options.split()]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(
        [sys.executable, "-m", "memo_sim", *command], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True
    )
    while len(children := _processes_below(running.pid)) < 2:
        assert running.poll() is None
        time.sleep(0.1)
    running.send_signal(ended)
    _, said = running.communicate()
    if ended == signal.SIGINT:
        assert (running.returncode, said.strip()) == (130, "interrupted")
    end = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_script_without_a_guard_is_not_run_again(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        textwrap.dedent(
            """
            import memo_sim
            found = memo_sim.what_if("gpt-tiny", cluster="a800-1x2", seq_len="4k", jobs=2)
            print(found.best.status)
            """
        )
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def _processes_below(parent: int) -> list[int]:
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return list(map(int, found))
