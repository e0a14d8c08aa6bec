"""Connects all pairs of ranks that send to each other, one group after the other, before step 1.

NCCL connects two ranks at their first send, and may wait for the whole device to do so. Inside a step it could wait for
another lane's call, which may itself wait for a third rank: a deadlock. So pairs connect while the device is idle.
Other collectives connect when their group is made (``world.side_by_side``).
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
"""Who sends to whom: each rank to the next one, or one farther away; the source stage to the target stage; each rank to
all others."""


def connect(programs: Sequence[Program], mesh: MeshCoordinates, groups: Groups, device: torch.device) -> list[Key]:
    """Send a small tensor over every group of this rank in which ``programs`` send; return the groups' keys.

    Every rank of the job has to call this with the programs of all pipeline stages.

    Raises:
        RuntimeError: when another rank has stopped.
    """
    links = sorted({link for program in programs for i in played(program) if (link := _link(i.lane, i.work))})
    own = [link for link in links if link[0] in groups]
    for key, kind, distance in own:
        _exchange(kind, distance, key, mesh, groups[key], device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return list(dict.fromkeys(key for key, _, _ in own))


def _link(lane: Lane, work: Work) -> tuple[Key, str, int] | None:
    """Return the key of the group in which an instruction sends between ranks, who sends to whom, and how far away."""
    if isinstance(work, PointToPoint):
        return p2p_key(work), PAIR, 1
    if isinstance(work, Exchange):
        return (lane, work.group), RING, work.distance
    if isinstance(work, Collective) and work.kind == "all_to_all":
        return (lane, work.group), ALL, 1
    return None


def _exchange(  # noqa: PLR0917 - the link, and the rank that plays it
    kind: str, distance: int, key: Key, mesh: MeshCoordinates, group: dist.ProcessGroup, device: torch.device
) -> None:
    ranks, here = dist.get_process_group_ranks(group), dist.get_rank(group)
    sent, received = (torch.zeros(len(ranks), device=device) for _ in range(2))
    if kind == ALL:
        dist.all_to_all_single(received, sent, group=group)
    elif kind == RING:
        calls = [
            dist.P2POp(dist.isend, sent, ranks[(here + distance) % len(ranks)], group),
            dist.P2POp(dist.irecv, received, ranks[here - distance], group),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
    elif mesh.at("pp") == stages_of_key(key)[0]:
        dist.send(sent, ranks[1 - here], group=group)
    else:
        dist.recv(received, ranks[1 - here], group=group)
