"""Processes that work beside this one: it gives them tasks, and they send back results, part by part.

Nothing depends on them. If a process fails, dies or is too late, the caller does the task itself.
So errors are raised where they are without other processes, and a process that is killed costs time alone.

    with processes(3):                  this process and two others
        what_if(question)               the searches inside use them (``search.py``)

The others start when they first can be used. They end with the block, at once, whatever they are doing; and with this
process, however it ends. Ctrl-C reaches this process alone.

They start anew and import what they need, because a user's process may have threads. A command's process has none:
there they are forked, so that they have what it has imported, compiled and found out by then (``may_fork``).

Work that needs no search in common, such as the questions of a sweep, has a ``process_executor`` instead.
"""

from __future__ import annotations

import gc
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum, auto
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, NamedTuple

from memo_sim.contract.cycles import look_seldom
from memo_sim.contract.errors import CannotRun, UsageError

MOST_JOBS = 64
"""Largest number of processes of one search."""
MOST_UNASKED = 4
"""Largest number of processes of a search that was given none."""

Task = Callable[..., Iterator[object]]
"""A function of a module. Its first argument is a dictionary that a process keeps from one task to the next."""


_Asked = tuple[int, Task | None, tuple[object, ...]]
"""The name of a task, with the task and its arguments; without a task where it is taken back."""


class Kind(Enum):
    """What a message is about."""

    PART = auto()
    """Something that a task has found out."""
    ENDED = auto()
    """A task has ended: all its parts have arrived."""
    LOST = auto()
    """A task has ended without its other parts: it failed, or its process died."""


class Message(NamedTuple):
    """What has come from a process, with the name of the task."""

    name: int
    kind: Kind
    part: Any = None


class Helper:
    """One process, and the names of its tasks; the first is the one that it is at."""

    def __init__(self, module: str, kept: dict[str, Any] | None = None) -> None:
        """Start a process that imports ``module`` before its first task.

        With ``kept`` it is forked, and its tasks find that dictionary, as it is now.
        """
        self.kept = kept
        self.ready = kept is not None
        """Whether it reads what is sent to it: a process that starts anew imports first."""
        self.connection, theirs = multiprocessing.Pipe()
        self.process: BaseProcess
        if kept is None:
            anew = multiprocessing.get_context("spawn")
            self.process = anew.Process(target=_serve, args=(theirs, module), daemon=True)
        else:
            copied = multiprocessing.get_context("fork")
            self.process = copied.Process(target=_serve_forked, args=(self.connection, theirs, kept), daemon=True)
        with without_main(), _without_interrupts():
            self.process.start()
        theirs.close()
        self.tasks: deque[int] = deque()

    def give(self, name: int, task: Task, *arguments: object) -> bool:
        """Give a task, which waits for those before it; return False where the process has died."""
        if not self._sent((name, task, arguments)):
            return False
        self.tasks.append(name)
        return True

    def drop(self, name: int) -> None:
        """Take a task back, if it has not begun."""
        self.tasks.remove(name)
        self._sent((name, None, ()))

    def _sent(self, message: _Asked) -> bool:
        try:
            self.connection.send(message)
        except OSError:
            return False
        return True

    def received(self) -> Message | None:
        """Return the message that has come; None where the process has died."""
        try:
            name, kind, part = self.connection.recv()
        except (EOFError, OSError):
            return None
        self.ready = True
        if kind is not Kind.PART and name in self.tasks:
            self.tasks.remove(name)
        return Message(name, kind, part)


class Team:
    """The processes that work beside this one."""

    def __init__(self, others: int, *, forks: bool = False, waits: bool = False) -> None:
        """``forks``: whether they are forked where they may be. ``waits``: whether none starts before ``hurry``."""
        self.others = others
        self._forks = forks
        self._waits = waits
        self._helpers: list[Helper] | None = None
        self._names = count()

    def helpers(self, module: str, kept: dict[str, Any]) -> list[Helper]:
        """Return the processes that are alive; the first call starts them, unless they wait for ``hurry``.

        Those that are forked have ``kept`` (``Helper.kept``); the others import ``module``.
        """
        if self._helpers is None:
            if self._waits:
                return []
            self._helpers = []
            forks = self._forks and may_fork()
            for _ in range(self.others):
                self._helpers.append(Helper(module, kept if forks else None))
        return self._helpers

    def hurry(self) -> None:
        """Let the processes start when they first can be used: there is work for all of them."""
        self._waits = False

    def next_name(self) -> int:
        """Return a name that no task has had."""
        return next(self._names)

    def messages(self, *, block: bool) -> Iterator[Message]:
        """Yield what has come; with ``block``, wait for the next message where none has."""
        helpers = self._helpers or []
        ready = wait([one.connection for one in helpers], None if block else 0)
        for helper in [one for one in helpers if one.connection in ready]:
            while True:
                message = helper.received()
                if message is None:
                    yield from self._without(helper)
                    break
                yield message
                if not helper.connection.poll():
                    break

    def _without(self, helper: Helper) -> Iterator[Message]:
        """Go on without a process that has died."""
        assert self._helpers is not None
        self._helpers.remove(helper)
        helper.process.join()
        code = helper.process.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        told = "a process of the search ended (%s); the others go on, and the answer is the same"
        logging.getLogger(__name__).warning(told, how)
        for place, name in enumerate(helper.tasks):
            yield Message(name, Kind.ENDED if place else Kind.LOST)  # the others have not begun

    def end(self) -> None:
        """End all processes at once."""
        for helper in self._helpers or []:
            helper.process.kill()
        for helper in self._helpers or []:
            helper.process.join()
            helper.process.close()
            helper.connection.close()
        self._helpers = []


