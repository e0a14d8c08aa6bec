"""Turns a trace into the bars of a picture: merges spans by place and phase, and finds the stalls of each lane.

    spans   | l0 norm1 | l0 qkv | l0 attn |        | l1 norm1 | l1 qkv |
    bars    |          l0 fwd             |        |      l1 fwd       |
    stalls                                |  d2h   |

With pipeline stages, the instruction that ends a wait need not be its cause: a gather may have waited for a receive,
and that for a stage that was not done. So the chain of what each instruction waited for is followed back to the stall's
start:

    compute     | pass 1 |         stall          | pass 2 |
    tp                                   | gather |
    recv                         | recv  |                    gather: the last third, recv: the middle one,
    stage 1       ... still computes     |                    pipeline bubble: the first

Drawing is in ``timeline`` and its panels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from memo_sim.contract.trace import Trace
from memo_sim.views.palette import BUBBLE

LANES = (
    *("compute", "d2h", "h2d", "tp", "ulysses", "cp", "metp", "ep", "replica", "shard", "replicate"),
    *("expert_replica", "expert_shard", "expert_replicate", "ends"),
    *("p2p", "send", "recv", "pp", "tied", "host"),
)
"""Lanes from top to bottom; other lanes of a trace follow in alphabetical order."""

P2P = ("send", "recv")
ACROSS_STAGES = (*P2P, "pp", "tied")
"""Lanes whose instructions start when another pipeline stage is ready as well."""
LEAST_BUBBLE_S = 1e-9
"""Instants closer than this are the same instant."""

_LAYER = re.compile(r"l(\d+)")
_MICRO_BATCH = re.compile(r"m(\d+)/")
_PASS = re.compile(r"m(\d+)/s(\d+)/")


@dataclass(frozen=True, slots=True)
class InstructionPlace:
    """The parts of an instruction's id, such as ``m0/s0/l12/bwd/ffn_up.dgrad``; ``layer`` is -1 outside of layers.

    In embedding and head, ``phase`` is ``embed`` or ``head`` for forward and backward. Outside of micro-batches it is
    ``zero``, ``reduce`` or ``opt``.
    """

    where: str
    phase: str
    layer: int
    name: str

    @property
    def label(self) -> str:
        """A short name of the place: ``l12 bwd``."""
        last = self.where.rpartition("/")[2]
        return last if last == self.phase else f"{last} {self.phase}"


def place_of(instruction_id: str) -> InstructionPlace:
    """Return the parts of an instruction's id; an id of another form is its own place, with phase ``other``."""
    parts = instruction_id.rsplit("/", 2)
    if len(parts) < 3:
        return InstructionPlace(where=instruction_id, phase="other", layer=-1, name=instruction_id)
    where, phase, name = parts
    last = where.rpartition("/")[2]
    layer = _LAYER.fullmatch(last)
    if layer is None and last in ("embed", "head") and phase in ("fwd", "bwd"):
        phase = last
    return InstructionPlace(where=where, phase=phase, layer=int(layer[1]) if layer else -1, name=name)


@dataclass(frozen=True, slots=True)
class Bar:
    """Consecutive spans of one lane, place and phase; ``busy_s`` excludes the gaps between them."""

    lane: str
    place: InstructionPlace
    start_s: float
    end_s: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Pass:
    """A micro-batch's forward, backward with its recompute, or deferred weight gradients on one stage's compute lane.

    ``number`` is the micro-batch's; in a step of one micro-batch its subsequence's. Other work has -1 and its own
    phase. ``busy_s`` leaves out the gaps.
    """

    number: int
    phase: str
    start_s: float
    end_s: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Stall:
    """A time in which ``lane`` was idle because of lane ``waits_for``, or of other pipeline stages (``BUBBLE``)."""

    lane: str
    waits_for: str
    start_s: float
    end_s: float
    instruction: str = ""
    """The instruction that is played when the whole wait has ended."""


def lanes_of(traces: Iterable[Trace]) -> list[str]:
    """Return the lanes that have spans in any of the traces, from top to bottom."""
    found = {lane for trace in traces for lane in trace.spans.lanes}
    return [lane for lane in LANES if lane in found] + sorted(found.difference(LANES))


def bars_of(trace: Trace, *, bridge_s: float = float("inf")) -> list[Bar]:
    """Return the trace's bars in program order; a gap longer than ``bridge_s`` starts a new bar.

    Spans of zero length are left out.
    """
    spans = trace.spans
    bars: list[Bar] = []
    last: dict[str, int] = {}
    for name, lane, start, end in zip(spans.ids, spans.lanes, spans.start_s, spans.end_s, strict=True):
        if end <= start:
            continue
        place = place_of(name)
        number = last.get(lane)
        before = bars[number] if number is not None else None
        same = before is not None and (before.place.where, before.place.phase) == (place.where, place.phase)
        if number is not None and before is not None and same and start - before.end_s <= bridge_s:
            bars[number] = Bar(lane, before.place, before.start_s, end, before.busy_s + end - start)
        else:
            last[lane] = len(bars)
            bars.append(Bar(lane, place, start, end, end - start))
    return bars


