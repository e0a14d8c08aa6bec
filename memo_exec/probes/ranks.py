"""The processes of one calibration: a device each, all on one node, as torchrun starts them.

Without torchrun there is one. They meet as the ranks of a run do (``distributed/world.py``). A rank that dies takes the
others down within ``PATIENCE_S``: what waits for it fails, and the failure names the rank that saw it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from memo_exec.distributed import world
from memo_exec.distributed.world import device_of, launched
from memo_exec.probes.timing import Sample
from memo_sim.contract.errors import CannotRun

PATIENCE_S = 120
"""How long a rank waits for the others before it gives up."""


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

    def answered(self) -> AbstractContextManager[None]:
        """Return a context in which to talk to the other ranks (``world.answered``)."""
        return world.answered(self.rank, self.world)

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
    launch = launched()
    if launch.local_world != launch.world:
        raise CannotRun(
            "a profile is of one node",
            got=f"{launch.world} ranks, {launch.local_world} of them here",
            wanted="all ranks on one node",
            hint="calibrate on one node; the network between nodes is the cluster file's",
        )
    device = device_of(launch, "cuda" if torch.cuda.is_available() else "cpu")
    with world.joined(launch, device, patience_s=PATIENCE_S):
        yield Ranks(launch.rank, launch.world, device)
