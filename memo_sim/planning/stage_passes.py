"""Lower bound of a pipeline's step time: the passes of all stages, each as one task with its shortest time.

Stages wait for each other's passes. Where a stage's chunks have unequal numbers of layers, it is idle while the others
play their longer chunks; where transfers between stages take long, all of them are. A stage that is played by itself
shows neither (``stage_alone.py``). One rule is played:

    a forward ends at least its time after the stage's previous pass and after its input has arrived; a backward ends at
    least its time after the stage's previous pass, and after the output's gradient has arrived at least the part of its
    time that needs the gradient

Copies take no time, nothing waits for memory, and lanes do not slow each other.

      p 2, chunks of 2 and 1 layers   stage 0   [F0 c0   ][F1 c0   ][F0 c1].   [F1 c1].
                                      stage 1      .     [F0 c0   ][F1 c0   ][F0 c1]..       waits for the longer chunk

A few micro-batches are played. Let every pass of a window that has a counterpart in the window before start at least
d later than it, on all stages. A pass of the next window waits for counterparts of what the window's own pass waited
for, which lie among these passes or behind them (``engine/repetition.py``). So it starts at least d later, too, and so
on: each repetition adds at least d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from memo_sim.contract.plan import Layout
from memo_sim.engine.repetition import played_at_first, windows
from memo_sim.planning.recent import Recent
from memo_sim.program.analysis.columns import Ints
from memo_sim.program.layout.schedule import Kind, Pass, passes_of

ROUNDING = 1e-9
"""Relative rounding error of a step time whose terms are summed in another order than in the engine."""

MOST_ORDERS = 8
"""Number of orders that are kept, some MB each."""

SCHEDULES = frozenset({"1f1b", "interleaved"})
"""Schedules whose passes are forwards and backwards of whole chunks, of which a few micro-batches show the period."""


@dataclass(frozen=True, slots=True)
class ChunkSeconds:
    """Lower bounds of the seconds of one chunk's passes."""

    forward_s: float
    backward_s: float
    from_gradient_s: float
    """Part of ``backward_s`` after the arrival of the gradient of the chunk's output."""


def least_chunk(plans: Sequence[ChunkSeconds]) -> ChunkSeconds:
    """Return lower bounds of a chunk's passes in all of ``plans``, and in those that swap a number of rows between."""
    return ChunkSeconds(**{f.name: min(getattr(each, f.name) for each in plans) for f in fields(ChunkSeconds)})


class StagePasses:
    """Pipelines that are played pass by pass; layouts of equal schedules share the order of their passes."""

    def __init__(self) -> None:
        self._orders: Recent[tuple[Layout, int], _Order] = Recent(MOST_ORDERS)

    def step_s(
        self,
        layout: Layout,
        micro_batches: int,
        chunks: Sequence[Sequence[ChunkSeconds]],
        *,
        hops_s: Sequence[float],
        ends_s: Sequence[float],
    ) -> float:
        """Return a lower bound of the step seconds of a pipeline with one of ``SCHEDULES``, without subsequences.

        - ``chunks``: the seconds of each stage's chunks.
        - ``hops_s``: lower bounds of the seconds of a transfer from each stage to the next one, or back.
        - ``ends_s``: lower bounds of the seconds of each stage after its last pass.
        """
        alike = Layout(pp=layout.pp, schedule=layout.schedule, virtual_stages=layout.virtual_stages)
        order = self._orders.of((alike, micro_batches), lambda: _Order(alike, micro_batches))
        return order.step_s(chunks, hops_s, ends_s) * (1 - ROUNDING)


class _Order:
    """The passes of all stages, each after those it waits for, and the windows of them that repeat."""

    def __init__(self, layout: Layout, micro_batches: int) -> None:
        played = played_at_first(layout, micro_batches)
        stages = [passes_of(layout, stage, played) for stage in range(layout.pp)]
        self._stages: list[int] = []
        self._kinds: list[int] = []
        """By pass: twice the number of its chunk in the model's order; one more for a backward."""
        self._producers: list[int] = []
        """By pass: the number of the pass that it waits for, counted from 1; 0 where it waits for no other stage."""
        self._last = 2 * layout.pp * layout.virtual_stages - 2
        numbers = self._place(layout, stages)
        beyond = micro_batches - played
        self._windows: list[tuple[int, Ints, Ints]] = []
        """How often a window is repeated, its passes that have counterparts in the window before, and these."""
        for found in windows(layout, stages, beyond) if beyond else []:
            pairs = list(zip(numbers, found, strict=True))
            mine = np.concatenate([of[window.again : window.end] for of, window in pairs])
            before = np.concatenate([of[window.before : window.first] for of, window in pairs])
            self._windows.append((beyond // found[0].micro_batches, mine, before))

    def _place(self, layout: Layout, stages: Sequence[Sequence[Pass]]) -> list[Ints]:
        """Place every pass behind those it waits for, and return the numbers of each stage's passes."""
        known: dict[tuple[int, int], int] = {}
        numbers: list[list[int]] = [[] for _ in stages]
        going = True
        while going:
            going = False
            for stage, passes in enumerate(stages):
                for each in passes[len(numbers[stage]) :]:
                    backward = each.kind is Kind.BACKWARD
                    kind = 2 * (each.chunk * layout.pp + stage) + backward
                    first = kind == 0 or kind == self._last + 1
                    made = (kind + 2 if backward else kind - 2), each.micro_batch
                    if not first and made not in known:
                        break  # it is placed when another stage has made its input
                    self._stages.append(stage)
                    self._kinds.append(kind)
                    self._producers.append(0 if first else known[made])
                    known[kind, each.micro_batch] = len(self._stages)
                    numbers[stage].append(len(self._stages))
                    going = True
        return [np.array(each, dtype=np.int64) for each in numbers]

    def step_s(
        self, chunks: Sequence[Sequence[ChunkSeconds]], hops_s: Sequence[float], ends_s: Sequence[float]
    ) -> float:
        """Return the seconds at which the last stage ends; see ``StagePasses.step_s``."""
        own: list[float] = []
        after: list[float] = []
        for chunk in zip(*chunks, strict=True):
            for stage, each in enumerate(chunk):
                own += [each.forward_s, each.backward_s]
                # The input of stage 0 comes from the last stage: the index -1.
                after += [hops_s[stage - 1] + each.forward_s, hops_s[stage] + each.from_gradient_s]
        free = [0.0] * len(hops_s)
        ends = [-float("inf")]
        for stage, kind, producer in zip(self._stages, self._kinds, self._producers, strict=True):
            end_s = free[stage] + own[kind]
            arrived_s = ends[producer] + after[kind]
            if arrived_s > end_s:  # noqa: PLR1730 - a call of max() is slower
                end_s = arrived_s
            free[stage] = end_s
            ends.append(end_s)
        found = np.array(ends)
        added_s = max(
            (times * float((found[mine] - found[before]).min()) for times, mine, before in self._windows), default=0.0
        )
        return max(at + more for at, more in zip(free, ends_s, strict=True)) + added_s
