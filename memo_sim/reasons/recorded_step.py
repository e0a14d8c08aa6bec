"""Holds a recorded step against a profile: by kind of work, by size, and what ran beside what.

Recorded work with known sizes is priced as an instruction of a program is: the same work, the same pricer. So a factor
between measured and predicted is one of the profile, or of the machine, and not of a model of the job.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from memo_sim.contract.attention_kernels import ATTENTION_KERNELS
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Layout
from memo_sim.contract.recorded_step import (
    KindTime,
    RankTime,
    RecordedStep,
    ShapeTime,
    UnknownTime,
)
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.costs.curves import LogCurve
from memo_sim.costs.pricing import Pricer
from memo_sim.observed.correction import (
    MEMORY_BOUND,
    ROWWISE,
    attention_rate,
    collective_rate,
    library_rate,
    own_rate,
    product_rate,
)
from memo_sim.observed.kineto import Recording
from memo_sim.observed.operations import COMPILED, OTHER, Operation, operations_of
from memo_sim.observed.rowwise_operators import Traffic
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Attention, BatchedGemm, Collective, Copy, Gemm, Rowwise, Work
from memo_sim.reasons.disturbance import Disturbance

Intervals = list[tuple[float, float]]

MOST_SHAPES = 20
"""How many sizes are listed."""
MOST_UNKNOWN, UNEVEN = 8, 1.3
UNKNOWN = (OTHER, COMPILED)
MICRO = 1e-6
RATE_BOUND = 1.5
"""Work that is predicted to take less than this many launches says nothing of a rate."""


@dataclass(frozen=True)
class Priced:
    """One operation with the seconds that the profile predicts; None with the reason where it predicts nothing.

    ``rates`` has the predicted seconds by the name of each rate of the profile that they come from
    (``observed/correction.py``). Empty where the time says nothing of a rate: calls as short as a launch, products that
    wait for memory.
    """

    operation: Operation
    predicted_s: float | None
    reason: str = ""
    rates: Mapping[str, float] = field(default_factory=dict)


def price_recording(
    recording: Recording, cluster: Cluster, hardware: Hardware, *, devices: int = 1
) -> tuple[list[Priced], list[str]]:
    """Return the operations of the recorded steps with their predictions, and the curves read outside their range.

    Work is priced beside what ran beside it. The rank is the slowest of ``devices``.
    """
    first, last = recording.steps[0][0], recording.steps[-1][1]
    operations = [each for each in operations_of(recording) if first <= each.recorded.launched_us <= last]
    spans = [(lane_of(each.kind), each.recorded.start_us, each.recorded.end_us) for each in operations]
    most_ranks = max((each.work.ranks for each in operations if isinstance(each.work, Collective)), default=1)
    together = min(max(recording.world_size, most_ranks), cluster.devices_per_node)
    disturbance = Disturbance(spans if recording.on_gpu else (), hardware, cluster, together)
    pricers = _Pricers(hardware, cluster, devices)
    found = []
    for operation, span in zip(operations, spans, strict=True):
        one = pricers.price(_with_known_kernel(operation, hardware))
        found.append(_stretched(one, disturbance.stretch(*span)))
    return found, pricers.outside


def _stretched(one: Priced, factor: float) -> Priced:
    if one.predicted_s is None or factor == 1:
        return one
    rates = {name: seconds * factor for name, seconds in one.rates.items()}
    return replace(one, predicted_s=one.predicted_s * factor, rates=rates)


class _Pricers:
    """The prices of recorded work on one profile: a pricer for each form of group, and the row-wise curves."""

    def __init__(self, hardware: Hardware, cluster: Cluster, devices: int) -> None:
        self._hardware = hardware
        self._cluster = cluster
        self._devices = devices
        self._pricers: dict[Layout, Pricer] = {}
        self._floor_s = hardware.launch_floor_s.value
        self._common = LogCurve.of(hardware.memory_bound_bytes_per_s)
        self._own = {kind: LogCurve.of(curve) for kind, curve in hardware.rowwise_bytes_per_s.items()}
        eager = hardware.framework_rowwise_bytes_per_s.get("eager", {})
        self._eager = {str(pattern): LogCurve.of(curve) for pattern, curve in eager.items()}

    @property
    def outside(self) -> list[str]:
        """The curves that were read outside the sizes they were measured at."""
        return sorted({name for pricer in self._pricers.values() for name in pricer.outside})

    def price(self, operation: Operation) -> Priced:
        """Return an operation with its price alone."""
        work = operation.work
        if work is None:
            return Priced(operation, None, operation.note)
        if isinstance(work, Collective) and work.ranks > self._cluster.devices:
            return Priced(operation, None, f"{work.ranks} ranks are more than {self._cluster.name} has")
        if isinstance(work, Rowwise) and operation.traffic is not None:
            return self._rowwise(operation, work, operation.traffic)
        try:
            seconds = self._pricer(work, operation.stride).seconds(work)
        except Infeasible as error:
            return Priced(operation, None, error.what)
        return Priced(operation, seconds, rates=dict.fromkeys(self._rates_of(operation, work, seconds), seconds))

    def _pricer(self, work: Work, stride: int) -> Pricer:
        """Return the pricer for a group whose neighbours are ``stride`` ranks apart, as many groups as that at once."""
        layout = Layout(dp=self._devices)
        if isinstance(work, Collective):
            layout = Layout(tp=work.ranks) if work.group == "tp" else Layout(tp=stride, dp=work.ranks)
        if layout not in self._pricers:
            self._pricers[layout] = Pricer(self._hardware, self._cluster, layout)
        return self._pricers[layout]

    def _rates_of(self, operation: Operation, work: Work, seconds: float) -> tuple[str, ...]:
        """Return the name of the rate that decides the time of a product, an attention call, a copy or a collective."""
        match work:
            case Collective() as call:
                in_node = (call.ranks - 1) * operation.stride < self._cluster.devices_per_node
                return (collective_rate(call.kind, call.ranks),) if in_node else ()
            case _ if seconds < RATE_BOUND * self._floor_s:
                return ()
            case Gemm() | BatchedGemm():
                bound = seconds <= self._memory_s(work) * (1 + 1e-9)
                return () if bound else (product_rate(work.dtype, work.gemm_pass),)
            case Attention() as call:
                return (attention_rate(call.kernel, call.dtype, backward=call.backward),)
            case Copy() as copy:
                return (f"copy.{copy.direction}",)
            case _:
                return ()

    def _memory_s(self, work: Gemm | BatchedGemm) -> float:
        """Return the seconds in which a product's operands can be read and written."""
        batch = work.batch if isinstance(work, BatchedGemm) else 1
        elements = batch * (work.m * work.k + work.k * work.n + work.m * work.n)
        moved_bytes = elements * DTYPE_BYTES[work.dtype]
        return moved_bytes / self._common(moved_bytes)

    def _rowwise(self, operation: Operation, work: Rowwise, traffic: Traffic) -> Priced:
        """Return a row-wise operator's price by the most specific curve: its own, its pattern's, the common one."""
        own = next((kind for kind in (traffic.own, traffic.own.partition(".")[0]) if kind in self._own), None)
        if own is not None:
            rate, curve = own_rate(own), self._own[own]
        elif traffic.pattern in self._eager:
            rate, curve = library_rate("eager", traffic.pattern), self._eager[traffic.pattern]
        else:
            rate, curve = MEMORY_BOUND, self._common
        seconds = work.moved_bytes / curve(work.moved_bytes)
        if seconds < RATE_BOUND * self._floor_s:
            return Priced(operation, max(seconds, self._floor_s))
        rates = {ROWWISE: seconds, rate: seconds}
        if own is None and traffic.pattern == "elementwise":  # the common curve is about the same kernels
            rates[MEMORY_BOUND] = work.moved_bytes / self._common(work.moved_bytes)
        return Priced(operation, seconds, rates=rates)


