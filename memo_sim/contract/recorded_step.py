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


class RecordedMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fullest instant of a memory snapshot."""

    peak_bytes: Bytes
    buffers: int
    live: list[LiveBytes]
    """The largest first."""
    notes: list[str] = []


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
