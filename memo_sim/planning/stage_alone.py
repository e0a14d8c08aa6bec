"""Lower bounds from one pipeline stage that is lowered and played by itself: its step time and its device memory.

Lanes play in program order. So a step whose instructions are shorter, or wait for less, does not end later. Played
alone, a stage never waits for another one, except for its first input. And each instruction runs as if it were the only
one on the machine: lanes that slow each other are left out, because they could make a step with fewer waits slower.

      together   F0 F1 .  B0 F2 .  B1 .  B2        stage 1 waits for what stage 0 sends
      alone      F0 F1 B0 F2 B1 B2                 copies, collectives and rounding buffers as in the whole pipeline

A few micro-batches are played, and their period is repeated as the engine does (``engine/repetition.py``). The stage
need not have become steady: from one period to the next, the shortest time that any instruction is delayed by never
gets shorter.

A range of alphas is played once. Each instruction then takes the shorter of its times at both ends. Plans inside of the
range have the same instructions and edges, and no instruction is shorter than at both ends.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions
from memo_sim.costs.pricing import NodeRates, Pricer
from memo_sim.engine.memory import memory_of
from memo_sim.engine.playback import Floats
from memo_sim.engine.repetition import RECEIVED_AHEAD, Repetition, period_of, played_at_first, windows
from memo_sim.program.analysis.columns import Columns, expand, fold
from memo_sim.program.analysis.edges import Edges, derive_edges
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.pipeline.stage_program import stage_program
from memo_sim.program.pipeline.template_cache import cached_templates

MOST_LOWERED = 16
"""Number of lowered stages that are kept, about 3 MiB each: neighbouring ranges of alpha share an end."""

ROUNDING = 1e-9
"""Relative rounding error of a step time whose terms are summed in another order than in the engine."""


def stands_alone(decisions: Decisions) -> bool:
    """Return whether a stage of the plan can be played by itself: one that does not run all forwards first (GPipe)."""
    layout = decisions.layout
    return layout.pp > 1 and layout.subsequences == 1 and layout.schedule != "gpipe"


@dataclass(frozen=True)
class _Lowered:
    """A stage with a few micro-batches."""

    program: Program
    seconds: Floats
    """By instruction, each alone on the machine."""

    @cached_property
    def columns(self) -> Columns:
        """The instructions as columns."""
        return expand(self.program)

    @cached_property
    def edges(self) -> Edges:
        """The edges between the stage's lanes."""
        return derive_edges(self.columns)

    def is_like(self, other: _Lowered) -> bool:
        """Return whether two programs have the same instructions on the same lanes, and the same edges."""
        if len(self.seconds) != len(other.seconds) or not np.array_equal(self.columns.lane, other.columns.lane):
            return False
        pairs = ((getattr(self.edges, name), getattr(other.edges, name)) for name in ("producer", "consumer"))
        return all(np.array_equal(mine, theirs) for mine, theirs in pairs)


