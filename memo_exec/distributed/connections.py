"""First talks: every two ranks that will send to each other do so before the first step, one group after the other.

NCCL connects two ranks when they first send to each other, and may wait for the whole device while it does. In a step
that could be for another lane's call, which waits for a third rank: so it is done with nothing else under way. What
other collectives need is connected when their group is made (``world.side_by_side``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from memo_exec.distributed.groups import Groups
from memo_exec.distributed.mesh import MeshCoordinates
from memo_sim.program.analysis.communicators import Key, p2p_key, played, stages_of_key
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, Exchange, PointToPoint, Work

RING, PAIR, ALL = "ring", "pair", "all"
"""Who sends to whom: each rank to the next, the source's stage to the target's, each to each."""


def connect(programs: Sequence[Program], mesh: MeshCoordinates, groups: Groups, device: torch.device) -> list[Key]:
    """Send a number along every way of ``groups`` that ``programs`` send over; return the lanes and groups they lie on.

    Every rank of the job calls this with the programs of all roles.

    Raises:
        RuntimeError: when another rank has stopped.
    """
    ways = sorted({way for program in programs for i in played(program) if (way := _way(i.lane, i.work))})
    own = [(key, kind) for key, kind in ways if key in groups]
    for key, kind in own:
        _talk(kind, key, mesh, groups[key], device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return [key for key, _ in own]


def _way(lane: Lane, work: Work) -> tuple[Key, str] | None:
    """Return the lane and group over which an instruction sends from rank to rank, and who sends to whom."""
    if isinstance(work, PointToPoint):
        return p2p_key(work), PAIR
    if isinstance(work, Exchange):
        return (lane, work.group), RING
    if isinstance(work, Collective) and work.kind == "all_to_all":
        return (lane, work.group), ALL
    return None


def _talk(kind: str, key: Key, mesh: MeshCoordinates, group: dist.ProcessGroup, device: torch.device) -> None:
    ranks, here = dist.get_process_group_ranks(group), dist.get_rank(group)
    given, taken = (torch.zeros(len(ranks), device=device) for _ in range(2))
    if kind == ALL:
        dist.all_to_all_single(taken, given, group=group)
    elif kind == RING:
        ways = [
            dist.P2POp(dist.isend, given, ranks[(here + 1) % len(ranks)], group),
            dist.P2POp(dist.irecv, taken, ranks[here - 1], group),
        ]
        for work in dist.batch_isend_irecv(ways):
            work.wait()
    elif mesh.at("pp") == stages_of_key(key)[0]:
        dist.send(given, ranks[1 - here], group=group)
    else:
        dist.recv(taken, ranks[1 - here], group=group)
