"""Writes traces as one Chrome JSON file for https://ui.perfetto.dev and ``chrome://tracing``.

Each trace is a process (``rank 0 predicted``, ``rank 0 measured``). Its time starts at 0 with its step, so processes
can be compared. The file follows Perfetto's rules: slices of one thread nest or do not overlap, so a serial lane is a
thread; slices of zero length are left out; events are sorted by time. A layer's phase (``l12 bwd``) is a slice around
its instructions. Arrows lead from what a wait was for to the instruction that waited, and from each send to its
receive.

A long step repeats its micro-batches, and every instruction of all of them would be more than a browser opens. So a
file has the instructions of the first ones, as many as ``MOST_SLICES`` allows, and the phases of all; ``full`` writes
everything.
"""

from __future__ import annotations

import gzip
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from memo_sim.contract import codec
from memo_sim.contract.trace import MemoryCurve, Trace
from memo_sim.views.bars import bars_of, lanes_of, place_of

Event = dict[str, Any]

STEP_THREAD = 1
"""The thread above the lanes. Processes and threads count from 1: in Perfetto, 0 is the idle process of Linux."""
NS_PER_S = 1e9
MOST_SLICES = 20_000
"""Instructions in a file that is not full; with the phases of eight stages, waits and memory 15 MB."""

_PASS = re.compile(r"m\d+/s\d+(?=/)")
_TRANSFER = re.compile(r"(m\d+/s\d+)/.*/(send|recv)\.(\w+)")


def write_chrome_trace(traces: Sequence[Trace], path: str | Path, *, full: bool = False) -> None:
    """Write the traces as Chrome JSON, compressed when the name ends in ``.gz``.

    Raises:
        UsageError: when the file cannot be written; an existing file stays as it was.
    """
    raw = msgspec.json.encode(chrome_trace(traces, full=full)) + b"\n"
    codec.write_bytes(path, gzip.compress(raw, mtime=0) if Path(path).suffix.lower() == ".gz" else raw)


def chrome_trace(traces: Sequence[Trace], *, full: bool = False) -> dict[str, Any]:
    """Return the traces as one Chrome JSON object."""
    passes = None if full else _detailed(traces)
    names = _process_names(traces)
    lanes = lanes_of(traces)
    metadata: list[Event] = []
    events: list[Event] = []
    arrows = _Arrows()
    threads: list[dict[str, int]] = []
    for pid, (name, trace) in enumerate(zip(names, traces, strict=True), start=1):
        own = lanes_of([trace])
        tids = {lane: tid for tid, lane in enumerate(lanes, start=STEP_THREAD + 1) if lane in own}
        threads.append(tids)
        metadata += _metadata(pid, name, tids)
        events += _slices(pid, trace, tids, passes) + _waits(pid, trace, tids, passes, arrows)
        for counter, curve in (("device_bytes", trace.device_memory), ("host_bytes", trace.host_memory)):
            events += _counters(pid, counter, curve, _thinned(trace, curve, passes))
    _transfers(traces, threads, arrows)
    events += arrows.events
    # An outer slice must come before the inner slices that start at the same time.
    events.sort(key=lambda e: (e["ts"], -e.get("dur", 0.0)))
    ranks = {t.rank for t in traces}
    about = {
        "origin": " and ".join(dict.fromkeys(t.origin for t in traces)),
        "program_sha256": " ".join(dict.fromkeys(t.program_sha256 for t in traces)),
    }
    if passes is not None:
        about["note"] = f"instructions of {', '.join(passes)}; of the other passes, which repeat them, only the phases"
        names = [f"{name} (instructions of {', '.join(passes)})" for name in names]
    return {
        "traceEvents": metadata + events,
        "displayTimeUnit": "ms",
        "schemaVersion": 1,
        "distributedInfo": {
            "rank": min(ranks, default=0),
            "world_size": max((t.world_size for t in traces), default=1),
        },
        "otherData": about,
    }


Passes = dict[str, None] | None
"""Passes (``m0/s0``) whose instructions are written, in order; None: all."""


def _detailed(traces: Sequence[Trace]) -> Passes:
    """Return the passes whose instructions are written: the first ones, at least one; None when all have room."""
    count = Counter[str]()
    for trace in traces:
        count.update(_pass_of(name) for name in trace.spans.ids)
    left = MOST_SLICES - count.pop("", 0)
    chosen: dict[str, None] = {}
    for name, slices in count.items():
        left -= slices
        if left < 0 and chosen:
            return chosen
        chosen[name] = None
    return None