class StagesAlone:
    """Stages played by themselves on one cluster."""

    def __init__(self, hardware: Hardware, cluster: Cluster) -> None:
        self._hardware, self._cluster = hardware, cluster
        self._lowered: OrderedDict[tuple[Decisions, int], _Lowered] = OrderedDict()

    def step_s(self, low: Decisions, high: Decisions, stage: int, *, before_s: float, after_s: float) -> float | None:
        """Return a lower bound of the step seconds of plans that swap as many rows as ``low``, ``high``, or between.

        - ``stage``: the stage that is played.
        - ``before_s``: lower bound of the seconds before its first input arrives.
        - ``after_s``: lower bound of the seconds of other stages after its last backward.

        None when the two plans have other instructions, or when no period is seen.

        Raises:
            Infeasible: when a plan cannot be lowered, or the profile has not measured its work.
        """
        first = self._of(low, stage)
        seconds = first.seconds
        if high != low:
            last = self._of(high, stage)
            if not first.is_like(last):
                return None
            seconds = np.minimum(seconds, last.seconds)
        program, columns = first.program, first.columns
        beyond = low.micro_batches - program.micro_batches
        found = windows(low.layout, [[each for each, _ in program.passes]], beyond) if beyond else []
        repeated = [Repetition(program, columns, window, beyond) for (window,) in found]
        repeated = [each for each in repeated if _is_like_before(each, columns)]
        if beyond and not repeated:
            return None
        start_s, end_s = _played(first, seconds, before_s, repeated[0] if repeated else None)
        added_s = max((each.times * _least_period_s(each, start_s) for each in repeated), default=0.0)
        of_step = np.array([template.kind.of_step for template in program.templates])[columns.template]
        passes = np.flatnonzero(~of_step & (columns.lane == Lane.COMPUTE))
        ended_s = float(end_s[passes[-1]]) + after_s
        return (max(float(end_s.max()), ended_s) + added_s) * (1 - ROUNDING)

    def device_bytes(self, decisions: Decisions, stage: int) -> int:
        """Return a lower bound of a device's bytes, without the reserve: those of one stage.

        Raises:
            Infeasible: when the plan cannot be lowered.
        """
        lowered = self._of(decisions, stage)
        memory = memory_of(lowered.program, fold(lowered.program), decisions, self._hardware, self._cluster)
        return memory.device.bytes

    def _of(self, decisions: Decisions, stage: int) -> _Lowered:
        found = self._lowered.get((decisions, stage))
        if found is None:
            found = self._lowered[decisions, stage] = self._lower(decisions, stage)
            if len(self._lowered) > MOST_LOWERED:
                self._lowered.popitem(last=False)
        self._lowered.move_to_end((decisions, stage))
        return found

    def _lower(self, decisions: Decisions, stage: int) -> _Lowered:
        shape = shape_of(decisions)
        pricer, rates = self._priced(decisions)
        made = cached_templates(decisions, shape)
        chosen = stages_of(decisions)[stage]
        program = stage_program(decisions, shape, chosen, _micro_batches(decisions, stage), made=made)
        rows = [
            np.array([pricer.seconds(i.work) / rates[i.lane] for i in template.instructions], dtype=np.float64)
            for template in program.templates
        ]
        return _Lowered(program, np.concatenate([rows[instance.template] for instance in program.instances]))

    def _priced(self, decisions: Decisions) -> tuple[Pricer, Floats]:
        """Return the layout's prices, and the rate of each lane while no other lane is busy: none is ever faster."""
        layout = decisions.layout
        local_devices = min(self._cluster.devices_per_node, layout.devices)
        pricer = Pricer(self._hardware, self._cluster, layout, rowwise=decisions.kernels.rowwise)
        rates = NodeRates(self._hardware, self._cluster, local_devices, demands=pricer.demands)
        return pricer, np.array([rates.rates(1 << lane)[lane] for lane in Lane])


def _micro_batches(decisions: Decisions, stage: int) -> int:
    """Return how many micro-batches show the period of a stage that waits for no other."""
    layout, times = decisions.layout, decisions.micro_batches
    if layout.schedule != "interleaved":
        return played_at_first(layout, times)
    period, chunks = period_of(layout), layout.virtual_stages
    warmup = 2 * (layout.pp - stage) + (chunks - 1) * layout.pp
    least = -(-warmup // chunks) + 2 * period + RECEIVED_AHEAD
    return times - max(0, times - least) // period * period


def _played(lowered: _Lowered, seconds: Floats, before_s: float, repeated: Repetition | None) -> tuple[Floats, Floats]:
    """Return when every instruction starts and ends, when its lane and its producers are all that it waits for.

    The stage's first input arrives ``before_s`` after the step's start. With a window, an instruction waits for none
    that is further away than the window is long, and a lane without work in the window starts anew at its end.
    """
    lanes, durations = lowered.columns.lane.tolist(), seconds.tolist()
    consumer, producer = lowered.edges.consumer, lowered.edges.producer
    idle: list[int] = []
    if repeated is not None:
        near = consumer - producer <= repeated.end - repeated.first
        consumer, producer = consumer[near], producer[near]
        idle = sorted(set(Lane) - set(lanes[repeated.first : repeated.end]))
    waits: dict[int, list[int]] = {}
    for after, before in zip(consumer.tolist(), producer.tolist(), strict=True):
        waits.setdefault(after, []).append(before)
    start, end = [0.0] * len(lanes), [0.0] * len(lanes)
    free = [0.0] * len(Lane)
    free[Lane.RECV] = before_s
    for number, lane in enumerate(lanes):
        if repeated is not None and number == repeated.end:
            for each in idle:
                free[each] = 0.0
        ready = free[lane]
        for each in waits.get(number, ()):
            ready = max(ready, end[each])
        start[number] = ready
        free[lane] = end[number] = ready + durations[number]
    return np.array(start), np.array(end)


def _is_like_before(repeated: Repetition, columns: Columns) -> bool:
    """Return whether a window has the instructions of the window before it."""
    window, before = slice(repeated.first, repeated.end), slice(repeated.before, repeated.first)
    return all(np.array_equal(each[window], each[before]) for each in (columns.template, columns.position))


def _least_period_s(repeated: Repetition, start_s: Floats) -> float:
    """Return a lower bound of the seconds that each repetition of a window adds.

    Let every instruction of a window start at least d later than its counterpart in the window before. All that the
    next window waits for lies in this window and in itself. So it starts at least d later, too, and so on.
    """
    shifts = start_s[repeated.first : repeated.end] - start_s[repeated.before : repeated.first]
    return float(shifts.min())