def stalls_of(trace: Trace) -> list[Stall]:
    """Return every wait by its causes, in the order of the waits; one wait may become several stalls.

    The lane ``other`` stands for an instruction that the trace does not hold, ``BUBBLE`` for other pipeline stages.
    """
    spans = trace.spans
    row_of = {name: row for row, name in enumerate(spans.ids)}
    known = [w for w in trace.waits if w.seconds > 0 and w.instruction in row_of]
    binds = _binds(trace, row_of)
    found = []
    for wait in known:
        lane, until_s = spans.lanes[row_of[wait.instruction]], wait.start_s + wait.seconds
        cause = row_of.get(wait.waits_for)
        rest = [(wait.start_s, until_s)]
        for name, start_s, end_s in _others(trace, binds, cause, wait.start_s):
            found.append(Stall(lane, name, start_s, min(end_s, until_s), wait.instruction))
            rest = [part for each in rest for part in _without(each, start_s, end_s)]
        own = "other" if cause is None else spans.lanes[cause]
        found += [Stall(lane, own, start_s, end_s, wait.instruction) for start_s, end_s in rest]
    return found


def _binds(trace: Trace, row_of: dict[str, int]) -> list[int]:
    """Return the instruction that each one had to wait for last: of another lane, or the one before it on its own."""
    before: dict[str, int] = {}
    binds = []
    for row, lane in enumerate(trace.spans.lanes):
        binds.append(before.get(lane, -1))
        before[lane] = row
    for wait in trace.waits:
        if wait.instruction in row_of and wait.waits_for in row_of:
            binds[row_of[wait.instruction]] = row_of[wait.waits_for]
    return binds


def _others(trace: Trace, binds: list[int], cause: int | None, since_s: float) -> list[tuple[str, float, float]]:
    """Return the times since ``since_s`` that p2p transfers and other stages took, along the chain that ends a wait."""
    start_s, end_s, lanes = trace.spans.start_s, trace.spans.end_s, trace.spans.lanes
    at, found = -1 if cause is None else cause, []
    while at >= 0 and end_s[at] > since_s:
        begun_s, ready_s = start_s[at], end_s[binds[at]] if binds[at] >= 0 else 0.0
        if lanes[at] in P2P and end_s[at] > max(begun_s, since_s):
            found.append((lanes[at], max(begun_s, since_s), end_s[at]))
        if lanes[at] in ACROSS_STAGES and begun_s - max(ready_s, since_s) > LEAST_BUBBLE_S:
            found.append((BUBBLE, max(ready_s, since_s), begun_s))
        at = binds[at]
    return found


def _without(part: tuple[float, float], start_s: float, end_s: float) -> list[tuple[float, float]]:
    """Return what is left of ``part`` without [start_s, end_s)."""
    left = [(part[0], min(part[1], start_s)), (max(part[0], end_s), part[1])]
    return [(a, b) for a, b in left if b - a > 0]


def passes_of(trace: Trace, *, bridge_s: float) -> list[Pass]:
    """Return the compute lane's passes in order; a gap longer than ``bridge_s`` divides one."""
    spans = trace.spans
    found: list[Pass] = []
    for name, lane, start, end in zip(spans.ids, spans.lanes, spans.start_s, spans.end_s, strict=True):
        if lane != "compute" or end <= start:
            continue
        found_in = _PASS.match(name)
        phase = name.rsplit("/", 2)[-2] if name.count("/") > 1 else "other"
        number = -1 if found_in is None else int(found_in[2 if trace.micro_batches == 1 else 1])
        key = (number, "bwd" if found_in and phase == "rec" else phase)
        last = found[-1] if found else None
        if last is not None and (last.number, last.phase) == key and start - last.end_s <= bridge_s:
            found[-1] = Pass(*key, last.start_s, end, last.busy_s + end - start)
        else:
            found.append(Pass(*key, start, end, end - start))
    return found


def busy_share(trace: Trace) -> float:
    """Return the fraction of the step that compute is busy, or of the part of it that was played."""
    whole_s = trace.step_s if trace.micro_batches_played == trace.micro_batches else played_s(trace)
    spans = trace.spans
    busy_s = sum(e - s for lane, s, e in zip(spans.lanes, spans.start_s, spans.end_s, strict=True) if lane == "compute")
    return busy_s / whole_s if whole_s else 0.0


def played_s(trace: Trace) -> float:
    """Return the end of the last span, in seconds; less than ``step_s`` when equal micro-batches were played once."""
    return max(trace.spans.end_s, default=trace.step_s)


def first_micro_batch(trace: Trace) -> tuple[float, float] | None:
    """Return start and end of the first micro-batch in seconds; None when the spans hold only one micro-batch."""
    starts: dict[str, float] = {}
    ends: dict[str, float] = {}
    for name, start, end in zip(trace.spans.ids, trace.spans.start_s, trace.spans.end_s, strict=True):
        if match := _MICRO_BATCH.match(name):
            starts[match[1]] = min(starts.get(match[1], start), start)
            ends[match[1]] = max(ends.get(match[1], end), end)
    if len(ends) < 2:
        return None
    first = min(ends, key=int)
    return starts[first], ends[first]
