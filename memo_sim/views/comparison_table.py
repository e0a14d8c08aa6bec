"""Shows a comparison of predicted and measured as text: step, peak, bytes moved, lanes, kinds of instructions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memo_sim.contract.comparison import Comparison, StepFigures
from memo_sim.contract.plain_text import one_line
from memo_sim.contract.units import format_bytes, format_seconds
from memo_sim.views.bars import LANES
from memo_sim.views.text_table import percent, text_table


def comparison_table(comparison: Comparison, *, top: int | None = None) -> str:
    """Return predicted, measured and their ratio: the whole step, then busy time by lane and by kind of instruction.

    Kinds are sorted by their measured time; ``top`` limits how many are shown.
    """
    predicted, measured, ratio = comparison.predicted, comparison.measured, comparison.ratio
    steps = "1 step" if comparison.steps_measured == 1 else f"median of {comparison.steps_measured} steps"
    blocks = [f"measured on {one_line(comparison.machine)}, {steps}"]

    def one(label: str, name: str, form: Callable[[float], str]) -> list[str | None]:
        before = None if predicted is None else form(getattr(predicted, name))
        share = None if ratio is None else f"{getattr(ratio, name):.3f}"
        return [label, before, form(getattr(measured, name)), share]

    rows = [one("step", "step_s", format_seconds), one("peak device memory", "peak_device_bytes", format_bytes)]
    for lane in ("d2h", "h2d"):
        before = None if predicted is None else _moved(predicted, lane)
        share = None if ratio is None else _ratio(ratio.moved_bytes, lane)
        if after := _moved(measured, lane):
            rows.append([f"moved {lane}", before, after, share])
    blocks.append(text_table(["", "predicted", "measured", "ratio"], rows, "lrrr"))
    if comparison.step_s_by_rank:
        blocks.append(_ranks(comparison))

    lanes = {**dict.fromkeys(LANES), **dict.fromkeys(measured.lanes)}
    blocks.append(
        _busy_table(
            "busy by lane",
            {} if predicted is None else predicted.lanes,
            measured.lanes,
            {} if ratio is None else ratio.lanes,
            order=list(lanes),
        )
    )
    ops = [{} if predicted is None else predicted.ops, measured.ops, {} if ratio is None else ratio.ops]
    if any(ops):
        order = sorted({**ops[0], **ops[1]}, key=lambda op: (-ops[1].get(op, 0.0), op))
        blocks.append(_busy_table("busy by kind", *ops, order=order[:top]))
        if top is not None and len(order) > top:
            blocks[-1] += f"\n... and {len(order) - top} more"
    return "\n\n".join(blocks)


def _ranks(comparison: Comparison) -> str:
    """Return each rank's step time and peak; the comparison uses the slowest rank's step."""
    slowest = comparison.step_s_by_rank.index(max(comparison.step_s_by_rank))
    found = zip(comparison.step_s_by_rank, comparison.peak_device_bytes_by_rank, strict=True)
    rows = [
        [f"{rank} (slowest)" if rank == slowest else str(rank), format_seconds(step_s), format_bytes(peak)]
        for rank, (step_s, peak) in enumerate(found)
    ]
    return text_table(["rank", "step", "peak device memory"], rows, "lrr")


def _moved(figures: StepFigures, lane: str) -> str | None:
    return None if figures.moved_bytes is None else format_bytes(getattr(figures.moved_bytes, lane))


def _busy_table(
    title: str,
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    ratio: Mapping[str, float],
    *,
    order: list[str],
) -> str:
    """Return busy times by name; names without time on both sides are left out."""
    total = sum(measured.values())
    rows = []
    for name in order:
        before, after = predicted.get(name), measured.get(name)
        if before or after:
            share = percent(after / total) if after and total else None
            times = [None if value is None else format_seconds(value) for value in (before, after)]
            rows.append([name, *times, _ratio(ratio, name), share])
    return text_table([title, "predicted", "measured", "ratio", "of measured"], rows, "lrrrr")


def _ratio(ratios: Mapping[str, float], name: str) -> str | None:
    return f"{ratios[name]:.3f}" if name in ratios else None
