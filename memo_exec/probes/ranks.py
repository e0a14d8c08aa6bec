"""The processes of one calibration: a device each, all on one node, as torchrun starts them.

Without torchrun there is one. With it every rank reads RANK, LOCAL_RANK, WORLD_SIZE and the rendezvous from its
environment; they meet over NCCL on GPUs and over gloo on CPUs. A rank that dies takes the others down within
``PATIENCE_S``: what waits for it fails, and the failure names the rank that saw it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from memo_exec.probes.timing import Sample
from memo_sim.contract.errors import CannotRun, UsageError

PATIENCE_S = 120
"""How long a rank waits for the others before it gives up."""

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Ranks:
    """This process among the others; ``world`` is 1 when there are none."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self._groups: dict[int, dist.ProcessGroup] = {}

    @property
    def first(self) -> bool:
        """Whether this rank measures what one device can measure alone, and writes the profile."""
        return self.rank == 0

    def group(self, size: int) -> dist.ProcessGroup:
        """Return the group of the first ``size`` ranks; every rank must ask for it, in the same order."""
        if size not in self._groups:
            with self.answered():
                self._groups[size] = dist.new_group(list(range(size)), timeout=timedelta(seconds=PATIENCE_S))
        return self._groups[size]

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Talk to the other ranks inside this block.

        Raises:
            CannotRun: when one of them has stopped, or does not answer in time.
        """
        try:
            yield
        except RuntimeError as error:
            raise CannotRun(
                "another rank has stopped, or does not answer",
                where=f"rank {self.rank} of {self.world}",
                got=_first_line(error),
                hint="the first rank's message that is not this one says why",
            ) from error

    def wait(self) -> None:
        """Return once every rank is here."""
        self._reduced(0.0, dist.ReduceOp.MAX)

    def slowest(self, sample: Sample, group: dist.ProcessGroup | None = None) -> Sample:
        """Return the longest duration and the widest spread among the ranks (of ``group``)."""
        return Sample(
            self._reduced(sample.seconds, dist.ReduceOp.MAX, group),
            self._reduced(sample.spread, dist.ReduceOp.MAX, group),
        )

    def total(self, value: float) -> float:
        """Return the sum over all ranks."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def _reduced(self, value: float, how: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None) -> float:
        if self.world == 1:
            return value
        number = torch.tensor([value], dtype=torch.float64, device=self.device)
        with self.answered():
            dist.all_reduce(number, op=how, group=group)
            return float(number.item())


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the other ranks, when there are any, and leave them at the end.

    Raises:
        UsageError: when the environment is not what torchrun sets.
        CannotRun: when ranks lie on several nodes, are more than the devices, or do not meet.
    """
    cuda = torch.cuda.is_available()
    world, local_world = _number("WORLD_SIZE", 1), _number("LOCAL_WORLD_SIZE", _number("WORLD_SIZE", 1))
    if world == 1:
        yield Ranks(0, 1, torch.device("cuda" if cuda else "cpu"))
        return
    rank, local_rank = _number("RANK", None), _number("LOCAL_RANK", None)
    if local_world != world:
        raise CannotRun(
            "a profile is of one node",
            got=f"{world} ranks, {local_world} of them here",
            wanted="all ranks on one node",
            hint="calibrate on one node; the network between nodes is the cluster file's",
        )
    if cuda and torch.cuda.device_count() < world:
        raise CannotRun("more ranks than devices", got=f"{world} ranks", wanted=f"{torch.cuda.device_count()} at most")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            BACKENDS[device.type],
            timeout=timedelta(seconds=PATIENCE_S),
            device_id=device if cuda else None,
        )
    except (RuntimeError, ValueError) as error:
        raise CannotRun("the ranks did not meet", got=_first_line(error), wanted=f"{world} ranks") from None
    try:
        yield Ranks(rank, world, device)
    except BaseException:
        # NCCL's groups are left to the process's end: leaving in order would wait for the rank that is gone. gloo's
        # threads must not outlive the interpreter.
        if not cuda:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _number(name: str, default: int | None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name} is not a number", got=repr(text), wanted="what torchrun sets")
    return int(text)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
