"""Packs the steps of a timeline into one base64 text: gzipped JSON with the names, followed by binary columns.

    length of the JSON (4 bytes) | JSON | zeros up to a multiple of 8 | column | column | ...

The JSON names every column's type, first byte and length. Times are whole nanoseconds, and a span's start is stored as
its distance from the end of the lane's previous span: mostly zero, so 100,000 spans need less than a megabyte. Nothing
of it can be read as HTML, because base64 has no ``<``.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from memo_sim.contract.plain_text import one_line, shortened
from memo_sim.contract.requests import Requests
from memo_sim.contract.trace import MemoryCurve, Trace
from memo_sim.views.bars import lanes_of, place_of, played_s, stalls_of
from memo_sim.views.palette import BUBBLE, BUBBLE_COLOUR, CLASSES, OTHER, PHASES, QUIET_TEXT, WAITS, ordered_classes
from memo_sim.views.step import Step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ALIGNMENT = 8
NS_PER_S = 1e9
NONE = 2**32 - 1
"""Stands for an instruction that the trace does not hold, as of another rank."""


class _Columns:
    """Binary columns one after the other, and where each of them lies."""

    def __init__(self) -> None:
        self.raw = bytearray()

    def add(self, values: Any, kind: str) -> list[Any]:
        """Append a column of numpy type ``kind``; return [kind, first byte, number of entries]."""
        import numpy as np

        column = np.asarray(values).astype(f"<{kind}")
        self.raw += bytes(-len(self.raw) % ALIGNMENT)
        at = len(self.raw)
        self.raw += column.tobytes()
        return [kind, at, len(column)]


class _Numbers:
    """Numbers each distinct text in the order of its first use."""

    def __init__(self) -> None:
        self.of: dict[Any, int] = {}

    def __call__(self, key: Any) -> int:
        return self.of.setdefault(key, len(self.of))


def packed(steps: Sequence[Step]) -> str:
    """Return the steps as base64 text for ``timeline.js``."""
    columns = _Columns()
    header = {
        "steps": [_step(step, columns) for step in steps],
        "phases": PHASES,
        "waits": {**WAITS, BUBBLE: BUBBLE_COLOUR},
        "classes": CLASSES,
        "other": OTHER,
        "quiet": QUIET_TEXT,
    }
    text = msgspec.json.encode(header)
    begin = 4 + len(text)
    raw = len(text).to_bytes(4, "little") + text + bytes(-begin % ALIGNMENT) + columns.raw
    return base64.b64encode(gzip.compress(raw, mtime=0)).decode("ascii")


def _step(step: Step, columns: _Columns) -> dict[str, Any]:
    trace = step.trace
    shown = {
        "name": _text(step.name),
        "origin": trace.origin,
        "step_s": trace.step_s,
        "end_s": played_s(trace),
        "micro_batches": trace.micro_batches,
        "played": trace.micro_batches_played,
        "capacity_bytes": step.capacity_bytes,
        "reserve_bytes": step.reserve_bytes,
        "held_bytes": step.held_bytes,
        "held_as": step.held_as,
        **_spans(trace, columns),
        "device": _curve(trace.device_memory, columns),
        "host": _curve(trace.host_memory, columns),
    }
    if step.buffers is not None:
        shown["buffers"] = _buffers(step.buffers, trace, columns)
    return shown


def _spans(trace: Trace, columns: _Columns) -> dict[str, Any]:
    spans = trace.spans
    lanes = lanes_of([trace])
    lane_number = {lane: number for number, lane in enumerate(lanes)}
    places, works = _Numbers(), _Numbers()
    gap, length, lane_of, place, work = [], [], [], [], []
    ended = dict.fromkeys(lanes, 0)
    row_of: dict[str, int] = {}
    for row, (name, op, lane, start_s, end_s) in enumerate(
        zip(spans.ids, spans.ops, spans.lanes, spans.start_s, spans.end_s, strict=True)
    ):
        start, end = round(start_s * NS_PER_S), round(end_s * NS_PER_S)
        gap.append(start - ended[lane])
        length.append(end - start)
        ended[lane] = end
        lane_of.append(lane_number[lane])
        parts = place_of(name)
        # An id is where/phase/name; the phase of an embedding is shown under another name.
        written = name[len(parts.where) + 1 : -len(parts.name) - 1] if parts.phase != "other" else ""
        place.append(places((_text(parts.where), parts.phase, written, parts.layer)))
        work.append(works((_text(parts.name), _text(op))))
        row_of[name] = row
    waits = [w for w in trace.waits if w.instruction in row_of and w.seconds > 0]
    began_s = {w.instruction: w.start_s for w in waits}
    stalls, causes = [s for s in stalls_of(trace) if s.end_s > s.start_s], _Numbers()
    cause = [causes(_text(stall.waits_for)) for stall in stalls]
    return {
        "lanes": [_text(lane) for lane in lanes],
        "places": list(places.of),
        "works": list(works.of),
        "gap": columns.add(gap, "f8"),
        "length": columns.add(length, "f8"),
        "lane": columns.add(lane_of, "u1"),
        "place": columns.add(place, "u4"),
        "work": columns.add(work, "u4"),
        "wait_row": columns.add([row_of[w.instruction] for w in waits], "u4"),
        "wait_for": columns.add([row_of.get(w.waits_for, NONE) for w in waits], "u4"),
        "wait_s": columns.add([w.seconds for w in waits], "f4"),
        "causes": list(causes.of),
        "stall_row": columns.add([row_of[s.instruction] for s in stalls], "u4"),
        "stall_cause": columns.add(cause, "u1"),
        "stall_after": columns.add([s.start_s - began_s[s.instruction] for s in stalls], "f4"),
        "stall_s": columns.add([s.end_s - s.start_s for s in stalls], "f4"),
    }


def _curve(curve: MemoryCurve, columns: _Columns) -> dict[str, Any]:
    """Return a curve without the classes that are empty: distances in time, and changes in bytes."""
    import numpy as np

    names = ordered_classes({name for name, values in curve.bytes_by_class.items() if any(values)})
    times_ns = np.round(np.array(curve.time_s) * NS_PER_S)
    live = [np.diff(np.array(curve.bytes_by_class[name], dtype=np.float64), prepend=0.0) for name in names]
    return {
        "classes": [_text(name) for name in names],
        "time": columns.add(np.diff(times_ns, prepend=0.0), "f8"),
        "bytes": [columns.add(change, "f8") for change in live],
    }


def _buffers(buffers: Requests, trace: Trace, columns: _Columns) -> dict[str, Any]:
    classes = _Numbers()
    numbers = [classes(_text(name)) for name in buffers.classes or [""] * len(buffers.ids)]
    return {
        "names": [_text(name) for name in buffers.ids],
        "classes": list(classes.of),
        "class_of": columns.add(numbers, "u1"),
        "lower": columns.add(buffers.lower, "u4"),
        "upper": columns.add(buffers.upper, "u4"),
        "bytes": columns.add(buffers.size_bytes, "f8"),
        "instant": columns.add(instants(buffers, trace), "u4"),
    }


def instants(buffers: Requests, trace: Trace) -> NDArray[np.int64]:
    """Return the row that each point of the device's curve shows: the fullest up to a kernel, from the one before."""
    import numpy as np

    rows = len(trace.spans.ids)
    change = np.zeros(rows + 1)
    np.add.at(change, np.array(buffers.lower, dtype=np.int64), np.array(buffers.size_bytes, dtype=np.float64))
    np.add.at(change, np.minimum(buffers.upper, rows), -np.array(buffers.size_bytes, dtype=np.float64))
    live = np.cumsum(change)[:rows]
    kernels = [row for row, lane in enumerate(trace.spans.lanes) if lane == "compute"]
    fullest, begin = [], 0
    for kernel in kernels:
        fullest.append(begin + int(np.argmax(live[begin : kernel + 1])))
        begin = kernel + 1
    return np.array(fullest, dtype=np.int64)


def _text(name: str) -> str:
    return one_line(shortened(name))