def _with_known_kernel(operation: Operation, hardware: Hardware) -> Operation:
    """Return the operation with an attention kernel of the same generation that the profile has, where it has one."""
    work = operation.work
    known = {table.kernel for table in hardware.attention}
    if not isinstance(work, Attention) or work.kernel in known:
        return operation
    generation = ATTENTION_KERNELS[work.kernel].generation
    alike = sorted(kernel for kernel in known if ATTENTION_KERNELS[kernel].generation == generation)
    return replace(operation, work=replace(work, kernel=alike[0])) if alike else operation


def step_of(
    recording: Recording, priced: Sequence[Priced], outside: list[str], *, trace: str, hardware: Hardware
) -> RecordedStep:
    """Return the document of a recording whose work was priced."""
    steps = len(recording.steps)
    spans: dict[str, Intervals] = {"compute": [], "collective": [], "copy": []}
    for one in priced:
        recorded = one.operation.recorded
        spans[_part(one.operation.kind)].append((recorded.start_us, recorded.end_us))
    compute, collective, copies = (union(spans[lane]) for lane in ("compute", "collective", "copy"))
    computing_or_talking = union([*compute, *collective])
    everything = union([*computing_or_talking, *copies])
    step_times = [(end - start) * MICRO for start, end in recording.steps]
    step_s = sum(step_times) / steps

    def per_step(intervals: Intervals) -> float:
        return length(intervals) * MICRO / steps

    def seconds(ones: Iterable[Priced]) -> float:
        return sum(one.operation.recorded.seconds for one in ones) / steps

    unknown = [one for one in priced if one.operation.kind in UNKNOWN]
    return RecordedStep(
        trace=trace,
        device=recording.device or ("a GPU that it does not name" if recording.on_gpu else ""),
        hardware=hardware.name,
        steps=steps,
        steps_marked=recording.marked,
        step_s=step_s,
        compute_s=per_step(compute),
        collective_s=per_step(collective),
        exposed_collective_s=max(0.0, per_step(collective) - _shared(collective, compute) * MICRO / steps),
        copy_s=per_step(copies),
        exposed_copy_s=max(0.0, per_step(copies) - _shared(copies, computing_or_talking) * MICRO / steps),
        idle_s=max(0.0, step_s - per_step(everything)),
        kinds=_kinds(priced, steps),
        shapes=_shapes(priced, steps),
        outside_calibration=outside,
        rank=recording.rank,
        step_names=list(recording.labels),
        step_times_s=step_times if recording.marked else [],
        work_s=seconds(priced),
        compared_s=seconds(one for one in priced if one.predicted_s is not None),
        unknown_s=seconds(unknown),
        unknown=_unknown(unknown, steps),
        notes=_notes(recording, step_times),
    )


