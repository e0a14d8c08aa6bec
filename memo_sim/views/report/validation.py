"""The page of a validation: measured against predicted, accuracy by group, the worst cases, every case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memo_sim.contract.accuracy import GroupAccuracy
from memo_sim.contract.units import counted
from memo_sim.contract.validation import CaseReport, Validation
from memo_sim.views.accuracy import JUDGED, HeldOut, judged_error
from memo_sim.views.chart import COLOURS
from memo_sim.views.report.curves import Chart, Line
from memo_sim.views.report.page import Charts, Page, Pairs, Paragraph, Section
from memo_sim.views.text_table import percent
from memo_sim.views.validation_report import validation_sections
from memo_sim.views.validation_table import LABELS


def validation_page(
    validation: Validation,
    accuracies: Mapping[str, GroupAccuracy],
    held_out: Sequence[HeldOut],
    notes: Sequence[tuple[str, str]],
    *,
    command: str,
    created: str,
    version: str,
) -> Page:
    """Return the page; arguments as in ``validation_report``."""
    sections = validation_sections(validation, accuracies, held_out, notes)
    about = Pairs([("command", command), ("created", created), ("memo", version)])
    return Page(
        title="Validation: predicted and published steps",
        subtitle="No GPU was used: every measurement is published, every prediction was computed now.",
        verdict=_verdict(validation.cases),
        sections=[*_pictures(validation.cases), *sections, Section("Provenance", [about])],
    )


def _verdict(cases: Sequence[CaseReport]) -> list[str]:
    """Return how near predictions of speed are, over rows on which nothing was fitted."""
    errors = [error for case in cases if not case.fitted and (error := judged_error(case)) is not None]
    right = [case.error.status for case in cases if not case.fitted and case.error.status is not None]
    lines = []
    if errors:
        mean, bias = sum(map(abs, errors)) / len(errors), sum(errors) / len(errors)
        rows = f"{counted(len(errors), 'row')} with a measured speed, on which nothing was fitted"
        lines.append(f"Mean error of speed {percent(mean)}, bias {percent(bias, signed=True)}: {rows}.")
    if right:
        lines.append(f"{sum(right)} of {counted(len(right), 'row')} fit or run out of memory as measured.")
    return lines or ["No row of these cases has a measured value and a prediction."]


def _pictures(cases: Sequence[CaseReport]) -> list[Section]:
    """Return a chart for each quantity of speed: predicted over measured, a colour for each source."""
    charts = []
    for quantity in JUDGED:
        scale = 100.0 if quantity == "mfu" else 1.0
        lines: dict[str, list[tuple[float, float, str]]] = {}
        for case in cases:
            measured, predicted = getattr(case.expected, quantity), getattr(case.predicted, quantity)
            if measured is not None and predicted is not None and not case.fitted:
                name = f"{case.case}: {percent(predicted / measured - 1, signed=True)}" if measured else case.case
                lines.setdefault(case.source, []).append((measured * scale, predicted * scale, name))
        if lines:
            points = [value for each in lines.values() for x, y, _ in each for value in (x, y)]
            ends = [(min(points), min(points), "as measured"), (max(points), max(points), "as measured")]
            colours = [COLOURS[n % len(COLOURS)] for n in range(len(lines))]
            shown = [
                Line(source, c, each, joined=False) for (source, each), c in zip(lines.items(), colours, strict=True)
            ]
            diagonal = Line("predicted as measured", "#8c8c8c", ends, marked=False)
            charts.append(Chart(LABELS[quantity], "measured", "predicted", [diagonal, *shown]))
    note = Paragraph("Rest the pointer on a point for its case. Fitted rows are left out.", quiet=True)
    return [Section("Predicted over measured", [Charts(charts), note])] if charts else []