_TEAM: ContextVar[Team | None] = ContextVar("team", default=None)


def current_team() -> Team | None:
    """Return the processes of the block around this call; None where there are none."""
    return _TEAM.get()


def may_fork() -> bool:
    """Return whether a copy of this process works: another thread may hold a lock that is never released in the copy.

    The threads of numpy's matrix products, which Python does not know, end before a fork and begin again after it.
    """
    return sys.platform == "linux" and threading.active_count() == 1


def usable_cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def command_processes(jobs: int | None) -> Iterator[None]:
    """Let what is searched in this block of a command use ``jobs`` processes, which are forked (``may_fork``).

    None: one for each CPU, up to ``MOST_UNASKED``, where there are many layouts. With few, what others do ahead is
    often not needed: GPT 7B at 1M on eight A800 takes 1.5 times the CPU seconds, and no fewer of this process.

    Raises:
        UsageError, CannotRun: see ``processes``.
    """
    if jobs is None:
        several = min(usable_cpus(), MOST_UNASKED)
        with processes(several, forks=True, waits=True):
            yield
    else:
        with processes(jobs, forks=True):
            yield


@contextmanager
def processes(jobs: int, *, forks: bool = False, waits: bool = False) -> Iterator[None]:
    """Let what is searched in this block use ``jobs`` processes, this one included.

    ``forks``, ``waits``: see ``Team``. With one process, a block around this one decides.

    Raises:
        UsageError: when there cannot be so many.
        CannotRun: when this process cannot have others.
    """
    if not 1 <= jobs <= MOST_JOBS:
        raise UsageError("not a number of processes", got=jobs, wanted=f"from 1 to {MOST_JOBS}")
    if jobs == 1:
        yield
        return
    if multiprocessing.current_process().daemon:
        raise CannotRun("a daemonic process cannot start others", got=f"{jobs} processes", hint="ask with jobs=1")
    team = Team(jobs - 1, forks=forks, waits=waits)
    try:
        with working_with(team):
            yield
    finally:
        team.end()


@contextmanager
def working_with(team: Team) -> Iterator[None]:
    """Let what is searched in this block use the processes of ``team``."""
    token = _TEAM.set(team)
    try:
        yield
    finally:
        _TEAM.reset(token)


def process_executor(jobs: int, module: str) -> ProcessPoolExecutor:
    """Return an executor of ``jobs`` processes, forked from a server that has imported ``module`` and has no threads.

    They begin when they are first needed; submit inside of ``without_main``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin_process)


@contextmanager
def ended_by_errors() -> Iterator[None]:
    """End the processes that began in this block, at once, where it ends with an error or Ctrl-C."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        raise


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back from this process until the block ends, and from one that starts here until it ignores it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_process() -> None:
    """Leave Ctrl-C to the process that asks, and end with it."""
    look_seldom()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent := multiprocessing.parent_process():

        def end_with_parent() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=end_with_parent, daemon=True).start()


@contextmanager
def without_main() -> Iterator[None]:
    """Hide the user's script from processes that start here, which would run it again; they need nothing of it.

    multiprocessing finds the script by these two attributes (``multiprocessing.spawn.get_preparation_data``).
    """
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {name: main.__dict__[name] for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


def _serve(connection: Connection, module: str) -> None:
    """Do tasks in a process that has begun anew."""
    _begin_process()
    importlib.import_module(module)
    _do_tasks(connection, {})


def _serve_forked(theirs: Connection, connection: Connection, kept: dict[str, Any]) -> None:
    """Do tasks in a copy of a process that has begun to search; ``theirs`` is the end of that process."""
    theirs.close()
    _begin_process()
    _TEAM.set(None)
    gc.freeze()  # looking for cycles among what is there from before the fork would copy its memory
    _do_tasks(connection, kept)


def _do_tasks(connection: Connection, kept: dict[str, Any]) -> None:
    """Do the tasks that come, in their order, until the connection ends."""
    come: SimpleQueue[_Asked | None] = SimpleQueue()
    threading.Thread(target=_receive_all, args=(connection, come), daemon=True).start()
    tasks: dict[int, tuple[Task, tuple[object, ...]]] = {}
    try:
        while True:
            while not tasks or not come.empty() or connection.poll():
                asked = come.get()
                if asked is None:
                    return
                name, task, arguments = asked
                if task is None:
                    tasks.pop(name, None)
                else:
                    tasks[name] = task, arguments
            name = next(iter(tasks))
            task, arguments = tasks.pop(name)
            try:
                for part in task(kept, *arguments):
                    connection.send((name, Kind.PART, part))
            except Exception:  # the process that asks does the task itself, and raises what is to be raised
                connection.send((name, Kind.LOST, None))
            else:
                connection.send((name, Kind.ENDED, None))
    except OSError:
        return


def _receive_all(connection: Connection, come: SimpleQueue[_Asked | None]) -> None:
    """Receive tasks as they are given, and None at the end.

    So the process that gives a task never waits for one that waits until its own parts are read.
    """
    try:
        while True:
            come.put(connection.recv())
    except (EOFError, OSError):
        come.put(None)
