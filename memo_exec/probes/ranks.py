"""The processes of one calibration, one per device on a single node, started by torchrun.

Without torchrun there is one process. The processes connect as the ranks of a run do (``distributed/world.py``). If a
rank dies, the others fail within ``PATIENCE_S`` seconds, because their calls that wait for it time out. The error names
the rank that noticed the failure.
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
"""Seconds for which a rank waits for the others before it gives up."""


class Ranks:
    """This process and its connection to the other ranks; ``world`` is 1 if there are none."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self._groups: dict[int, dist.ProcessGroup] = {}

    @property
    def first(self) -> bool:
        """Whether this rank runs the probes that need a single device, and writes the profile."""
        return self.rank == 0

    def group(self, size: int) -> dist.ProcessGroup:
        """Return the group of the first ``size`` ranks; every rank must call this, in the same order."""
        if size not in self._groups:
            with self.answered():
                self._groups[size] = dist.new_group(list(range(size)), timeout=timedelta(seconds=PATIENCE_S))
        return self._groups[size]

    def answered(self) -> AbstractContextManager[None]:
        """Return a context for communication with the other ranks (see ``world.answered``)."""
        return world.answered(self.rank, self.world)

    def wait(self) -> None:
        """Wait until every rank has called this."""
        self._reduced(0.0, dist.ReduceOp.MAX)

    def slowest(self, sample: Sample, group: dist.ProcessGroup | None = None) -> Sample:
        """Return the longest duration and the widest spread among the ranks (of ``group``)."""
        return Sample(
            self._reduced(sample.seconds, dist.ReduceOp.MAX, group),
            self._reduced(sample.spread, dist.ReduceOp.MAX, group),
        )

    def shortest(self, durations: list[float], group: dist.ProcessGroup | None = None) -> list[float]:
        """Return the shortest of the ranks' (of ``group``) durations for each of equally many calls."""
        if self.world == 1:
            return durations
        numbers = torch.tensor(durations, dtype=torch.float64, device=self.device)
        with self.answered():
            dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=group)
            found: list[float] = numbers.tolist()
        return found

    def any(self, value: bool) -> bool:
        """Return whether ``value`` is true on any rank; every rank calls this, and all get the same."""
        return self._reduced(float(value), dist.ReduceOp.MAX) > 0

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
    """Connect to the other ranks, if there are any, and disconnect at the end.

    Raises:
        UsageError: if the environment variables are not those that torchrun sets.
        CannotRun: if ranks are on several nodes, outnumber the devices, or cannot connect.
    """
    launch = launched()
    if launch.local_world != launch.world:
        raise CannotRun(
            "calibration measures a single node",
            got=f"{launch.world} ranks, {launch.local_world} of them on this node",
            wanted="all ranks on one node",
            hint="calibrate on one node; describe the network between nodes in the cluster file",
        )
    device = device_of(launch, "cuda" if torch.cuda.is_available() else "cpu")
    with world.joined(launch, device, patience_s=PATIENCE_S):
        yield Ranks(launch.rank, launch.world, device)
