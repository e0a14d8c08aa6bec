"""Removes the wait for other pipeline stages from the measured times of p2p calls and collectives between stages.

A recv that is posted early waits for its sender, so its two timestamps include the sender's delay. All sides end
together, and the last one to start does not wait. So the shortest of their durations is the time of the transfer. This
needs no common clock of the ranks.

    stage 0   send                  [----]              start to end: the transfer
    stage 1   recv      [................----]          the dots are a wait, the dashes are the transfer

gloo ends a send once the network has accepted it. So on CPUs the measured transfer may be too short, never too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.world import World
from memo_exec.interpreter.record import StepRecord
from memo_sim.program.analysis.rendezvous import all_rendezvous
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.rank_order import stride


def without_waiting(record: StepRecord, programs: Sequence[Program], mesh: MeshCoordinates, world: World) -> StepRecord:
    """Return the record with later starts: each call shared with other stages starts when the last of them started.

    ``programs`` are the programs of all stages. Every rank has to call this with its record of the same step.

    Raises:
        CannotRun: when another rank has stopped.
    """
    if len(programs) == 1:
        return record
    stage = mesh.at("pp")
    seconds = record.end_s - record.start_s
    calls = [dict(rendezvous) for rendezvous in all_rendezvous(programs)]
    durations_s = world.gathered({n: float(seconds[call[stage]]) for n, call in enumerate(calls) if stage in call})
    start_s = record.start_s.copy()
    for n, call in enumerate(calls):
        if stage in call:
            ranks = [mesh.rank + (other - stage) * stride("pp", mesh.layout) for other in call]
            own = call[stage]
            start_s[own] = record.end_s[own] - min(durations_s[rank][n] for rank in ranks)
    return replace(record, start_s=start_s)
