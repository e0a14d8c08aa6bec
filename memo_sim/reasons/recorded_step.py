"""Holds a recorded step against a profile: by kind of work, by size, and what ran beside what.

Recorded work with known sizes is priced as an instruction of a program is: the same work, the same pricer. So a factor
between measured and predicted is one of the profile, or of the machine, and not of a model of the job.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from memo_sim.contract.attention_kernels import ATTENTION_KERNELS
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Layout
from memo_sim.contract.recorded_step import KindTime, LiveBytes, RecordedMemory, RecordedStep, ShapeTime
from memo_sim.contract.requests import Requests
from memo_sim.costs.pricing import Pricer
from memo_sim.observed.kineto import Recording
from memo_sim.observed.operations import Operation, operations_of
from memo_sim.program.ir.work import Attention, Collective

Intervals = list[tuple[float, float]]

MOST_SHAPES, MOST_LIVE = 20, 12
"""How many sizes and how many origins of buffers are listed."""
MICRO = 1e-6


@dataclass(frozen=True)
class Priced:
    """One operation with the seconds that the profile predicts; None with the reason where it predicts nothing."""

    operation: Operation
    predicted_s: float | None
    reason: str = ""


def price_recording(recording: Recording, cluster: Cluster, hardware: Hardware) -> tuple[list[Priced], list[str]]:
    """Return the operations of the recorded steps with their predictions, and the curves read outside their range.

    A collective is priced as one over neighbouring ranks, which is how it was recorded.
    """
    first, last = recording.steps[0][0], recording.steps[-1][1]
    pricers: dict[int, Pricer] = {}
    found = []
    for operation in operations_of(recording):
        if not first <= operation.recorded.launched_us <= last:
            continue
        ranks = operation.work.ranks if isinstance(operation.work, Collective) else 1
        if ranks not in pricers:
            pricers[ranks] = Pricer(hardware, cluster, Layout(tp=ranks))
        found.append(_priced(_with_known_kernel(operation, hardware), pricers[ranks], cluster))
    return found, sorted({name for pricer in pricers.values() for name in pricer.outside})


def _with_known_kernel(operation: Operation, hardware: Hardware) -> Operation:
    """Return the operation with an attention kernel of the same generation that the profile has, where it has one."""
    work = operation.work
    known = {table.kernel for table in hardware.attention}
    if not isinstance(work, Attention) or work.kernel in known:
        return operation
    generation = ATTENTION_KERNELS[work.kernel].generation
    alike = sorted(kernel for kernel in known if ATTENTION_KERNELS[kernel].generation == generation)
    return replace(operation, work=replace(work, kernel=alike[0])) if alike else operation


def _priced(operation: Operation, pricer: Pricer, cluster: Cluster) -> Priced:
    if operation.work is None:
        return Priced(operation, None, operation.note)
    if isinstance(operation.work, Collective) and operation.work.ranks > cluster.devices:
        return Priced(operation, None, f"{operation.work.ranks} ranks are more than {cluster.name} has")
    try:
        return Priced(operation, pricer.seconds(operation.work))
    except Infeasible as error:
        return Priced(operation, None, error.what)


def step_of(
    recording: Recording, priced: Sequence[Priced], outside: list[str], *, trace: str, hardware: Hardware
) -> RecordedStep:
    """Return the document of a recording whose work was priced."""
    steps = len(recording.steps)
    spans: dict[str, Intervals] = {"compute": [], "collective": [], "copy": []}
    for one in priced:
        recorded = one.operation.recorded
        spans[_lane(one.operation.kind)].append((recorded.start_us, recorded.end_us))
    compute, collective, copies = (union(spans[lane]) for lane in ("compute", "collective", "copy"))
    computing_or_talking = union([*compute, *collective])
    everything = union([*computing_or_talking, *copies])
    step_s = sum(end - start for start, end in recording.steps) * MICRO / steps

    def per_step(intervals: Intervals) -> float:
        return length(intervals) * MICRO / steps

    return RecordedStep(
        trace=trace,
        device=recording.device,
        hardware=hardware.name,
        steps=steps,
        steps_marked=recording.marked,
        step_s=step_s,
        compute_s=per_step(compute),
        collective_s=per_step(collective),
        exposed_collective_s=per_step(collective) - _shared(collective, compute) * MICRO / steps,
        copy_s=per_step(copies),
        exposed_copy_s=per_step(copies) - _shared(copies, computing_or_talking) * MICRO / steps,
        idle_s=max(0.0, step_s - per_step(everything)),
        kinds=_kinds(priced, steps),
        shapes=_shapes(priced, steps),
        outside_calibration=outside,
    )


def memory_of(requests: Requests, notes: list[str]) -> RecordedMemory:
    """Return what is alive at the fullest instant of a snapshot, by where it was allocated."""
    changes: dict[int, int] = defaultdict(int)
    for lower, upper, size in zip(requests.lower, requests.upper, requests.size_bytes, strict=True):
        changes[lower] += size
        changes[upper] -= size
    live = most = 0
    at = min(changes)
    for instant in sorted(changes):
        live += changes[instant]
        if live > most:
            most, at = live, instant
    count: Counter[str] = Counter()
    size_of: Counter[str] = Counter()
    rows = zip(requests.ids, requests.lower, requests.upper, requests.size_bytes, strict=True)
    for name, lower, upper, size in rows:
        if lower <= at < upper:
            origin = name.partition("#")[0] or "allocated before the recording, or without a Python frame"
            count[origin] += 1
            size_of[origin] += size
    largest = [LiveBytes(name=name, count=count[name], bytes=size) for name, size in size_of.most_common(MOST_LIVE)]
    return RecordedMemory(peak_bytes=most, buffers=count.total(), live=largest, notes=notes)


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Return the same points as intervals that do not touch, in order.

    >>> union([(3, 4), (0, 2), (1, 3)])
    [(0, 4)]
    """
    found: Intervals = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Intervals) -> float:
    """Return the sum of the lengths."""
    return sum(end - start for start, end in intervals)


