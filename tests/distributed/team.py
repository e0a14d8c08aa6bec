"""Ranks for tests: processes that start once and then run one case after another over gloo.

    with Team(4) as team:
        found = team.play(function, 2, argument)      the results of function(member, argument) on ranks 0 and 1

- ``function`` and its arguments are pickled, so the function has to be at the top level of a module.
- It gets a ``Member`` with rank and world size, and a new default process group. With ``meets=False`` there is no
  group, only the environment variables of torchrun.
- Processes fork from a server that has imported torch. Each has one intra-op thread.
- A case that fails on a rank raises ``Failed`` with its traceback. A case that takes longer than ``limit_s`` ends all
  ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

LIMIT_S = 60.0
"""Time limit of one case, on two busy cores."""

PATIENCE_S = 30.0
"""How long a rank of a test waits for another rank."""


class Failed(AssertionError):
    """A rank raised, died, or took too long. ``answers`` has (True, result) or (False, reason) of each rank."""

    def __init__(self, answers: list[tuple[bool, Any]]) -> None:
        self.answers = answers
        wrong = [f"rank {rank} of {len(answers)}:\n{text}" for rank, (fine, text) in enumerate(answers) if not fine]
        super().__init__("\n".join(wrong))


@dataclass(frozen=True)
class Member:
    """One rank of a case."""

    rank: int
    world: int


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            case = connection.recv()
        except EOFError:  # the test session has ended
            return
        function, rank, world, store, port, arguments = case
        meets = world > 1 and not port
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in own.items()}
        try:
            if meets:
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
            try:
                found = (True, function(Member(rank, world), *arguments))
            finally:
                if meets:
                    dist.destroy_process_group()
        except BaseException:  # the test gets the traceback and raises ``Failed``
            found = (False, traceback.format_exc())
        connection.send(found)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Team:
    """Processes that wait for cases. After a failed case, new processes start."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.distributed.preload"])
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory()
        self._cases = 0

    def play(
        self, function: Callable[..., Any], world: int, *arguments: Any, limit_s: float = LIMIT_S, meets: bool = True
    ) -> list[Any]:
        """Run ``function(member, *arguments)`` on each of ``world`` ranks and return the results in order of ranks.

        Raises:
            Failed: when a rank did not return.
        """
        if world > self.size:
            raise ValueError(f"{world} ranks asked of a team of {self.size}")
        self._start()
        self._cases += 1
        store = Path(self._folder.name) / f"case{self._cases}"
        chosen = self._ranks[:world]
        port = 0 if meets else _free_port()
        for rank, (_, connection) in enumerate(chosen):
            connection.send((function, rank, world, store, port, arguments))
        end = time.monotonic() + limit_s
        found = [self._answer(connection, end) for _, connection in chosen]
        if not all(fine for fine, _ in found):
            self.stop()
            raise Failed(found)
        return [value for _, value in found]

    def _answer(self, connection: Connection, end: float) -> tuple[bool, Any]:
        try:
            if connection.poll(max(0.0, end - time.monotonic())):
                answer: tuple[bool, Any] = connection.recv()
                return answer
        except (EOFError, OSError):
            return False, "the process ended"
        return False, "no answer in time"

    def _start(self) -> None:
        while len(self._ranks) < self.size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def stop(self) -> None:
        """Kill the processes."""
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.join()
        self._ranks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._folder.cleanup()
