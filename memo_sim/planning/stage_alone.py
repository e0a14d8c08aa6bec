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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import msgspec
import numpy as np

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions
from memo_sim.costs.pricing import NodeRates
from memo_sim.engine.memory import Memory, memory_of
from memo_sim.engine.playback import Floats
from memo_sim.engine.repetition import PLAYED, RECEIVED_AHEAD, Repetition, period_of, played_at_first, windows
from memo_sim.engine.segments import Segments, cut
from memo_sim.planning.pricers import Pricers
from memo_sim.planning.recent import Recent
from memo_sim.planning.segment_steps import Steps
from memo_sim.planning.slice_order import SliceOrder
from memo_sim.program.analysis.columns import FoldedColumns, fold
from memo_sim.program.analysis.edges import Edges, derive_edges
from memo_sim.program.ir.instruction import Family, Lane, Template
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.schedule import Kind
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.pipeline.shared_instructions import Made
from memo_sim.program.pipeline.stage_program import stage_program, stage_templates
from memo_sim.program.pipeline.stage_slices import stage_slices
from memo_sim.program.pipeline.template_cache import cached_templates, seen_by_layers

Form = tuple[tuple[object, ...], ...]
"""What the plans of a range of alphas have in common (``_form``)."""

MOST_WRITTEN, MOST_ORDERS = 128, 8
"""Number of alphas whose templates are kept, about 0.3 MiB each, and of orders, about 5 MiB each."""

ROUNDING = 1e-9
"""Relative rounding error of a step time whose terms are summed in another order than in the engine."""


def stands_alone(decisions: Decisions) -> bool:
    """Return whether a stage of the plan can be played by itself: one that does not run all forwards first (GPipe).

    A plan without stages is played like one stage, but not with METP, whose many hops take as long as the plan itself.
    """
    layout = decisions.layout
    return layout.subsequences == 1 and (layout.metp == 1 if layout.pp == 1 else layout.schedule != "gpipe")


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of one stage on a device, without the reserve of the profile."""

    buffers: int
    beside: int
    """What communicators and libraries take more than the profile reserves for them."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.buffers + self.beside


@dataclass
class _Written:
    """The families and templates of a stage at one alpha, which cost a third of a lowering."""

    families: tuple[Family, ...]
    templates: tuple[Template, ...]
    form: Form
    seconds: Floats | None = None
    """By instruction of the templates, each alone on the machine; memory needs none."""


class _Order:
    """The order of a stage's instructions, which plans of one form share: as segments that wait for other lanes.

    The segments are made when they are first played: memory needs none.
    """

    def __init__(self, program: Program, decisions: Decisions) -> None:
        self.program, self.columns = program, fold(program)
        lane = self.columns.lane
        starts = np.cumsum([0, *(len(template.instructions) for template in program.templates)])
        self.of_template = self.columns.by_template([np.arange(*each) for each in pairwise(starts.tolist())])
        """By instruction: its number among those of all templates."""
        beyond = decisions.micro_batches - program.micro_batches
        passes = [each for each, _ in program.passes]
        # Backwards that drain the pipeline repeat, too, but what is left out are forwards and backwards in turn.
        drained = max(number for number, each in enumerate(passes) if each.kind is Kind.FORWARD) + 2
        found = windows(decisions.layout, [passes[:drained]], beyond) if beyond else []
        repeated = [Repetition(program, self.columns, window, beyond) for (window,) in found if window.whole]
        self.repeated = [each for each in repeated if _is_like_before(each, self.columns)]
        self.plays_all = not beyond
        of_step = np.array([template.kind.of_step for template in program.templates])[self.columns.template]
        self.last_of_passes = int(np.flatnonzero(~of_step & (lane == Lane.COMPUTE))[-1])

    @cached_property
    def _segments_and_steps(self) -> tuple[Segments, Steps]:
        edges, lane = derive_edges(self.columns), self.columns.lane
        anew = np.zeros(0, dtype=np.int64)
        if self.repeated:
            # What waits for more than a window, or for a lane that has no work in it, waits for nothing.
            window = self.repeated[0]
            near = edges.consumer - edges.producer <= window.end - window.first
            edges = Edges(edges.producer[near], edges.consumer[near])
            after = np.arange(len(lane)) >= window.end
            idle = ~np.isin(lane, lane[window.first : window.end]) & after
            anew = np.flatnonzero(idle)[np.unique(lane[idle], return_index=True)[1]]
            lane = np.where(idle, lane + len(Lane), lane)
        segments = cut(lane, edges, 2 * len(Lane), anew)
        return segments, Steps.of(segments, lane)

    def played(self, seconds: Floats, before_s: float) -> tuple[Floats, Floats]:
        """Return when every instruction starts and ends, when its lane and its producers are all that it waits for.

        The stage's first input arrives ``before_s`` after the step's start.
        """
        segments, steps = self._segments_and_steps
        ordered = seconds[segments.order]
        work = np.add.reduceat(ordered, segments.first)
        free = [0.0] * (2 * len(Lane))
        free[Lane.RECV] = before_s
        start = np.empty(len(work))
        start[steps.order] = steps.played(work, free)
        inside = np.cumsum(ordered)
        before = inside - ordered
        found = np.empty(len(ordered))
        of = segments.of
        found[segments.order] = start[of] + (before - before[segments.first][of])
        return found, found + seconds