def _shared(left: Intervals, right: Intervals) -> float:
    """Return the length of what two unions have in common."""
    return length(left) + length(right) - length(union([*left, *right]))


def _lane(kind: str) -> str:
    if kind.startswith("collective"):
        return "collective"
    return "copy" if kind.startswith("copy.") else "compute"


def _kinds(priced: Sequence[Priced], steps: int) -> list[KindTime]:
    groups: dict[str, list[Priced]] = defaultdict(list)
    for one in priced:
        groups[one.operation.kind].append(one)
    found = []
    for kind, ones in groups.items():
        reasons = Counter(one.reason for one in ones if one.predicted_s is None and one.reason)
        found.append(
            KindTime(
                kind=kind,
                calls=len(ones) / steps,
                measured_s=sum(one.operation.recorded.seconds for one in ones) / steps,
                compared_s=sum(one.operation.recorded.seconds for one in ones if one.predicted_s is not None) / steps,
                predicted_s=sum(one.predicted_s or 0.0 for one in ones) / steps,
                not_compared=reasons.most_common(1)[0][0] if reasons else "",
            )
        )
    return sorted(found, key=lambda kind: -kind.measured_s)


def _shapes(priced: Sequence[Priced], steps: int) -> list[ShapeTime]:
    groups: dict[tuple[str, str], list[Priced]] = defaultdict(list)
    for one in priced:
        if one.predicted_s is not None and one.operation.shape:
            groups[one.operation.kind, one.operation.shape].append(one)
    ordered = sorted(groups.items(), key=lambda item: -sum(one.operation.recorded.seconds for one in item[1]))
    return [
        ShapeTime(
            kind=kind,
            shape=shape,
            calls=len(ones) / steps,
            measured_s=median(one.operation.recorded.seconds for one in ones),
            predicted_s=median(one.predicted_s or 0.0 for one in ones),
        )
        for (kind, shape), ones in ordered[:MOST_SHAPES]
    ]
