"""What pipeline stages play together, timed without the wait for each other.

A receive that is posted early stands until its sender comes, so its two timestamps hold the sender's delay as well.
Both sides end together and the later one waits for nobody: the shortest of their durations is the transfer, whatever
clocks the ranks have.

    stage 0   send                  [----]              start to end: the transfer
    stage 1   receive   [................----]          the dots are a wait, the dashes are counted

gloo ends a send once the network has taken it, so on CPUs the transfer may come out too short; it is never too long.
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
    """Return a step in which what this rank plays with other stages starts when the last of them had come.

    ``programs`` are those of all stages; every rank calls this with its record of the same step.

    Raises:
        CannotRun: when another rank has stopped.
    """
    if len(programs) == 1:
        return record
    stage = mesh.at("pp")
    seconds = record.end_s - record.start_s
    met = [dict(rendezvous) for rendezvous in all_rendezvous(programs)]
    told = world.gathered({n: float(seconds[stages[stage]]) for n, stages in enumerate(met) if stage in stages})
    start_s = record.start_s.copy()
    for n, stages in enumerate(met):
        if stage in stages:
            sides = [mesh.rank + (stage - stage) * stride("pp", mesh.layout) for stage in stages]
            own = stages[stage]
            start_s[own] = record.end_s[own] - min(told[rank][n] for rank in sides)
    return replace(record, start_s=start_s)
