"""Shows a recorded step beside its prediction as text."""

from __future__ import annotations

from collections.abc import Sequence

from memo_sim.contract.interchange import ImportedJob
from memo_sim.contract.plain_text import one_line
from memo_sim.contract.recorded_step import RankTime, RecordedMemory, RecordedStep
from memo_sim.contract.units import counted, format_bytes, format_seconds
from memo_sim.views.import_page import import_summary
from memo_sim.views.text_table import percent, text_table

LEAST_SHARE = 0.001
"""Kinds below this part of the recorded work are not shown."""
LONGEST_NAME = 70
"""Characters of a kernel's name that are shown; templates are longer than a line."""


def recorded_table(job: RecordedStep) -> str:
    """Return the text of a recorded step beside its prediction."""
    parts = [recorded_head(job), *(["\n".join(map(one_line, job.notes))] if job.notes else [])]
    if job.ranks:
        parts.append(_ranks(job))
    parts += [_time(job), _compared(job), _kinds(job)]
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
    return f"{job.trace}: {_steps(job)} on {device}, held against the profile {job.hardware}{marked}"


def diagnosis_text(
    job: RecordedStep | None,
    profile: str,
    changes: Sequence[str],
    priced: ImportedJob | None = None,
    *,
    output: str | None = None,
    everything: bool = False,
) -> str:
    """Return what ``memo-sim doctor`` prints: the recorded step, what changes in the profile, and the job's price.

    ``output`` is the profile's file, where it is written; ``everything``: with each option of the job on its own line.
    """
    told = [one_line(text) for text in changes] or ["nothing: no kind of work has enough calls and time"]
    head = f"{output} is {profile} with:" if output else "measured; -o PROFILE writes a profile with:"
    lines = [] if job is None else [recorded_table(job)]
    if output or job is None:
        lines.append("\n".join([head, *told]))
    if priced is not None:
        lines.append(f"With the measured rates:\n{import_summary(priced, everything=everything)}")
    return "\n\n".join(lines)


def _steps(job: RecordedStep) -> str:
    if len(job.step_times_s) < 2:
        return f"{counted(job.steps, 'step')} of {format_seconds(job.step_s)}"
    shortest, longest = format_seconds(min(job.step_times_s)), format_seconds(max(job.step_times_s))
    names = one_line(f"{job.step_names[0]} to {job.step_names[-1]}")
    return f"mean of {counted(job.steps, 'step')} ({names}), {format_seconds(job.step_s)} ({shortest} to {longest})"


def _ranks(job: RecordedStep) -> str:
    rows = [
        [
            str(rank.rank),
            one_line(rank.trace),
            *(
                format_seconds(value)
                for value in (
                    *(rank.step_s, rank.compute_s, rank.collective_s, rank.exposed_collective_s),
                    *(rank.exposed_copy_s, rank.idle_s),
                )
            ),
        ]
        for rank in job.ranks
    ]
    heads = ["rank", "trace", "step", "computing", "collectives", "exposed", "exposed copies", "nothing"]
    slowest, fastest = (pick(job.ranks, key=_computing) for pick in (max, min))
    skew = slowest.compute_s / fastest.compute_s - 1 if fastest.compute_s else 0.0
    least = min(rank.exposed_collective_s for rank in job.ranks)
    told = (
        f"Rank {slowest.rank} computes longest, by {percent(skew)} more than rank {fastest.rank}; the rest is about it."
        f"\nOn every rank {format_seconds(least)} of communication are exposed; what is more waits for others."
    )
    return f"{text_table(heads, rows, 'rlrrrrrr')}\n{told}"


def _computing(rank: RankTime) -> float:
    return rank.compute_s


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


def _compared(job: RecordedStep) -> str:
    """Return which part of the work is compared, and what is not recognised."""
    if not job.work_s:
        return "No work was recorded."
    text = f"Compared with the profile: {percent(job.compared_s / job.work_s)} of the recorded work"
    if not job.unknown_s:
        return f"{text}. All of it is recognised."
    rows = [
        [
            _short(unknown.name),
            _calls(unknown.calls),
            format_seconds(unknown.measured_s),
            percent(unknown.measured_s / job.work_s),
            unknown.why,
        ]
        for unknown in job.unknown
    ]
    table = text_table(["not recognised", "calls", "time", "of the work", "why"], rows, "lrrrl")
    return f"{text}; not recognised: {percent(job.unknown_s / job.work_s)}.\n{table}"


def _calls(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _short(name: str) -> str:
    text = one_line(name)
    return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 3] + "..."


def _kinds(job: RecordedStep) -> str:
    rows = [
        [
            kind.kind,
            _calls(kind.calls),
            format_seconds(kind.measured_s),
            percent(kind.measured_s / job.step_s),
            format_seconds(kind.compared_s) if kind.predicted_s else None,
            format_seconds(kind.predicted_s) if kind.predicted_s else None,
            f"{kind.predicted_s / kind.compared_s:.3f}" if kind.predicted_s and kind.compared_s else None,
            kind.not_compared,
        ]
        for kind in job.kinds
        if kind.measured_s >= LEAST_SHARE * job.work_s
    ]
    heads = ["kind", "calls", "measured", "of the step", "compared", "predicted", "ratio", "why not the rest"]
    return text_table(heads, rows, "lrrrrrrl")


def _shapes(job: RecordedStep) -> str:
    rows = [
        [
            shape.kind,
            shape.shape,
            _calls(shape.calls),
            format_seconds(shape.measured_s),
            format_seconds(shape.predicted_s),
            f"{shape.predicted_s / shape.measured_s:.3f}" if shape.measured_s else None,
        ]
        for shape in job.shapes
    ]
    return text_table(["largest", "size", "calls", "measured", "predicted", "ratio"], rows, "llrrrr")


def _memory(memory: RecordedMemory) -> str:
    parts = []
    if memory.by_class:
        heads = [f"alive at the peak of {format_bytes(memory.peak_bytes)}", "size"]
        rows: list[list[str | None]] = [[each.name, format_bytes(each.bytes)] for each in memory.by_class]
        if memory.predicted_peak_bytes is not None:
            heads.append("predicted")
            for row, each in zip(rows, memory.by_class, strict=True):
                row.append(None if each.predicted_bytes is None else format_bytes(each.predicted_bytes))
            rows.append(["all", format_bytes(memory.peak_bytes), format_bytes(memory.predicted_peak_bytes)])
        parts.append(text_table(heads, rows, "lrr"[: len(heads)]))
    rows = [[live.name, str(live.count), format_bytes(live.bytes)] for live in memory.live]
    rest = memory.peak_bytes - sum(live.bytes for live in memory.live)
    if rest > 0:
        rows.append(["others", str(memory.buffers - sum(live.count for live in memory.live)), format_bytes(rest)])
    head = "by the line that allocated" if parts else f"alive at the peak of {format_bytes(memory.peak_bytes)}"
    parts.append(text_table([head, "buffers", "size"], rows, "lrr"))
    return "\n\n".join([*parts, *(["\n".join(map(one_line, memory.notes))] if memory.notes else [])])
