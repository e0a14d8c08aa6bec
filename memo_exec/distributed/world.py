"""The processes of one run: joins those that torchrun starts, and exchanges values that are not part of the program.

Without torchrun there is one process. Ranks communicate over NCCL on GPUs and over gloo on CPUs. A second group, always
gloo, carries other values: whether to stop, how long a step took, names of files.

When a rank dies, the others fail with a message. Over gloo their calls fail at once, over NCCL after their patience at
the latest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from memo_sim.contract.errors import CannotRun, MemoError, RankLost, UsageError

T = TypeVar("T")

PATIENCE_S = 600.0
"""The shortest time after which a rank stops waiting for the others, in seconds."""

STEPS_OF_PATIENCE = 3
"""A rank waits for at least this many predicted steps. NCCL counts from the issue of a call, and lanes issue ahead."""

CONNECTIONS = 32
"""Value of CUDA_DEVICE_MAX_CONNECTIONS: the most hardware queues for streams, more than there are lanes and groups."""

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True, slots=True)
class Launch:
    """What torchrun tells a process: its rank, the number of ranks, and both for its own node."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


def launched() -> Launch:
    """Read torchrun's environment variables; without them return a launch of one process.

    Raises:
        UsageError: when a variable that torchrun sets is missing, is not a number, or contradicts another one.
    """
    world = _number("WORLD_SIZE", 1)
    if world == 1:
        return Launch()
    launch = Launch(
        rank=_number("RANK", None),
        world=world,
        local_rank=_number("LOCAL_RANK", None),
        local_world=_number("LOCAL_WORLD_SIZE", world),
    )
    for name, rank, size, ranks in (
        ("RANK", launch.rank, "WORLD_SIZE", launch.world),
        ("LOCAL_RANK", launch.local_rank, "LOCAL_WORLD_SIZE", launch.local_world),
    ):
        if rank >= ranks:
            raise UsageError(
                f"{name} does not fit {size}", got=f"{name}={rank}, {size}={ranks}", wanted=f"0 to {ranks - 1}"
            )
    return launch


def _number(name: str, default: int | None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name} is not a number", got=repr(text), wanted="what torchrun sets")
    return int(text)


def side_by_side() -> None:
    """Let lanes that wait for other ranks play at the same time. Call this before the first use of CUDA and NCCL.

    Streams that share a hardware queue wait for each other. A pipeline stage whose recvs block its sends would wait
    for ever. Groups connect when they are made, because in a step this may wait for another lane's call.
    """
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(CONNECTIONS)
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")


def patience_of(step_s: float | None) -> float:
    """Return how long to wait for other ranks, in seconds, in a run whose steps take about ``step_s`` seconds."""
    return max(PATIENCE_S, STEPS_OF_PATIENCE * (step_s or 0.0))


@contextmanager
def answered(rank: int, world: int) -> Iterator[None]:
    """Turn a failed communication inside this block into a ``RankLost`` error.

    Raises:
        RankLost: when another rank has stopped, or does not answer in time.
    """
    try:
        yield
    except torch.OutOfMemoryError:  # also a RuntimeError, but this rank's own failure
        raise
    except RuntimeError as error:
        raise RankLost(
            "another rank has stopped, or does not answer",
            where=f"rank {rank} of {world}",
            got=str(error).splitlines()[0],
            hint="look for the message of the rank that stopped first: it says why",
        ) from error


class World:
    """This process's rank, and the exchange of values with the other ranks."""

    def __init__(self, launch: Launch | None = None, talk: dist.ProcessGroup | None = None) -> None:
        launch = launch or Launch()
        self.rank, self.size = launch.rank, launch.world
        self.talk = talk
        """The gloo group for values that are not part of the program; None when there is one process."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and writes the files of the whole run."""
        return self.rank == 0

    def gathered(self, value: T) -> list[T]:
        """Return the values that all ranks passed, in order of ranks. Every rank has to call this.

        Raises:
            CannotRun: when another rank has stopped.
        """
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with answered(self.rank, self.size):
            dist.all_gather_object(found, value, group=self.talk)
        return found

    def numbers(self, *values: float) -> list[list[float]]:
        """Return the numbers that all ranks passed, in order of ranks; faster than ``gathered``.

        Every rank has to call this with equally many numbers.

        Raises:
            CannotRun: when another rank has stopped.
        """
        if self.size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.size)]
        with answered(self.rank, self.size):
            dist.all_gather(found, own, group=self.talk)
        return [each.tolist() for each in found]

    def by_first(self, work: Callable[[], T]) -> T:
        """Let rank 0 do ``work`` and return its result on every rank. Every rank has to call this.

        Raises:
            MemoError: on every rank, when ``work`` raises it.
            CannotRun: when another rank has stopped.
        """
        if self.size == 1:
            return work()
        box: list[Any] = [None]
        if self.first:
            try:
                box = [work()]
            except MemoError as error:
                box = [error]
        with answered(self.rank, self.size):
            dist.broadcast_object_list(box, src=0, group=self.talk)
        if isinstance(box[0], MemoError):
            raise box[0]
        result: T = box[0]
        return result


@contextmanager
def joined(launch: Launch, device: torch.device, *, patience_s: float = PATIENCE_S) -> Iterator[World]:
    """Join the other ranks, if there are any, and leave them at the end of the block.

    ``patience_s`` is how long to wait for them outside the program's own groups, in seconds.

    Raises:
        CannotRun: when the ranks cannot connect.
    """
    if launch.world == 1:
        yield World(launch)
        return
    cuda = device.type == "cuda"
    patience = timedelta(seconds=patience_s)
    try:
        dist.init_process_group(BACKENDS[device.type], timeout=patience, device_id=device if cuda else None)
        talk = dist.new_group(backend="gloo", timeout=patience)
    except (RuntimeError, ValueError) as error:
        raise CannotRun(
            "the ranks could not connect", got=str(error).splitlines()[0], wanted=f"{launch.world} ranks"
        ) from None
    try:
        yield World(launch, talk)
    except BaseException:
        # NCCL's groups are not destroyed, because that would wait for the rank that has stopped; they end with the
        # process. gloo's threads have to end before Python does.
        if not cuda:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def device_of(launch: Launch, kind: str) -> torch.device:
    """Return this rank's device, and make it current.

    Raises:
        CannotRun: when this node has more ranks than devices.
    """
    if kind == "cpu" or launch.world == 1:
        return torch.device(kind)
    if (devices := torch.cuda.device_count()) < launch.local_world:
        raise CannotRun(
            "more ranks on this node than devices", got=f"{launch.local_world} ranks", wanted=f"at most {devices}"
        )
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device