def rank_of(job: RecordedStep) -> RankTime:
    """Return the times of a rank's recorded step."""
    fields = {name: getattr(job, name) for name in RankTime.__struct_fields__}
    return RankTime(**fields)


def _unknown(ones: Sequence[Priced], steps: int) -> list[UnknownTime]:
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in ones:
        recorded = one.operation.recorded
        name = recorded.operators[0].name if recorded.operators and recorded.kind == "operator" else recorded.name
        groups[name, one.reason].append(recorded.seconds)
    ordered = sorted(groups.items(), key=lambda item: -sum(item[1]))
    return [
        UnknownTime(name=name, calls=len(times) / steps, measured_s=sum(times) / steps, why=why)
        for (name, why), times in ordered[:MOST_UNKNOWN]
    ]


def _notes(recording: Recording, step_times: Sequence[float]) -> list[str]:
    """Return what a trace lacks, and what that makes impossible."""
    notes = []
    if not recording.shapes:
        notes.append(
            "The trace has no shapes, so only collectives and copies are compared, and nothing else corrects the"
            " profile: record with torch.profiler.profile(record_shapes=True)."
        )
    if any(one.in_graph for one in recording.work):
        notes.append(
            "CUDA graphs launched kernels, and a graph's kernels have no operators and no sizes: record a step without"
            " them to compare (CUDA_GRAPHS off, torch.compile without mode reduce-overhead)."
        )
    if len(step_times) > 1 and max(step_times) > UNEVEN * median(step_times):
        slow = step_times.index(max(step_times))
        name = recording.labels[slow] if slow < len(recording.labels) else f"step {slow}"
        notes.append(
            f"{name} takes {max(step_times) / median(step_times):.1f} times the median step, and is part of the mean:"
            " record after more warm-up steps."
        )
    return notes


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


def lane_of(kind: str) -> Lane:
    """Return the lane of a kind of work; ``Lane.TP`` stands for all collectives."""
    if kind.startswith("collective"):
        return Lane.TP
    if kind.startswith("copy."):
        return Lane.D2H if kind.startswith("copy.d2h") else Lane.H2D
    return Lane.COMPUTE


def _part(kind: str) -> str:
    return {Lane.TP: "collective", Lane.COMPUTE: "compute"}.get(lane_of(kind), "copy")


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
