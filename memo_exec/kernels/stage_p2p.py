"""Point-to-point transfers between pipeline stages: ``send`` on one stage, ``receive`` on the other.

Each side blocks until the other side is ready. Sends and receives have their own lanes, and each ordered pair of ranks
has its own process group. So activations going forward do not wait for gradients coming back.
"""

from __future__ import annotations

import torch.distributed as dist

from memo_exec.kernels.call import Call
from memo_sim.program.analysis.communicators import p2p_key
from memo_sim.program.ir.work import PointToPoint
from memo_sim.program.layout.rank_order import stride


def send(call: Call) -> None:
    """Send ``send`` to the rank of the target stage that has the same coordinates as this rank otherwise."""
    work = _work(call)
    dist.send(call["send"], _peer(call, work.target - work.source), group=call.context.groups[p2p_key(work)])


def receive(call: Call) -> None:
    """Receive ``recv`` from the rank of the source stage that has the same coordinates as this rank otherwise."""
    work = _work(call)
    dist.recv(call["recv"], _peer(call, work.source - work.target), group=call.context.groups[p2p_key(work)])


def _work(call: Call) -> PointToPoint:
    work = call.instruction.work
    assert isinstance(work, PointToPoint)
    return work


def _peer(call: Call, stages: int) -> int:
    mesh = call.context.mesh
    return mesh.rank + stages * stride("pp", mesh.layout)