class StagesAlone:
    """Stages played by themselves on one cluster."""

    def __init__(self, hardware: Hardware, cluster: Cluster) -> None:
        self._hardware, self._cluster = hardware, cluster
        self._pricers = Pricers(hardware, cluster)
        self._written: Recent[tuple[Decisions, int], _Written] = Recent(MOST_WRITTEN)
        self._orders: Recent[tuple[Decisions, int, Form], _Order] = Recent(MOST_ORDERS)
        self._slices: Recent[tuple[Decisions, int, Form], SliceOrder] = Recent(MOST_ORDERS)
        self._made: Recent[Decisions, Made] = Recent(MOST_WRITTEN)

    def step_s(self, low: Decisions, high: Decisions, stage: int, *, before_s: float, after_s: float) -> float | None:
        """Return a lower bound of the step seconds of plans that swap as many rows as ``low``, ``high``, or between.

        - ``stage``: the stage that is played.
        - ``before_s``: lower bound of the seconds before its first input arrives.
        - ``after_s``: lower bound of the seconds after its last backward, for other stages and the end of the step.

        None when the two plans have other instructions, or when no period is seen.

        Raises:
            Infeasible: when a plan cannot be lowered, or the profile has not measured its work.
        """
        first, last = self._of(low, stage), self._of(high, stage)
        if first.form != last.form:
            return None
        order = self._order(low, stage, first)
        if not order.repeated and not order.plays_all:
            return None
        seconds = np.minimum(self._seconds(low, first), self._seconds(high, last))[order.of_template]
        start_s, end_s = order.played(seconds, before_s)
        added_s = max((each.times * _least_period_s(each, start_s) for each in order.repeated), default=0.0)
        ended_s = max(float(end_s.max()), float(end_s[order.last_of_passes]) + after_s)
        return (ended_s + added_s) * (1 - ROUNDING)

    def kernels_s(self, low: Decisions, high: Decisions, stage: int) -> float | None:
        """Return a lower bound of the seconds from a stage's first kernel to the end of its last backward.

        It costs a fifth of ``step_s`` where little is known yet, and is a little lower (``slice_order.py``).

        None when the two plans have other instructions, or when slices of the stage's order tell too little.

        Raises:
            Infeasible: see ``step_s``.
        """
        if low.offload_window:
            return None
        first, last = self._of(low, stage), self._of(high, stage)
        if first.form != last.form:
            return None

        def ordered() -> SliceOrder:
            shape, chosen, played = shape_of(low), stages_of(low)[stage], fewest_micro_batches(low, stage)
            return SliceOrder(stage_slices(low, shape, chosen, played, made=self._layers(low)), low)

        name = msgspec.structs.replace(low, swapped_tokens=0), stage, first.form
        order = self._slices.of(name, ordered)
        seconds = np.minimum(self._seconds(low, first), self._seconds(high, last))[order.of_template]
        return order.step_s(seconds) * (1 - ROUNDING)

    def device_bytes(self, decisions: Decisions, stage: int) -> StageBytes:
        """Return a lower bound of the bytes that one stage needs on a device, without the reserve of the profile.

        Raises:
            Infeasible: when the plan cannot be lowered.
        """
        written = self._of(decisions, stage)
        order = self._order(decisions, stage, written)
        program = replace(order.program, families=written.families, templates=written.templates)
        every = program.all_families
        sizes = np.repeat(np.array([f.bytes for f in every], dtype=np.int64), [f.count for f in every])
        columns = replace(order.columns, buffer_bytes=sizes)
        return self._beyond_reserve(memory_of(program, columns, decisions, self._hardware, self._cluster))

    def last_stage_bytes(self, decisions: Decisions) -> StageBytes:
        """Return the bytes that the last stage needs on a device, without the reserve of the profile.

        Its program is written as the engine plays it, so it may have subsequences. It is not kept: that of 512
        subsequences has hundreds of MB.

        Raises:
            Infeasible: when the plan cannot be lowered.
        """
        shape, stage = shape_of(decisions), stages_of(decisions)[-1]
        replayed = decisions.memory_policy != "planned"
        played = played_at_first(decisions.layout, decisions.micro_batches, replayed=replayed)
        program = stage_program(decisions, shape, stage, played, made=cached_templates(decisions, shape))
        return self._beyond_reserve(memory_of(program, fold(program), decisions, self._hardware, self._cluster))

    def _beyond_reserve(self, memory: Memory) -> StageBytes:
        reserve_bytes = sum(int(quantity.value) for quantity in self._hardware.reserve_bytes.values())
        return StageBytes(memory.device.bytes, memory.reserve_bytes - reserve_bytes)

    def _of(self, decisions: Decisions, stage: int) -> _Written:
        return self._written.of((decisions, stage), lambda: self._write(decisions, stage))

    def _order(self, decisions: Decisions, stage: int, written: _Written) -> _Order:
        def ordered() -> _Order:
            made, chosen = self._layers(decisions), stages_of(decisions)[stage]
            program = stage_program(
                decisions, shape_of(decisions), chosen, fewest_micro_batches(decisions, stage), made=made
            )
            return _Order(program, decisions)

        return self._orders.of((msgspec.structs.replace(decisions, swapped_tokens=0), stage, written.form), ordered)

    def _layers(self, decisions: Decisions) -> Made:
        """Return the layer templates that were written for plans that differ in stages or data parallelism."""
        return self._made.of(seen_by_layers(decisions), dict)

    def _write(self, decisions: Decisions, stage: int) -> _Written:
        chosen, micro_batches = stages_of(decisions)[stage], fewest_micro_batches(decisions, stage)
        families, templates = stage_templates(
            decisions, shape_of(decisions), chosen, micro_batches, made=self._layers(decisions)
        )
        return _Written(families, templates, _form(families, templates))

    def _seconds(self, decisions: Decisions, written: _Written) -> Floats:
        """Return the seconds of the templates' instructions, each alone on the machine; priced when first asked for."""
        if written.seconds is None:
            layout, pricer = decisions.layout, self._pricers.of(decisions)
            local_devices = min(self._cluster.devices_per_node, layout.devices)
            rates = NodeRates(self._hardware, self._cluster, local_devices, demands=pricer.demands)
            # No lane is faster than while no other lane is busy.
            alone = {lane: rates.rates(1 << lane)[lane] for lane in Lane}
            every = (instruction for template in written.templates for instruction in template.instructions)
            written.seconds = np.array([pricer.seconds(each.work) / alone[each.lane] for each in every])
        return written.seconds


