"""What a recorded step of a job did, beside what a profile predicts for the same work (``memo.recorded/1``)."""

from __future__ import annotations

import msgspec

from memo_sim.contract.units import Bytes, Seconds


class KindTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All work of one kind, per step."""

    kind: str
    calls: float
    measured_s: Seconds
    compared_s: Seconds
    """The part of ``measured_s`` whose sizes are known and that the profile can price."""
    predicted_s: Seconds
    """What the profile predicts for that part."""
    not_compared: str = ""
    """Why the rest was not compared; the most frequent reason."""


class ShapeTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls of one kind and size: all of a step's, and one of them."""

    kind: str
    shape: str
    calls: float
    """Per step."""
    measured_s: Seconds
    """Median of one call."""
    predicted_s: Seconds


class LiveBytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Buffers of one origin that are alive at the peak."""

    name: str
    count: int
    bytes: Bytes


class UnknownTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kernels, or operators of a CPU, of one name that are not recognised."""

    name: str
    calls: float
    """Per step."""
    measured_s: Seconds
    why: str


class RankTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The recorded step of one rank; times as in ``RecordedStep``."""

    rank: int
    trace: str
    step_s: Seconds
    compute_s: Seconds
    collective_s: Seconds
    exposed_collective_s: Seconds
    copy_s: Seconds
    exposed_copy_s: Seconds
    idle_s: Seconds


class ClassBytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one class of buffers takes at the peak."""

    name: str
    bytes: Bytes
    predicted_bytes: Bytes | None = None
    """At the predicted peak; null where no job was given to predict, or the prediction has no such class."""


class RecordedMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fullest instant of a memory snapshot."""

    peak_bytes: Bytes
    buffers: int
    live: list[LiveBytes]
    """The largest first."""
    notes: list[str] = []
    by_class: list[ClassBytes] = []
    """By the stacks that allocated; the largest first."""
    predicted_peak_bytes: Bytes | None = None
    """Live bytes at the peak of the job as predicted, without the reserve; null where no job was given."""


class RecordedStep(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.recorded/1"
):
    """Seconds are means over the recorded steps."""

    trace: str
    device: str
    """The device's name in the trace; empty for a CPU."""
    hardware: str
    """The profile that predicts."""
    steps: int
    steps_marked: bool
    """Whether the profiler marked the steps; otherwise the whole trace counts as one."""
    step_s: Seconds
    compute_s: Seconds
    """Seconds in which kernels that are no collectives ran; of a CPU, its operators."""
    collective_s: Seconds
    exposed_collective_s: Seconds
    """Seconds of collectives in which nothing was computed."""
    copy_s: Seconds
    """Seconds in which copies between device and host memory ran."""
    exposed_copy_s: Seconds
    """Seconds of such copies beside which nothing else ran."""
    idle_s: Seconds
    """Seconds of the step in which the device did nothing."""
    kinds: list[KindTime]
    shapes: list[ShapeTime]
    """What takes most of the step, the largest first."""
    memory: RecordedMemory | None = None
    outside_calibration: list[str] = []
    """Curves of the profile that were read outside the sizes they were measured at."""
    rank: int = 0
    """The rank that everything but ``ranks`` is about: of several traces, the one that computes longest."""
    ranks: list[RankTime] = []
    """All recorded ranks, in order; empty for a single trace."""
    step_names: list[str] = []
    """The profiler's names of the steps; empty where none is marked."""
    step_times_s: list[Seconds] = []
    work_s: Seconds = 0.0
    """Seconds of all recorded work, added up over streams."""
    compared_s: Seconds = 0.0
    """The part of it that the profile predicts."""
    unknown_s: Seconds = 0.0
    """The part of it that is not recognised."""
    unknown: list[UnknownTime] = []
    """The names that take most of ``unknown_s``, the largest first."""
    notes: list[str] = []
    """What the trace lacks, and what that makes impossible."""
