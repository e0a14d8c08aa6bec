"""Reads a PyTorch profiler trace (Kineto's Chrome JSON, plain or gzipped) as the work of a device.

    operator (CPU thread)   aten::mm  [4096, 1024] x [1024, 512]
    launch (CPU thread)        cudaLaunchKernel  correlation 7
    device (stream)                                ampere_bf16_s16816gemm...  correlation 7

A kernel belongs to the innermost operator that was running on its thread when it was launched. Shapes come from that
operator, so the profiler needs ``record_shapes=True``. A trace without device events is a CPU's: there an operator is
the work itself, less what the operators inside it take.

Times are in microseconds, as Kineto writes them.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal

import msgspec

from memo_sim.contract.codec import decode_foreign
from memo_sim.contract.errors import BadInput
from memo_sim.observed.whole_operators import is_whole

MOST_BYTES = 2**32
"""A trace that unpacks to more is refused."""
MOST_US = 1e17
"""The longest time in a trace; microseconds since 1970 are 1.8e15."""
MOST_SIZE = 2**48
RANK = re.compile(r"\d{1,9}", re.ASCII)
STEP = "ProfilerStep#"
FIRST_NAMES = {"Operator": "cpu_op", "Runtime": "cuda_runtime", "Kernel": "kernel"} | {
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
}
"""Categories as PyTorch named them before 1.13."""
GRADIENTS = "autograd::engine::evaluate_function"
RECORD = "record with torch.profiler.profile(record_shapes=True) and export_chrome_trace"

DeviceKind = Literal["kernel", "copy", "memset", "operator"]


class _Event(msgspec.Struct):
    """One entry of ``traceEvents``; other fields are skipped."""

    ph: str = ""
    name: str = ""
    cat: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float | str | None = None
    dur: float | str | None = None
    args: dict[str, Any] | None = None


class _Device(msgspec.Struct):
    name: str = ""


class _Trace(msgspec.Struct, rename="camel"):
    """The parts of the file that are read."""

    trace_events: list[_Event]
    device_properties: list[_Device] = []
    distributed_info: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Operator:
    """A PyTorch operator call: name, shapes and dtypes of its inputs, values of its scalar inputs where recorded."""

    name: str
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    backward: bool = False
    """Whether autograd's engine called it."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """What NCCL recorded of a collective: its name, elements in and out, dtype, ranks of its group."""

    name: str
    elements_in: int
    elements_out: int
    dtype: str
    ranks: tuple[int, ...]
    group_size: int


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel, copy or memset of a device; on a CPU, one operator without the operators inside it."""

    name: str
    kind: DeviceKind
    launched_us: float
    """When the host launched it; when it began, where the trace does not say."""
    start_us: float
    end_us: float
    stream: str
    operators: tuple[Operator, ...] = ()
    """The operators that were running when it was launched, the innermost first."""
    moved_bytes: int = 0
    collective: CollectiveCall | None = None
    in_graph: bool = False
    """Whether a CUDA graph launched it; then no operator is known."""
    busy_us: float = -1.0
    """Microseconds of its own where these are less than from start to end (a CPU's operators); -1: all of them."""

    @property
    def seconds(self) -> float:
        """How long the device worked on it."""
        return (self.end_us - self.start_us if self.busy_us < 0 else self.busy_us) * 1e-6


@dataclass(frozen=True, slots=True)
class Recording:
    """The work of the recorded steps. ``steps`` are their start and end; one, of everything, where none is marked."""

    device: str
    """The device's name as its driver gives it; empty for a CPU."""
    steps: tuple[tuple[float, float], ...]
    work: tuple[Work, ...]
    marked: bool
    """Whether the profiler marked steps (``profiler.step()``)."""
    rank: int = 0
    world_size: int = 1
    """Ranks of the job, where the trace names them."""
    labels: tuple[str, ...] = ()
    """The names of the marked steps: ``ProfilerStep#3``."""
    shapes: bool = True
    """Whether shapes were recorded."""

    @property
    def on_gpu(self) -> bool:
        """Whether the trace has device events."""
        return any(one.kind != "operator" for one in self.work)


def read_recording(raw: bytes, where: str) -> Recording:
    """Return the work in a trace.

    Raises:
        BadInput: when it is not a Kineto trace, has no operators and no device events, or its steps have no duration.
    """
    what = "not a trace of PyTorch's profiler"
    trace = decode_foreign(_unpacked(raw, where), _Trace, what=what, where=where, hint=RECORD)
    events = [event for event in trace.trace_events if event.ph == "X" and _time(event) is not None]
    for event in events:
        start, end = _span(event)
        if not (abs(start) <= MOST_US and 0 <= end - start <= MOST_US):
            raise BadInput(
                "an event has a time that no trace has",
                where=where,
                got=f"{event.name}: ts {event.ts}, dur {event.dur}",
            )
    operators, launches, device, marks = [], {}, [], []
    for event in events:
        match FIRST_NAMES.get(event.cat or "", event.cat):
            case "cpu_op" | "user_annotation" if event.name.startswith(STEP):
                marks.append((*_span(event), event.name))
            case "cpu_op":
                operators.append(event)
            case "cuda_runtime" | "cuda_driver" | "hip_runtime":
                launches[_number(event, "correlation")] = event
            case "kernel" | "gpu_memcpy" | "gpu_memset":
                device.append(event)
            case _:
                pass
    if not operators and not device:
        raise BadInput("the trace has neither operators nor device events", where=where, hint=RECORD)
    if device:
        stacks = _stacks(operators, launches.values())
        work = [_device_work(event, stacks, launches) for event in device]
    else:
        work = _operator_work(operators)
    work.sort(key=lambda one: one.start_us)
    names = {one.name for one in trace.device_properties if one.name} if device else set()
    span = (min(one.start_us for one in work), max(one.end_us for one in work))
    marks.sort()
    steps = [(start, end) for start, end, _ in marks] or [span]
    if not any(end > start for start, end in steps):
        raise BadInput("the recorded steps have no duration", where=where, hint=RECORD)
    own = trace.distributed_info or {}
    return Recording(
        ", ".join(sorted(names)),
        tuple(steps),
        tuple(work),
        marked=bool(marks),
        rank=_whole(own.get("rank")),
        world_size=max(1, _whole(own.get("world_size"))),
        labels=tuple(name for _, _, name in marks),
        shapes=any(any(operator.shapes) for one in work for operator in one.operators),
    )


def _unpacked(raw: bytes, where: str) -> bytes:
    if not raw.startswith(b"\x1f\x8b"):
        return raw
    try:
        with gzip.GzipFile(fileobj=BytesIO(raw)) as packed:
            found = packed.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput("the file cannot be unpacked", where=where, got=str(error), wanted="a gzipped trace") from None
    if len(found) > MOST_BYTES:
        raise BadInput("the trace is too large", where=where, wanted=f"at most {MOST_BYTES} bytes unpacked")
    return found


def _time(event: _Event) -> float | None:
    """Return when an event begins; None when the file does not say it as a number."""
    return float(event.ts) if isinstance(event.ts, (int, float)) else None


def _span(event: _Event) -> tuple[float, float]:
    start = _time(event) or 0.0
    return start, start + (float(event.dur) if isinstance(event.dur, (int, float)) else 0.0)


def _number(event: _Event, key: str) -> int:
    """Return a whole number among an event's arguments; -1 when there is none."""
    value = (event.args or {}).get(key, -1)
    return value if isinstance(value, int) else -1


def _stacks(operators: Sequence[_Event], launches: Iterable[_Event]) -> dict[int, tuple[Operator, ...]]:
    """Return the operators that were running at each launch, by the launch's correlation, the innermost first."""
    by_thread: dict[tuple[Any, Any], list[tuple[float, int, _Event]]] = defaultdict(list)
    for event in operators:
        by_thread[event.pid, event.tid].append((_span(event)[0], 0, event))
    for event in launches:
        by_thread[event.pid, event.tid].append((_span(event)[0], 1, event))
    found: dict[int, tuple[Operator, ...]] = {}
    for entries in by_thread.values():
        open_now: list[tuple[float, Operator]] = []
        for start, is_launch, event in sorted(entries, key=lambda entry: (entry[0], entry[1], -_span(entry[2])[1])):
            while open_now and open_now[-1][0] <= start:
                open_now.pop()
            if is_launch:
                found[_number(event, "correlation")] = tuple(operator for _, operator in reversed(open_now))
            else:
                backward = any(operator.backward for _, operator in open_now[-1:])
                open_now.append((_span(event)[1], _operator(event, backward=backward)))
    return found


def _operator(event: _Event, *, backward: bool) -> Operator:
    args = event.args or {}
    shapes = args.get("Input Dims") or args.get("Input dims") or []
    return Operator(
        name=event.name,
        shapes=tuple(_shape(shape) for shape in shapes) if isinstance(shapes, list) else (),
        dtypes=_texts(args.get("Input type")),
        values=_texts(args.get("Concrete Inputs")),
        backward=backward or event.name.startswith(GRADIENTS),
    )


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _shape(value: object) -> tuple[int, ...]:
    """Return a tensor's shape; an empty one for a scalar or a list of tensors."""
    if isinstance(value, list) and all(isinstance(size, int) and 0 <= size < MOST_SIZE for size in value):
        return tuple(value)
    return ()


def _device_work(event: _Event, stacks: dict[int, tuple[Operator, ...]], launches: dict[int, _Event]) -> Work:
    args = event.args or {}
    start, end = _span(event)
    correlation = _number(event, "correlation")
    kinds: dict[str, DeviceKind] = {"gpu_memcpy": "copy", "gpu_memset": "memset"}
    category = event.cat or ""
    launch = launches.get(correlation)
    return Work(
        name=event.name,
        kind=kinds.get(FIRST_NAMES.get(category, category), "kernel"),
        launched_us=start if launch is None else _span(launch)[0],
        start_us=start,
        end_us=end,
        stream=str(args.get("stream", event.tid)),
        operators=() if launch is None else stacks.get(correlation, ()),
        moved_bytes=_whole(args.get("bytes")),
        collective=_collective(args),
        in_graph=launch is not None and "GraphLaunch" in launch.name,
    )


def _collective(args: dict[str, Any]) -> CollectiveCall | None:
    name = args.get("Collective name")
    if not isinstance(name, str):
        return None
    listed = str(args.get("Process Group Ranks", "")).strip("[]").replace(" ", "")
    ranks = tuple(int(rank) for rank in listed.split(",") if RANK.fullmatch(rank))
    size = args.get("Group size")
    return CollectiveCall(
        name=name,
        elements_in=_whole(args.get("In msg nelems")),
        elements_out=_whole(args.get("Out msg nelems")),
        dtype=str(args.get("dtype", "")),
        ranks=ranks,
        group_size=size if isinstance(size, int) else len(ranks),
    )


def _whole(value: object) -> int:
    return value if isinstance(value, int) and 0 < value < MOST_SIZE else 0


def _operator_work(operators: Sequence[_Event]) -> list[Work]:
    """Return a CPU's operators as work, each without the time of the operators inside it.

    A recorded product or attention call keeps all of its time, because what runs inside is its own implementation.
    """
    by_thread: dict[tuple[Any, Any], list[_Event]] = defaultdict(list)
    for event in operators:
        by_thread[event.pid, event.tid].append(event)
    found: list[Work] = []
    for (_, thread), events in by_thread.items():
        own: dict[int, float] = {}
        open_now: list[tuple[float, int, Operator, bool]] = []
        made: list[tuple[_Event, tuple[Operator, ...]]] = []
        for event in sorted(events, key=lambda e: (_span(e)[0], -_span(e)[1])):
            start, end = _span(event)
            while open_now and open_now[-1][0] <= start:
                open_now.pop()
            inside_whole = any(whole for *_, whole in open_now[-1:])
            backward = bool(open_now) and open_now[-1][2].backward
            operator = _operator(event, backward=backward)
            if not inside_whole:
                if open_now:
                    own[open_now[-1][1]] -= end - start
                own[len(made)] = end - start
                made.append((event, (operator, *(outer for _, _, outer, _ in reversed(open_now)))))
            open_now.append((end, len(made) - 1, operator, inside_whole or is_whole(operator.name)))
        found += [
            Work(event.name, "operator", _span(event)[0], *_span(event), str(thread), running, busy_us=own[number])
            for number, (event, running) in enumerate(made)
            if own[number] > 0
        ]
    return found
