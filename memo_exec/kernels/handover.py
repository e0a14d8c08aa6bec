"""Hand-overs between pipeline stages: each side of one is an instruction, ``send`` here and ``receive`` there.

Both wait for the other side. They have lanes of their own, and each ordered pair of ranks a process group of its own:
what goes forth does not wait for what comes back.
"""

from __future__ import annotations

import torch.distributed as dist

from memo_exec.kernels.call import Call
from memo_sim.program.analysis.communicators import handover_key
from memo_sim.program.ir.work import Handover
from memo_sim.program.layout.rank_order import stride


def send(call: Call) -> None:
    """``send`` goes to this rank's like of the target stage."""
    work = _work(call)
    dist.send(call["send"], _peer(call, work.target - work.source), group=call.context.groups[handover_key(work)])


def receive(call: Call) -> None:
    """``recv`` comes from this rank's like of the source stage."""
    work = _work(call)
    dist.recv(call["recv"], _peer(call, work.source - work.target), group=call.context.groups[handover_key(work)])


def _work(call: Call) -> Handover:
    work = call.instruction.work
    assert isinstance(work, Handover)
    return work


def _peer(call: Call, stages: int) -> int:
    place = call.context.place
    return place.rank + stages * stride("pp", place.layout)
