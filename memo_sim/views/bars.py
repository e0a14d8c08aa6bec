"""Turns a trace into the bars of a picture: merges spans by place and phase, and finds the stalls of each lane.

    spans   | l0 norm1 | l0 qkv | l0 attn |        | l1 norm1 | l1 qkv |
    bars    |          l0 fwd             |        |      l1 fwd       |
    stalls                                |  d2h   |

Drawing is in ``timeline`` and its panels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from memo_sim.contract.trace import Trace

LANES = (
    *("compute", "d2h", "h2d", "tp", "ulysses", "cp", "metp", "replica", "shard", "replicate", "ends"),
    *("p2p", "send", "recv", "pp", "tied", "host"),
)
"""Lanes from top to bottom; other lanes of a trace follow in alphabetical order."""

_LAYER = re.compile(r"l(\d+)")
_MICRO_BATCH = re.compile(r"m(\d+)/")


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
class Stall:
    """A time in which ``lane`` was idle because an instruction of lane ``waits_for`` had not ended."""

    lane: str
    waits_for: str
    start_s: float
    end_s: float


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
    """Return every wait with both lanes; the lane ``other`` stands for an instruction that the trace does not hold."""
    lane_of = dict(zip(trace.spans.ids, trace.spans.lanes, strict=True))
    return [
        Stall(lane_of[w.instruction], lane_of.get(w.waits_for, "other"), w.start_s, w.start_s + w.seconds)
        for w in trace.waits
        if w.seconds > 0 and w.instruction in lane_of
    ]


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
