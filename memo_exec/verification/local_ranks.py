"""Plays on several ranks that this process starts on this machine's CPU, over gloo.

A fork server imports torch once, and every rank forks from it. The ranks end with the caller, at a failure of one of
them, and at a time limit. What is played travels by pickle, so its functions have to be at the top level of a module.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import pickle
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from memo_exec.verification.play import Play, Played
from memo_sim.contract.errors import CannotRun, MemoError, RankLost

LIMIT_S = 1800.0
"""The longest time for all ranks to start and to play."""

PATIENCE_S = 300.0
"""How long a rank waits for another one."""


def play_on_ranks(plays: Sequence[Play], *, limit_s: float = LIMIT_S) -> list[list[Played]]:
    """Return the results of every play, in order of ranks. All plays have layouts of the same number of ranks.

    Raises:
        MemoError: the first error of a rank; what is no such error is a bug, and its message has the last line.
        CannotRun: when a rank died or the ranks took longer than ``limit_s`` seconds.
    """
    world = plays[0].decisions.layout.devices
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ranks: list[tuple[BaseProcess, Connection]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                process: BaseProcess = context.Process(
                    target=_rank, args=(theirs, rank, world, str(Path(folder) / "store"), list(plays)), daemon=True
                )
                process.start()
                theirs.close()
                ranks.append((process, ours))
            return _answers(ranks, time.monotonic() + limit_s)
        finally:
            for process, connection in ranks:
                connection.close()
                process.kill()
                process.join()


def _answers(ranks: list[tuple[BaseProcess, Connection]], end: float) -> list[list[Played]]:
    """Return every rank's answer, transposed to one list for each play; raise the most telling failure."""
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    found: dict[int, list[Played]] = {}
    failures: list[MemoError] = []
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            failures.append(CannotRun("the ranks took too long", got=f"{len(waiting)} of {len(ranks)} still play"))
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                answer: Any = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                answer = CannotRun("a rank ended before it answered", where=f"rank {rank} of {len(ranks)}")
            if isinstance(answer, MemoError):
                failures.append(answer)
                end = min(end, time.monotonic() + PATIENCE_S / 10)  # the others may wait for this rank
            else:
                found[rank] = answer
    if failures:
        raise next((each for each in failures if not isinstance(each, RankLost)), failures[0])
    return [list(each) for each in zip(*(found[rank] for rank in range(len(ranks))), strict=True)]


def _rank(connection: Connection, rank: int, world: int, store: str, plays: list[Play]) -> None:
    """Play on one rank and send the results, or the error."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from memo_exec.distributed.groups import make_groups
    from memo_exec.distributed.mesh import MeshCoordinates
    from memo_exec.distributed.world import answered
    from memo_sim.program.lower import lower

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE_S)
        )
        try:
            answer: Any = []
            for play in plays:
                mesh = MeshCoordinates(play.decisions.layout, rank)
                with answered(rank, world):
                    groups = make_groups(lower(play.decisions), mesh, patience_s=PATIENCE_S)
                answer.append(play.on(rank, groups, "cpu", sharing=world))
        finally:
            dist.destroy_process_group()
    except MemoError as error:
        answer = error
    except BaseException as error:  # the caller gets the reason and ends the other ranks
        place = traceback.format_exc().strip().splitlines()[-1]
        answer = MemoError(
            "a rank of the reduced plan failed (a bug)",
            where=f"rank {rank} of {world}",
            got=place,
            hint="report it with the plan",
        )
        if isinstance(error, KeyboardInterrupt):
            return
    # Plain pickle: torch's own would share the tensors' memory with a process that ends now.
    connection.send_bytes(pickle.dumps(answer))
