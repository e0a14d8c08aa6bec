"""Lower bound of a pipeline's step time: one stage's passes in slices, each played from empty lanes.

Kernels play in program order. So the compute lane of a stage needs at least the sum of what the slices of its order
need one by one (``program/pipeline/stage_slices.py``): from the end of the kernel before a slice to the end of the
slice's last kernel. A slice is played as if its kernels were free to start at once, and as if other lanes had nothing
else to do, ever: their instructions wait only for what is in the slice. Each instruction runs as if it were the only
one on the machine. What a slice waits for in the step, it waits for in between other things, so never for less.

      order    ... F1 . B0 F2 . B1 ...        a forward's rows leave before others come back for the backward
      slice          F1 . B0                  so most waits lie in one slice, of few layers
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from memo_sim.contract.plan import Decisions
from memo_sim.engine.playback import Floats
from memo_sim.engine.repetition import windows
from memo_sim.engine.segments import cut
from memo_sim.planning.segment_steps import Steps
from memo_sim.program.analysis.columns import fold
from memo_sim.program.analysis.edges import Edges, edges_of_rows
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.layout.schedule import Kind
from memo_sim.program.pipeline.stage_slices import StageSlices


class SliceOrder:
    """The slices of a stage's order, which plans of one form share."""

    def __init__(self, slices: StageSlices, decisions: Decisions) -> None:
        program, columns = slices.program, fold(slices.program)
        starts = np.cumsum([0, *(len(template.instructions) for template in program.templates)])
        self.of_template = columns.by_template([np.arange(*each) for each in pairwise(starts.tolist())])
        """By instruction: its number among those of all templates."""
        firsts = columns.starts[slices.first_instances]
        of = np.searchsorted(firsts, np.arange(len(columns.lane)), side="right") - 1
        edges = edges_of_rows(columns)
        inside = of[edges.producer] == of[edges.consumer]
        lane = columns.lane + of * len(Lane)
        lanes = len(Lane) * len(firsts)
        edges = Edges(edges.producer[inside], edges.consumer[inside])
        self._segments = cut(lane, edges, lanes, np.zeros(0, dtype=np.int64))
        self._steps = Steps.of(self._segments, lane)
        self._free = [0.0 if number % len(Lane) == Lane.COMPUTE else -np.inf for number in range(lanes)]
        self._times = _times(slices, decisions)

    def step_s(self, seconds: Floats) -> float:
        """Return the seconds that the stage's kernels need at least; ``seconds``: of each instruction, alone."""
        segments, free = self._segments, self._free.copy()
        self._steps.played(np.add.reduceat(seconds[segments.order], segments.first), free)
        return sum(times * free[kind * len(Lane) + Lane.COMPUTE] for kind, times in self._times.items())


def _times(slices: StageSlices, decisions: Decisions) -> dict[int, int]:
    """Return how many slices of each kind the step has; most of a few micro-batches of the program are repeated.

    Where no window of them is seen to repeat, only those of the program count.
    """
    found = dict.fromkeys(slices.kinds.values(), 0)
    for kind in slices.kinds.values():
        found[kind] += 1
    beyond = decisions.micro_batches - slices.program.micro_batches
    # Backwards that drain the pipeline repeat, too, but what is left out are forwards and backwards in turn.
    drained = max(number for number, each in enumerate(slices.passes) if each.kind is Kind.FORWARD) + 2
    for (window,) in windows(decisions.layout, [slices.passes[:drained]], beyond)[:1] if beyond else []:
        # With several stages, a window begins with a backward; the forward before it begins that slice.
        before = int(slices.passes[window.first].kind is Kind.BACKWARD)
        for first, kind in slices.kinds.items():
            if window.first <= first + before < window.end:
                found[kind] += beyond // window.micro_batches
    return found
