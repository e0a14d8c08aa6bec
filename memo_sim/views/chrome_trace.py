"""Writes traces as one Chrome JSON file for https://ui.perfetto.dev and ``chrome://tracing``.

Each trace is a process (``rank 0 predicted``, ``rank 0 measured``). Its time starts at 0 with its step, so processes
can be compared. The file follows Perfetto's rules: slices of one thread nest or do not overlap, so a serial lane is a
thread; slices of zero length are left out; events are sorted by time. A layer's phase (``l12 bwd``) is a slice around
its instructions.
"""

from __future__ import annotations

import gzip
import math
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


def write_chrome_trace(traces: Sequence[Trace], path: str | Path) -> None:
    """Write the traces as Chrome JSON, compressed when the name ends in ``.gz``.

    Raises:
        UsageError: when the file cannot be written; an existing file stays as it was.
    """
    raw = msgspec.json.encode(chrome_trace(traces)) + b"\n"
    codec.write_bytes(path, gzip.compress(raw, mtime=0) if Path(path).suffix.lower() == ".gz" else raw)


def chrome_trace(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the traces as one Chrome JSON object."""
    names = _process_names(traces)
    lanes = lanes_of(traces)
    metadata: list[Event] = []
    events: list[Event] = []
    for pid, (name, trace) in enumerate(zip(names, traces, strict=True), start=1):
        own = lanes_of([trace])
        tids = {lane: tid for tid, lane in enumerate(lanes, start=STEP_THREAD + 1) if lane in own}
        metadata += _metadata(pid, name, tids)
        events += _slices(pid, trace, tids) + _waits(pid, trace, tids)
        events += _counters(pid, "device_bytes", trace.device_memory)
        events += _counters(pid, "host_bytes", trace.host_memory)
    # An outer slice must come before the inner slices that start at the same time.
    events.sort(key=lambda e: (e["ts"], -e.get("dur", 0.0)))
    ranks = {t.rank for t in traces}
    return {
        "traceEvents": metadata + events,
        "displayTimeUnit": "ms",
        "schemaVersion": 1,
        "distributedInfo": {
            "rank": min(ranks, default=0),
            "world_size": max((t.world_size for t in traces), default=1),
        },
        "otherData": {
            "origin": " and ".join(dict.fromkeys(t.origin for t in traces)),
            "program_sha256": " ".join(dict.fromkeys(t.program_sha256 for t in traces)),
        },
    }


def _process_names(traces: Sequence[Trace]) -> list[str]:
    """Return the process name of each trace; equal names are numbered."""
    names, seen = [], Counter[str]()
    for trace in traces:
        name = f"rank {trace.rank} {trace.origin}"
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


def _slices(pid: int, trace: Trace, tids: dict[str, int]) -> list[Event]:
    """Return the step, the phases of places and the instructions as slices."""
    args: dict[str, Any] = {"micro_batches": trace.micro_batches, "micro_batches_played": trace.micro_batches_played}
    found = [_slice((pid, STEP_THREAD), "step", "step", (0.0, trace.step_s), args)]
    for bar in bars_of(trace):
        args = {"place": bar.place.where, "busy_us": round(bar.busy_s * 1e6, 3)}
        found.append(_slice((pid, tids[bar.lane]), bar.place.label, "phase", (bar.start_s, bar.end_s), args))
    spans = trace.spans
    for name, op, lane, start, end in zip(spans.ids, spans.ops, spans.lanes, spans.start_s, spans.end_s, strict=True):
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


def _waits(pid: int, trace: Trace, tids: dict[str, int]) -> list[Event]:
    """Return an instant event on the waiting lane for each wait."""
    lane_of = dict(zip(trace.spans.ids, trace.spans.lanes, strict=True))
    events = []
    for wait in trace.waits:
        lane = lane_of.get(wait.instruction)
        if lane is None:
            continue
        args = {
            "instruction": wait.instruction,
            "waits_for": wait.waits_for,
            "wait_us": round(wait.seconds * 1e6, 3),
        }
        event: Event = {"ph": "i", "s": "t", "name": f"waits for {lane_of.get(wait.waits_for, 'other')}", "cat": "wait"}
        events.append(
            event | {"ts": _microseconds(_nanoseconds(wait.start_s)), "pid": pid, "tid": tids[lane], "args": args}
        )
    return events


def _counters(pid: int, name: str, curve: MemoryCurve) -> list[Event]:
    """Return the curve as counter events: bytes by class and their total, one event per instant."""
    classes = [c for c, values in curve.bytes_by_class.items() if any(values)]
    at: dict[int, Event] = {}
    for i, time_s in enumerate(curve.time_s if classes else []):
        live = {c: curve.bytes_by_class[c][i] for c in classes}
        at[_nanoseconds(time_s)] = {"total": sum(live.values()), **live}
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
