"""Plays one step on a rank with chosen delays of its lanes, and measures the bytes that its store holds.

The bytes held at once depend on which lane is late. A late lane may allocate a buffer after another one has died with
which it overlaps in program order. The program's own peak is that of program order, and no delay may exceed it.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from memo_exec.distributed.groups import make_groups
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import rank_program
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.interpreter.lanes import Progress
from memo_exec.interpreter.prepared import Prepared
from memo_exec.kernels import StepScalars
from memo_sim.contract.plan import Decisions
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import Edges, derive_edges
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower
from tests.distributed.parity import own_batch, randomise
from tests.distributed.team import PATIENCE_S, Member

LATE_S = 0.002
"""Delay of an instruction of a late lane; longer than most instructions of a small model."""


class Late(Interpreter):
    """Plays with some lanes late: each of their instructions starts ``LATE_S`` after it could."""

    late: frozenset[Lane] = frozenset()

    def _play_one(self, lane: Lane, prepared: Prepared, progress: Progress) -> None:
        if lane in self.late:
            for other, producer in prepared.bound.waits:
                progress.wait(other, producer)
            time.sleep(LATE_S)
        super()._play_one(lane, prepared, progress)


def in_program_order(program: Program) -> Edges:
    """Return edges that make each instruction wait for the end of the previous one in program order."""
    lane = expand(program).lane
    turns = np.flatnonzero(lane[1:] != lane[:-1])
    return Edges(turns, turns + 1)


def without_memory(program: Program) -> Edges:
    """Return the derived edges without those for memory that another buffer reuses."""
    columns = expand(program)
    return derive_edges(replace(columns, buffer_dynamic=np.zeros_like(columns.buffer_dynamic)))


def held(
    member: Member,
    decisions: Decisions,
    late: frozenset[Lane] = frozenset(),
    ordered_by: Callable[[Program], Edges] | None = None,
) -> tuple[int, int]:
    """Play a step; return the most bytes that the store held at once, and the peak of the rank's program.

    The lanes in ``late`` are late. ``ordered_by`` gives the edges to use instead of the derived ones.
    """
    place = MeshCoordinates(decisions.layout, member.rank)
    program = rank_program(decisions, place)
    groups = make_groups(lower(decisions), place, patience_s=PATIENCE_S) if member.world > 1 else {}
    edges = ordered_by(program) if ordered_by else None
    with Late(decisions, program, rank=member.rank, groups=groups, edges=edges) as interpreter:
        interpreter.late = late
        randomise(interpreter)
        record = interpreter.run_step(own_batch(decisions, member.rank, 1), StepScalars(lr=1e-2))
    return record.peak_device_bytes, peak(live_bytes(liveness(program, expand(program)), device=True)).bytes