def _pass_of(instruction_id: str) -> str:
    """Return the micro-batch and subsequence of an instruction; "" outside of micro-batches."""
    match = _PASS.match(instruction_id)
    return match[0] if match else ""


def _written(instruction_id: str, passes: Passes) -> bool:
    return passes is None or (name := _pass_of(instruction_id)) == "" or name in passes


class _Arrows:
    """Pairs of flow events: from inside one slice to the beginning of another."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, name: str, begin: tuple[int, int, int], end: tuple[int, int, int]) -> None:
        """Add an arrow; both ends are (process, thread, nanoseconds)."""
        number = len(self.events) // 2 + 1
        for kind, (pid, tid, ns) in (("s", begin), ("f", end)):
            event: Event = {"ph": kind, "id": number, "name": name, "cat": name, "ts": _microseconds(ns)}
            self.events.append(event | {"pid": pid, "tid": tid, **({"bp": "e"} if kind == "f" else {})})


def _transfers(traces: Sequence[Trace], threads: Sequence[dict[str, int]], arrows: _Arrows) -> None:
    """Add an arrow from each send to its receive on another rank, which has the same name, time and origin."""
    sends: dict[tuple[str, str, str, int], tuple[int, int, int]] = {}
    receives = []
    for pid, (trace, tids) in enumerate(zip(traces, threads, strict=True), start=1):
        spans = trace.spans
        for name, lane, start, end in zip(spans.ids, spans.lanes, spans.start_s, spans.end_s, strict=True):
            match = _TRANSFER.fullmatch(name)
            if match is None or _nanoseconds(end) <= _nanoseconds(start):
                continue
            key = (trace.origin, match[1], match[3], _nanoseconds(start))
            at = (pid, tids[lane], _nanoseconds(start))
            if match[2] == "send":
                sends[key] = at
            else:
                receives.append((key, at))
    for key, at in receives:
        if (begin := sends.get(key)) is not None and begin[0] != at[0]:
            arrows.add("transfer", begin, at)


def _process_names(traces: Sequence[Trace]) -> list[str]:
    """Return the process name of each trace; equal names are numbered.

    Traces of several ranks are those of the pipeline's stages, in order; stages are counted from 1 (``stage_numbers``).
    """
    names, seen = [], Counter[str]()
    staged = len(traces) > 1 and len({trace.rank for trace in traces}) == len(traces)
    for number, trace in enumerate(traces, start=1):
        name = f"stage {number}, " * staged + f"rank {trace.rank} {trace.origin}"
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


def _metadata(pid: int, name: str, tids: dict[str, int]) -> list[Event]:
    """Return the events that name and order a process and its threads."""

    def named(kind: str, tid: int, args: dict[str, Any]) -> Event:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}

    events = [
        named("process_name", STEP_THREAD, {"name": name}),
        named("process_sort_index", STEP_THREAD, {"sort_index": pid}),
    ]
    for thread, tid in {"step": STEP_THREAD, **tids}.items():
        events.append(named("thread_name", tid, {"name": thread}))
        events.append(named("thread_sort_index", tid, {"sort_index": tid}))
    return events


def _slices(pid: int, trace: Trace, tids: dict[str, int], passes: Passes) -> list[Event]:
    """Return the step, the phases of places and the instructions as slices."""
    args: dict[str, Any] = {"micro_batches": trace.micro_batches, "micro_batches_played": trace.micro_batches_played}
    found = [_slice((pid, STEP_THREAD), "step", "step", (0.0, trace.step_s), args)]
    for bar in bars_of(trace):
        args = {"place": bar.place.where, "busy_us": round(bar.busy_s * 1e6, 3)}
        found.append(_slice((pid, tids[bar.lane]), bar.place.label, "phase", (bar.start_s, bar.end_s), args))
    spans = trace.spans
    for name, op, lane, start, end in zip(spans.ids, spans.ops, spans.lanes, spans.start_s, spans.end_s, strict=True):
        if not _written(name, passes) and not _TRANSFER.fullmatch(name):
            continue
        place = place_of(name)
        args = {"id": name, "op": op}
        found.append(_slice((pid, tids[lane]), place.name, place.phase, (start, end), args))
    return [event for event in found if event is not None]


def _slice(
    thread: tuple[int, int], name: str, category: str, from_to_s: tuple[float, float], args: dict[str, Any]
) -> Event | None:
    """Return a complete event; None when it lasts less than a nanosecond."""
    start, end = (_nanoseconds(s) for s in from_to_s)
    if end <= start:
        return None
    event: Event = {"ph": "X", "name": name, "cat": category, "ts": _microseconds(start)}
    return event | {"dur": _microseconds(end - start), "pid": thread[0], "tid": thread[1], "args": args}


def _waits(pid: int, trace: Trace, tids: dict[str, int], passes: Passes, arrows: _Arrows) -> list[Event]:
    """Return an instant event on the waiting lane for each wait, and add an arrow from what it was for."""
    spans = trace.spans
    row_of = {name: row for row, name in enumerate(spans.ids)}
    events = []
    for wait in trace.waits:
        row, cause = row_of.get(wait.instruction), row_of.get(wait.waits_for)
        if row is None or not _written(wait.instruction, passes):
            continue
        tid = tids[spans.lanes[row]]
        args = {
            "instruction": wait.instruction,
            "waits_for": wait.waits_for,
            "wait_us": round(wait.seconds * 1e6, 3),
        }
        of = "other" if cause is None else spans.lanes[cause]
        event: Event = {"ph": "i", "s": "t", "name": f"waits for {of}", "cat": "wait"}
        events.append(event | {"ts": _microseconds(_nanoseconds(wait.start_s)), "pid": pid, "tid": tid, "args": args})
        if cause is None or not _written(wait.waits_for, passes):
            continue
        begun, ended = _nanoseconds(spans.start_s[cause]), _nanoseconds(spans.end_s[cause])
        at = _nanoseconds(spans.start_s[row])
        if ended > begun and _nanoseconds(spans.end_s[row]) > at:
            arrows.add("wait", (pid, tids[of], ended - 1), (pid, tid, at))
    return events


def _thinned(trace: Trace, curve: MemoryCurve, passes: Passes) -> list[int]:
    """Return the points of a curve that are written: of a phase without instructions the fullest one."""
    if passes is None or not any(map(any, curve.bytes_by_class.values())):
        return list(range(len(curve.time_s)))
    bars = [bar for bar in bars_of(trace) if bar.lane == "compute"]
    total = [sum(step) for step in zip(*curve.bytes_by_class.values(), strict=True)]
    kept, fullest, at = [], -1, 0
    for point, time_s in enumerate(curve.time_s):
        before = at
        while at < len(bars) and bars[at].end_s <= time_s:
            at += 1
        if fullest >= 0 and at != before:
            kept.append(fullest)
            fullest = -1
        if at == len(bars) or _written(f"{bars[at].place.where}/", passes):
            kept.append(point)
        elif fullest < 0 or total[point] > total[fullest]:
            fullest = point
    return [*kept, fullest] if fullest >= 0 else kept


def _counters(pid: int, name: str, curve: MemoryCurve, points: Sequence[int]) -> list[Event]:
    """Return points of a curve as counter events: bytes by class and their total, one event per instant."""
    classes = [c for c, values in curve.bytes_by_class.items() if any(values)]
    at: dict[int, Event] = {}
    for i in points if classes else ():
        live = {c: curve.bytes_by_class[c][i] for c in classes}
        at[_nanoseconds(curve.time_s[i])] = {"total": sum(live.values()), **live}
    return [
        {"ph": "C", "name": name, "ts": _microseconds(ns), "pid": pid, "tid": STEP_THREAD, "args": live}
        for ns, live in at.items()
    ]


def _nanoseconds(seconds: float) -> int:
    """Return the time in whole nanoseconds, Perfetto's own unit, so that adjacent slices stay adjacent."""
    return round(seconds * NS_PER_S)


def _microseconds(nanoseconds: int) -> float:
    """Return the time in microseconds such that a reader that truncates (older Perfetto) recovers the nanoseconds."""
    time_us = nanoseconds / 1000
    return time_us if int(time_us * 1000.0) == nanoseconds else math.nextafter(time_us, math.inf)