def _form(families: Sequence[Family], templates: Sequence[Template]) -> Form:
    """Return what two plans have in common whose instructions have the same edges.

    In place of token numbers, operands have their order among all operands' first and last tokens in buffers of the
    family, or among the bytes of the region that it lies in.
    """
    every = {family.name: family for family in families}
    ranges: list[tuple[int, int, int, str, int, int]] = []
    form: list[tuple[object, ...]] = [(f.name, f.count, f.space, f.lifetime, f.region) for f in families]
    bounds: dict[str, set[int]] = {}
    for number, template in enumerate(templates):
        own = {family.name: family for family in template.own}
        bound = [own.get(name) or every[name] for name in template.slots]
        form.append((template.name, template.slots, tuple((f.name, f.count, f.space, f.region) for f in template.own)))
        form += [(i.name, int(i.lane)) for i in template.instructions]
        for at, instruction in enumerate(template.instructions):
            for each in instruction.operands:
                family = bound[each.slot]
                size, first = (family.row_bytes, family.offset) if family.region else (1, 0)
                low, high = first + each.first * size, first + (each.first + each.tokens) * size
                name = family.region or family.name
                bounds.setdefault(name, set()).update((low, high))
                ranges.append((number, at, int(each.mode), name, low, high))
    ranks = {name: {value: rank for rank, value in enumerate(sorted(values))} for name, values in bounds.items()}
    form += [(n, at, mode, name, ranks[name][low], ranks[name][high]) for n, at, mode, name, low, high in ranges]
    return tuple(form)


def fewest_micro_batches(decisions: Decisions, stage: int) -> int:
    """Return how many micro-batches show two periods of a stage that waits for no other.

    The periods lie behind the warmup forwards, and behind the backwards whose weight gradients are deferred. More of
    them change the bound by its rounding only: a stage that waits for no other is steady from there on.
    """
    layout, times = decisions.layout, decisions.micro_batches
    if layout.pp == 1:
        return min(times, PLAYED)
    later, period, chunks = layout.pp - 1 - stage, period_of(layout), layout.virtual_stages
    if layout.schedule == "interleaved":
        before = 2 * later + (chunks - 1) * layout.pp
    else:
        before = later + (stage if layout.schedule == "zero-bubble" else 0)
    least = -(-(before + RECEIVED_AHEAD) // chunks) + 2 * period
    return times - max(0, times - least) // period * period


def _is_like_before(repeated: Repetition, columns: FoldedColumns) -> bool:
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
