"""Shows a validation as text: each case with its errors, and the accuracy by source, system and length."""

from __future__ import annotations

from collections.abc import Sequence

from memo_sim.contract.plain_text import one_line
from memo_sim.contract.units import counted, format_percent, format_tokens
from memo_sim.contract.validation import CaseReport, Validation
from memo_sim.views.accuracy import QUANTITIES, Accuracy, HeldOut, summarise
from memo_sim.views.plan_table import BEYOND, layout_label, short_of
from memo_sim.views.text_table import number, percent, text_table, warning_lines

LABELS = {
    "mfu": "MFU",
    "tgs": "TGS",
    "step_ms": "step",
    "allocated_gib": "allocated",
    "reserved_gib": "reserved",
    "allocation_retries": "retries",
}


def validation_table(
    validation: Validation, *, seq_tokens: Sequence[int] | None = None, held_out: Sequence[HeldOut] = ()
) -> str:
    """Return the cases, the summary of their errors, and the test of the intervals where ``held_out`` has one.

    ``seq_tokens`` of the cases adds a summary by length.
    """
    blocks = [
        *warning_lines(case_warnings(validation.cases)),
        case_table(validation.cases),
        summary_table(validation.cases, seq_tokens=seq_tokens),
    ]
    return "\n\n".join([*blocks, interval_table(held_out)] if held_out else blocks)


def case_warnings(cases: Sequence[CaseReport]) -> list[str]:
    """Return every warning about a case's profile or prediction once, with the first case that has it."""
    first: dict[str, str] = {}
    for case in cases:
        for text in case.predicted.warnings:
            first.setdefault(text, case.case)
    return [f"{case}: {text}" for text, case in first.items()]


INTERVAL_HEADERS = ("class", "sources", "rows", "held out", "inside", "by source", "median width", "80 % error")


def interval_rows(held_out: Sequence[HeldOut]) -> list[list[str | None]]:
    """Return the test of the intervals by class, with the columns ``INTERVAL_HEADERS``."""
    rows: list[list[str | None]] = []
    for test in held_out:
        head: list[str | None] = [test.name, str(test.sources), str(test.known)]
        if not test.rows:
            rows.append([*head, "too few other rows", None, None, None, None])
            continue
        inside = f"{test.inside}/{test.rows} ({percent(test.inside / test.rows, digits=0)})"
        figures = percent(test.by_source, digits=0), percent(test.median_width), percent(test.error)
        rows.append([*head, counted(test.held_out, "source"), inside, *figures])
    return rows


def interval_table(held_out: Sequence[HeldOut]) -> str:
    """Return how the intervals do on rows of sources that they were made without, by class."""
    return "80 % intervals without a row's own source\n" + text_table(
        INTERVAL_HEADERS, interval_rows(held_out), "lrrlrrrr"
    )


def case_table(cases: Sequence[CaseReport]) -> str:
    """Return one row per case: status, then each measured quantity as predicted, expected and error.

    Allocation retries are shown wherever they are predicted: few sources report them, and they show what unplanned
    memory costs.
    """
    quantities = [
        q
        for q in QUANTITIES
        if any(getattr(c.expected, q) is not None for c in cases)
        or (q == "allocation_retries" and any(c.predicted.allocation_retries is not None for c in cases))
    ]
    headers = ["case", "system", "", "status", "expected", "layout", "alpha"]
    for quantity in quantities:
        headers += [LABELS[quantity], "expected", "error"]
    rows: list[list[str | None]] = []
    for case in cases:
        predicted, expected = case.predicted, case.expected
        wrong = " !" if case.error.status is False else ""
        row: list[str | None] = [case.case, case.system, "fitted" if case.fitted else ""]
        beyond = " *" if predicted.outside_calibration else ""
        row += [f"{short_of(predicted.status)}{wrong}{beyond}", expected.status and short_of(expected.status)]
        row.append(None if predicted.layout is None else layout_label(predicted.layout))
        row.append(number(predicted.alpha, 3))
        for quantity in quantities:
            row += [_value(quantity, getattr(side, quantity)) for side in (predicted, expected)]
            row.append(percent(getattr(case.error, quantity), signed=True))
        rows.append(row)
    table = text_table(headers, rows, "llllllr" + "rrr" * len(quantities))
    reasons = [one_line(f"{c.case}: {c.predicted.reason}") for c in cases if c.predicted.reason]
    outside = sorted({curve for c in cases for curve in c.predicted.outside_calibration})
    if outside:
        table += f"\n{BEYOND}: {', '.join(outside)}"
    return "\n".join([table, "", *reasons]) if reasons else table


def summary_table(cases: Sequence[CaseReport], *, seq_tokens: Sequence[int] | None = None) -> str:
    """Return the accuracy by source, by system and by length where there are several, and of all cases."""
    blocks = []
    for title, groups in (("source", [c.source for c in cases]), ("system", [c.system for c in cases])):
        if len(set(groups)) > 1:
            blocks.append(accuracy_table(summarise(cases, groups), title))
    if seq_tokens is not None and len(set(seq_tokens)) > 1:
        order = sorted(range(len(cases)), key=lambda i: seq_tokens[i])
        by_length = summarise([cases[i] for i in order], [format_tokens(seq_tokens[i]) for i in order])
        blocks.append(accuracy_table(by_length, "length"))
    return "\n\n".join([*blocks, accuracy_table(summarise(cases), "")])


def accuracy_table(accuracies: Sequence[Accuracy], title: str) -> str:
    """Return one row for each group and quantity: count, bias, mean and largest error, correct statuses."""
    rows: list[list[str | None]] = []
    for accuracy in accuracies:
        status = f"{accuracy.statuses_right}/{accuracy.statuses}" if accuracy.statuses else None
        head = [accuracy.group, "fitted" if accuracy.fitted else "predicted", str(accuracy.rows), status]
        for quantity, errors in accuracy.errors.items():
            rows.append(
                [
                    *head,
                    LABELS[quantity],
                    str(errors.count),
                    percent(errors.bias, digits=2, signed=True),
                    percent(errors.mean_abs, digits=2),
                    percent(errors.max_abs, digits=2),
                    errors.worst,
                ]
            )
            head = ["", "", "", ""]
        if not accuracy.errors:
            rows.append([*head, *[None] * 6])
    headers = [title, "rows", "", "status right", "quantity", "n", "bias", "mean |error|", "max |error|", "worst case"]
    return text_table(headers, rows, "llrrlrrrrl")


def _value(quantity: str, value: float | None) -> str | None:
    """Return a quantity in its unit: MFU in percent, the others as in the case file."""
    if value is None:
        return None
    return format_percent(value, 2) if quantity == "mfu" else f"{value:.1f}"
