"""Hand-overs between pipeline stages: each side of one is an instruction, ``send`` here and ``receive`` there.

Both wait for the other side. They have lanes of their own, and each ordered pair of ranks a process group of its own:
what goes forth does not wait for what comes back.
"""

from __future__ import annotations

import torch.distributed as dist

from memo_exec.kernels.call import Call
from memo_sim.program.analysis.communicators import p2p_key
from memo_sim.program.ir.work import PointToPoint
from memo_sim.program.layout.rank_order import stride


def send(call: Call) -> None:
    """``send`` goes to this rank's like of the target stage."""
    work = _work(call)
    dist.send(call["send"], _peer(call, work.target - work.source), group=call.context.groups[p2p_key(work)])


def receive(call: Call) -> None:
    """``recv`` comes from this rank's like of the source stage."""
    work = _work(call)
    dist.recv(call["recv"], _peer(call, work.source - work.target), group=call.context.groups[p2p_key(work)])


def _work(call: Call) -> PointToPoint:
    work = call.instruction.work
    assert isinstance(work, PointToPoint)
    return work


def _peer(call: Call, stages: int) -> int:
    mesh = call.context.mesh
    return mesh.rank + stages * stride("pp", mesh.layout)
