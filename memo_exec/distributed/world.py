"""The processes of one run, as torchrun starts them: who this one is, and what they tell each other beside the program.

Without torchrun there is one. Ranks meet over NCCL on GPUs and over gloo on CPUs, and have a gloo group beside it for
what is no tensor of the program: whether to stop, how long a step took, names of files. A rank that dies takes the
others down: what they wait for fails, at once over gloo and after their patience at the latest, and says so.
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
"""How long a rank waits for the others before it gives up, at the least."""

STEPS_OF_PATIENCE = 3
"""And so many predicted steps, where they are longer: NCCL counts from when a call is issued, and lanes issue ahead."""

CONNECTIONS = 32
"""Queues through which CUDA takes work from streams, at most; more than there are lanes and groups."""

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True, slots=True)
class Launch:
    """What torchrun says of a process: its number among all and on its node, and how many there are of both."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


def launched() -> Launch:
    """Return what torchrun has set, or one process alone.

    Raises:
        UsageError: when the environment is not what torchrun sets.
    """
    world = _number("WORLD_SIZE", 1)
    if world == 1:
        return Launch()
    return Launch(
        rank=_number("RANK", None),
        world=world,
        local_rank=_number("LOCAL_RANK", None),
        local_world=_number("LOCAL_WORLD_SIZE", world),
    )


def _number(name: str, default: int | None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name} is not a number", got=repr(text), wanted="what torchrun sets")
    return int(text)


def side_by_side() -> None:
    """Let lanes that wait for other ranks play side by side; to be called before CUDA and NCCL are first used.

    Streams that share a queue wait for each other: a pipeline stage whose receives hold up its sends waits
    for ever. And groups connect when they are made, not in a step, where that may wait for another lane's call.
    """
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(CONNECTIONS)
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")


def patience_of(step_s: float | None) -> float:
    """Return how long to wait for other ranks in a run whose steps take about so long (seconds)."""
    return max(PATIENCE_S, STEPS_OF_PATIENCE * (step_s or 0.0))


@contextmanager
def answered(rank: int, world: int) -> Iterator[None]:
    """Talk to the other ranks inside this block.

    Raises:
        RankLost: when one of them has stopped, or does not answer in time.
    """
    try:
        yield
    except torch.OutOfMemoryError:  # a RuntimeError, but this rank's own
        raise
    except RuntimeError as error:
        raise RankLost(
            "another rank has stopped, or does not answer",
            where=f"rank {rank} of {world}",
            got=str(error).splitlines()[0],
            hint="the first rank's message that is not this one says why",
        ) from error


class World:
    """This process among the others."""

    def __init__(self, launch: Launch | None = None, talk: dist.ProcessGroup | None = None) -> None:
        launch = launch or Launch()
        self.rank, self.size = launch.rank, launch.world
        self.talk = talk
        """What is no tensor of the program goes here; None in one process."""

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all: it prints, and writes what there is one of."""
        return self.rank == 0

    def gathered(self, value: T) -> list[T]:
        """Return what every rank passed, in order of ranks.

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
        """Return what every rank passed, as many numbers each: quicker than ``gathered``.

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
        """Let rank 0 do ``work`` and return its result on every rank.

        Raises:
            MemoError: what ``work`` raises, on every rank.
            CannotRun: when another rank has stopped.
        """
        if self.size == 1:
            return work()
        told: list[Any] = [None]
        if self.first:
            try:
                told = [work()]
            except MemoError as error:
                told = [error]
        with answered(self.rank, self.size):
            dist.broadcast_object_list(told, src=0, group=self.talk)
        if isinstance(told[0], MemoError):
            raise told[0]
        result: T = told[0]
        return result


@contextmanager
def joined(launch: Launch, device: torch.device, *, patience_s: float = PATIENCE_S) -> Iterator[World]:
    """Join the other ranks, when there are any, and leave them at the end.

    ``patience_s``: how long to wait for them where they talk beside the program (seconds).

    Raises:
        CannotRun: when they do not meet.
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
            "the ranks did not meet", got=str(error).splitlines()[0], wanted=f"{launch.world} ranks"
        ) from None
    try:
        yield World(launch, talk)
    except BaseException:
        # NCCL's groups are left to the process's end: leaving in order would wait for the rank that is gone. gloo's
        # threads must not outlive the interpreter.
        if not cuda:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def device_of(launch: Launch, kind: str) -> torch.device:
    """Return the device that a rank plays on, and make it current.

    Raises:
        CannotRun: when there are more ranks on this node than devices.
    """
    if kind == "cpu" or launch.world == 1:
        return torch.device(kind)
    if (devices := torch.cuda.device_count()) < launch.local_world:
        raise CannotRun(
            "more ranks on this node than devices", got=f"{launch.local_world} ranks", wanted=f"{devices} at most"
        )
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device
