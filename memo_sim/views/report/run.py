"""The page of a measured step beside its prediction: both timelines, lanes and kinds, losses, ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memo_sim.contract.comparison import Comparison, Ratio, StepFigures
from memo_sim.contract.trace import Trace
from memo_sim.contract.units import counted, format_bytes, format_seconds, format_tokens
from memo_sim.views.bars import LANES
from memo_sim.views.palette import phase_colour
from memo_sim.views.report.curves import Chart, Line
from memo_sim.views.report.page import Block, Cell, Charts, Heading, Page, Pairs, Paragraph, Section, Table, Tiles
from memo_sim.views.report.page import Timeline as TimelineBlock
from memo_sim.views.report.shares import shares_note, shares_of
from memo_sim.views.step import Step
from memo_sim.views.text_table import percent


def run_page(
    comparison: Comparison, traces: Sequence[Trace], *, title: str, command: str, created: str, version: str = ""
) -> Page:
    """Return the report of ``memo-exec run`` or ``compare``; ``traces`` are the predicted one, where known, and the
    measured one.
    """
    steps = [Step(name=f"{trace.origin} · rank {trace.rank}", trace=trace) for trace in traces]
    measured = traces[-1]
    shares = shares_of(measured)
    note = Paragraph(shares_note(measured, shares), quiet=True)
    sections = [
        Section("", [_tiles(comparison)]),
        Section("Timeline and memory", [TimelineBlock(steps, "Predicted and measured step")]),
        Section("Where the measured step goes", [shares, note]),
        Section("Predicted and measured", _tables(comparison)),
        Section("Training", _training(comparison)),
        Section("Ranks", _ranks(comparison)),
        Section("Provenance", [_provenance(comparison, command, created, version)]),
    ]
    return Page(
        title=title,
        subtitle=f"Measured on {comparison.machine}",
        verdict=_verdict(comparison),
        sections=[section for section in sections if section.blocks],
    )


def _verdict(comparison: Comparison) -> list[str]:
    """Return how near the prediction is; without one, what was measured."""
    measured, predicted = comparison.measured, comparison.predicted
    steps = "one step" if comparison.steps_measured == 1 else f"the median of {comparison.steps_measured} steps"
    took = f"The measured step takes {format_seconds(measured.step_s)} ({steps})"
    if predicted is None or comparison.ratio is None:
        return [f"{took}; there is no prediction to compare it with."]
    error = percent(comparison.ratio.step_s - 1, signed=True)
    memory = percent(comparison.ratio.peak_device_bytes - 1, signed=True)
    peak = f"Device memory peaks at {format_bytes(measured.peak_device_bytes)}"
    return [
        f"{took}; {format_seconds(predicted.step_s)} were predicted ({error}).",
        f"{peak}; {format_bytes(predicted.peak_device_bytes)} were predicted ({memory}).",
    ]


def _tiles(comparison: Comparison) -> Tiles:
    measured, predicted = comparison.measured, comparison.predicted
    items = [("measured step", format_seconds(measured.step_s), f"median of {comparison.steps_measured}")]
    if predicted is not None:
        items.append(("predicted step", format_seconds(predicted.step_s), ""))
    if comparison.ratio is not None:
        items.append(("predicted / measured", f"{comparison.ratio.step_s:.3f}", ""))
    items.append(("measured peak", format_bytes(measured.peak_device_bytes), "device memory"))
    if predicted is not None:
        items.append(("predicted peak", format_bytes(predicted.peak_device_bytes), "device memory"))
    if comparison.losses:
        items.append(("last loss", f"{comparison.losses[-1]:.4f}", counted(len(comparison.losses), "step")))
    return Tiles(items)


def _tables(comparison: Comparison) -> list[Block]:
    """Return busy time by lane and by kind of instruction."""
    predicted, measured, ratio = comparison.predicted, comparison.measured, comparison.ratio
    lanes = [lane for lane in LANES if lane in measured.lanes]
    lanes += sorted(set(measured.lanes).difference(LANES))
    kinds = sorted(measured.ops, key=lambda op: (-measured.ops[op], op))
    blocks: list[Block] = []
    for title, order, of in (("Busy time by lane", lanes, "lanes"), ("Busy time by kind", kinds, "ops")):
        rows = _busy(order, _column(predicted, of), _column(measured, of), _column(ratio, of))
        if rows:
            blocks += [Heading(title), Table(["", "predicted", "measured", "predicted / measured"], rows, "lrrr")]
    return blocks


def _column(side: StepFigures | Ratio | None, of: str) -> Mapping[str, float]:
    found: Mapping[str, float] = {} if side is None else getattr(side, of)
    return found


def _busy(
    order: Sequence[str], predicted: Mapping[str, float], measured: Mapping[str, float], ratio: Mapping[str, float]
) -> list[list[Cell]]:
    """Return a row for each name that took time."""
    return [
        [
            name,
            format_seconds(predicted[name]) if name in predicted else None,
            format_seconds(measured[name]),
            f"{ratio[name]:.3f}" if name in ratio else None,
        ]
        for name in order
        if measured[name] or predicted.get(name)
    ]


def _training(comparison: Comparison) -> list[Block]:
    """Return loss and gradient norm by step; nothing for a single step."""
    charts = []
    for title, values, phase in (("Loss", comparison.losses, "fwd"), ("Gradient norm", comparison.grad_norms, "bwd")):
        if len(values) > 1:
            points = [(float(n), value, f"step {n}: {value:.6g}") for n, value in enumerate(values, start=1)]
            charts.append(Chart(title, "step", title.lower(), [Line(title, phase_colour(phase), points)]))
    return [Charts(charts)] if charts else []


def _ranks(comparison: Comparison) -> list[Block]:
    if not comparison.step_s_by_rank:
        return []
    slowest = comparison.step_s_by_rank.index(max(comparison.step_s_by_rank))
    found = zip(comparison.step_s_by_rank, comparison.peak_device_bytes_by_rank, strict=True)
    rows = [
        [f"{rank} (slowest)" if rank == slowest else str(rank), format_seconds(step_s), format_bytes(peak)]
        for rank, (step_s, peak) in enumerate(found)
    ]
    return [Table(["rank", "step", "peak device memory"], rows, "lrr")]


def _provenance(comparison: Comparison, command: str, created: str, version: str) -> Pairs:
    items = [
        ("command", command),
        ("created", created),
        ("machine", comparison.machine),
        ("memo", version),
        ("program's hash", comparison.program_sha256),
    ]
    return Pairs([(name, value) for name, value in items if value])


def run_title(model: str, seq_tokens: int) -> str:
    """Return the heading of a run's page."""
    return f"{model}, {format_tokens(seq_tokens)} tokens: measured and predicted"
