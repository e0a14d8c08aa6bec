"""Shows a recorded step beside its prediction as text."""

from __future__ import annotations

from collections.abc import Sequence

from memo_sim.contract.interchange import ImportedJob
from memo_sim.contract.plain_text import one_line
from memo_sim.contract.recorded_step import RecordedMemory, RecordedStep
from memo_sim.contract.units import counted, format_bytes, format_seconds
from memo_sim.views.import_page import import_summary
from memo_sim.views.text_table import percent, text_table

LEAST_SHARE = 0.001
"""Kinds below this part of the step are not shown."""


def recorded_table(job: RecordedStep) -> str:
    """Return the text of a recorded step beside its prediction."""
    parts = [recorded_head(job), _time(job), _kinds(job)]
    if job.collective_s:
        parts.append("A collective's time contains its wait for the slowest rank, which no profile predicts.")
    if job.shapes:
        parts.append(_shapes(job))
    if job.memory is not None:
        parts.append(_memory(job.memory))
    if job.outside_calibration:
        parts.append(f"Outside the sizes that the profile was measured at: {', '.join(job.outside_calibration)}.")
    return "\n\n".join(parts)


def recorded_head(job: RecordedStep) -> str:
    """Return one line: the trace, its steps, the device, and the profile."""
    device = job.device or "a CPU"
    marked = "" if job.steps_marked else " (no steps are marked; the whole trace counts as one: call profiler.step())"
    return (
        f"{job.trace}: {counted(job.steps, 'step')} of {format_seconds(job.step_s)} on {device},"
        f" held against the profile {job.hardware}{marked}"
    )


def diagnosis_text(
    job: RecordedStep | None,
    profile: str,
    changes: Sequence[str],
    priced: ImportedJob | None = None,
    *,
    output: str | None = None,
) -> str:
    """Return what ``memo-sim doctor`` prints: the recorded step, what changes in the profile, and the job's price.

    ``output`` is the profile's file, where it is written.
    """
    told = [one_line(text) for text in changes] or ["nothing: no kind of work has enough calls and time"]
    head = f"{output} is {profile} with:" if output else "measured; -o PROFILE writes a profile with:"
    lines = [] if job is None else [recorded_table(job)]
    if output or job is None:
        lines.append("\n".join([head, *told]))
    if priced is not None:
        lines.append(priced_text(priced))
    return "\n\n".join(lines)


def priced_text(priced: ImportedJob) -> str:
    """Return what a job costs with the rates that were measured."""
    return f"With the measured rates:\n{import_summary(priced)}"


def _time(job: RecordedStep) -> str:
    rows = [
        ("computing", job.compute_s),
        ("collectives", job.collective_s),
        ("collectives beside which nothing was computed", job.exposed_collective_s),
        ("copies between device and host", job.copy_s),
        ("copies beside which nothing else ran", job.exposed_copy_s),
        ("nothing ran on the device", job.idle_s),
    ]
    cells = [[name, format_seconds(value), percent(value / job.step_s)] for name, value in rows if value > 0]
    return text_table(["per step", "time", "of the step"], cells, "lrr")


def _kinds(job: RecordedStep) -> str:
    rows = [
        [
            kind.kind,
            f"{kind.calls:.0f}",
            format_seconds(kind.measured_s),
            percent(kind.measured_s / job.step_s),
            format_seconds(kind.compared_s) if kind.predicted_s else None,
            format_seconds(kind.predicted_s) if kind.predicted_s else None,
            f"{kind.predicted_s / kind.compared_s:.3f}" if kind.predicted_s and kind.compared_s else None,
            kind.not_compared,
        ]
        for kind in job.kinds
        if kind.measured_s >= LEAST_SHARE * job.step_s
    ]
    heads = ["kind", "calls", "measured", "of the step", "compared", "predicted", "ratio", "why not the rest"]
    return text_table(heads, rows, "lrrrrrrl")


def _shapes(job: RecordedStep) -> str:
    rows = [
        [
            shape.kind,
            shape.shape,
            f"{shape.calls:.3g}",
            format_seconds(shape.measured_s),
            format_seconds(shape.predicted_s),
            f"{shape.predicted_s / shape.measured_s:.3f}" if shape.measured_s else None,
        ]
        for shape in job.shapes
    ]
    return text_table(["largest", "size", "calls", "measured", "predicted", "ratio"], rows, "llrrrr")


def _memory(memory: RecordedMemory) -> str:
    rows = [[live.name, str(live.count), format_bytes(live.bytes)] for live in memory.live]
    rest = memory.peak_bytes - sum(live.bytes for live in memory.live)
    if rest > 0:
        rows.append(["others", str(memory.buffers - sum(live.count for live in memory.live)), format_bytes(rest)])
    table = text_table([f"alive at the peak of {format_bytes(memory.peak_bytes)}", "buffers", "size"], rows, "lrr")
    return "\n".join([table, *memory.notes])
