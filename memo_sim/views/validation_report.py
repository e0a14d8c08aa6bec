"""Writes a validation as Markdown or a page: accuracy by system, model and length, the worst cases, every case.

An error is predicted / measured - 1; a bias is the mean of signed errors. Fitted rows are counted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from memo_sim.contract.accuracy import GroupAccuracy
from memo_sim.contract.plain_text import in_markdown, one_line
from memo_sim.contract.units import format_percent, format_tokens
from memo_sim.contract.validation import CaseReport, Validation
from memo_sim.views.accuracy import JUDGED, Accuracy, HeldOut, judged_error, rank_correlation, summarise
from memo_sim.views.plan_table import layout_label, short_of
from memo_sim.views.report.page import Block, Bullets, Heading, Paragraph, Section, Table
from memo_sim.views.text_table import number, percent
from memo_sim.views.validation_table import INTERVAL_HEADERS, LABELS, case_warnings, interval_rows

WORST = 16
"""How many of the largest errors are explained."""

BETWEEN = "\x1f"
"""Joins the parts of a group's name; unlike a space or a bar, no name of a source has it."""

UNITS: dict[str, Callable[[float], str]] = {"mfu": lambda v: format_percent(v, 2)}
"""Formats by quantity; other quantities have one decimal, in the unit of their column."""

HOW_TO_READ = """An error is predicted / measured - 1; the bias is the mean of signed errors. Mean and largest error are
of absolute values. Rows on which a constant was fitted are marked, counted apart, and used for no interval. A
prediction sees only the row's question; layouts that a source does not print are searched under the system's rules.

The interval of a prediction comes from the rows of other sources on which nothing was fitted. It runs from prediction /
exp(half) to prediction x exp(half). Half is the typical error of a source of the same GPU generation and class of
framework, times what makes 80 % of a source's rows lie inside when it is left out; every source weighs the same. It is
wider for sequences longer, and jobs larger, than any row of the class, and for kernels that none of them has. Fewer
than five rows of the class make no interval.

"80 % of errors" is different: between these two lie the errors of 80 % of the rows of the same source and system. The
range always holds 0."""

HOW_INTERVALS_DO = """Every source was held out in turn, and its rows are counted that lie in the interval from the
other sources. 80 % is what the interval promises in the mean over sources ("by source"). The width is
(high - low) / predicted; 80 % of the rows held out have a smaller error than the last column, so a width of twice that
figure is what a perfect interval around the prediction would have. A class of few sources is above or below, because
the errors of sources differ by a factor of two, and those of a new source are unknown. The last line is about two plans
of one question: whether the ratio of their measured steps lies as close to the predicted one as what-if says."""


def validation_report(
    validation: Validation,
    accuracies: Mapping[str, GroupAccuracy],
    held_out: Sequence[HeldOut],
    notes: Sequence[tuple[str, str]],
    *,
    command: str,
    created: str,
    version: str,
) -> str:
    """Return the report as Markdown; ``notes`` are (pattern of case names, text).

    ``accuracies`` have keys ``<source>/<system>``.
    """
    typed = one_line(command).replace("`", "'")
    parts = ["# Validation: every published case", f"Written by `{typed}`, {created}, memo {version}; no GPU was used."]
    for section in validation_sections(validation, accuracies, held_out, notes):
        parts += [f"## {section.heading}"] if section.heading else []
        parts += map(_as_markdown, section.blocks)
    return "\n\n".join(parts) + "\n"


def validation_sections(
    validation: Validation,
    accuracies: Mapping[str, GroupAccuracy],
    held_out: Sequence[HeldOut],
    notes: Sequence[tuple[str, str]],
) -> list[Section]:
    """Return the report's sections, for Markdown and for a page; arguments as in ``validation_report``."""
    cases = validation.cases
    by_model = [BETWEEN.join((c.source, c.system, c.model)) for c in cases]
    by_length = [BETWEEN.join((c.source, c.system, format_tokens(c.seq_tokens))) for c in cases]
    return [
        *_impossible(cases),
        Section("", [*map(Paragraph, HOW_TO_READ.split("\n\n"))]),
        Section("By source and system", [_summary(cases, accuracies)]),
        *_intervals(held_out),
        *_longest(cases),
        Section("By model", [_by(cases, by_model)]),
        Section("By length", [_by(cases, by_length)]),
        Section("The largest errors of speed, and where their predicted steps go", [_worst(cases, notes)]),
        *_wrong(cases, notes),
        Section("Every case", _every(cases)),
    ]


def _as_markdown(block: Block) -> str:
    match block:
        case Table(headers, rows, alignment):
            return markdown_table(headers, rows, alignment)
        case Bullets(items):
            return "\n".join(f"- {in_markdown(item)}" for item in items)
        case Heading(text):
            return f"### {in_markdown(text)}"
        case Paragraph(text):
            return text
    raise AssertionError(type(block).__name__)


def _impossible(cases: Sequence[CaseReport]) -> list[Section]:
    """Return what no chip can do, first of all."""
    told = case_warnings(cases)
    return [Section("Above what the chip can do", [Bullets(told)])] if told else []


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str | None]], align: str) -> str:
    """Return a Markdown table; ``align`` has ``l`` or ``r`` for each column; a cell of None is empty.

    Cells show their text as it is: they hold names from case files (``plain_text.in_markdown``).
    """
    lines = ["| " + " | ".join(headers) + " |", "|" + "|".join("---:" if a == "r" else "---" for a in align) + "|"]
    lines += ["| " + " | ".join("" if cell is None else in_markdown(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _grouped(cases: Sequence[CaseReport], name: Callable[[CaseReport], str]) -> dict[str, list[CaseReport]]:
    groups: dict[str, list[CaseReport]] = {}
    for case in cases:
        groups.setdefault(name(case), []).append(case)
    return groups


def _intervals(held_out: Sequence[HeldOut]) -> list[Section]:
    """Return how the intervals do on sources that they were made without."""
    if not held_out:
        return []
    table = Table(INTERVAL_HEADERS, interval_rows(held_out), "lrrlrrrr")
    return [Section("Intervals", [Paragraph(HOW_INTERVALS_DO), table])]


def _summary(cases: Sequence[CaseReport], accuracies: Mapping[str, GroupAccuracy]) -> Table:
    headers = ["source", "system", "", "rows", "not evaluated", "status right", "quantity", "n", "bias", "mean error"]
    headers += ["largest", "rank correlation", "80 % of errors"]
    rows: list[list[str | None]] = []
    for name, members in _grouped(cases, lambda c: f"{c.source}/{c.system}").items():
        for accuracy in summarise(members, [name] * len(members)):
            chosen = [c for c in members if c.fitted == accuracy.fitted]
            invalid = sum(c.predicted.status == "invalid" for c in chosen)
            head: list[str | None] = [members[0].source, members[0].system, _kind(accuracy), str(accuracy.rows)]
            head.append(str(invalid) if invalid else None)
            rows += _quantities(accuracy, head, chosen, accuracies.get(name))
    return Table(headers, rows, "lllrrrlrrrrrr")


def _quantities(
    accuracy: Accuracy,
    head: list[str | None],
    cases: Sequence[CaseReport],
    group: GroupAccuracy | None,
) -> list[list[str | None]]:
    statuses = f"{accuracy.statuses_right}/{accuracy.statuses}" if accuracy.statuses else None
    rows: list[list[str | None]] = []
    for quantity, errors in accuracy.errors.items():
        speed = quantity in JUDGED and not accuracy.fitted
        band = None
        judged = speed and quantity == next(q for q in JUDGED if q in accuracy.errors)
        if judged and group and group.low is not None and group.high is not None:
            # The document bounds measured / predicted - 1; an error is predicted / measured - 1.
            ends = (format_percent(1 / (1 + end) - 1, signed=True) for end in (group.high, group.low))
            band = " to ".join(ends)
        rank = rank_correlation(
            [(getattr(c.predicted, quantity), getattr(c.expected, quantity)) for c in cases if not c.fitted]
        )
        row = [LABELS[quantity], str(errors.count), percent(errors.bias, signed=True), percent(errors.mean_abs)]
        row += [f"{percent(errors.max_abs)} ({errors.worst})", number(rank, 3) if speed else None, band]
        rows.append([*head, statuses, *row])
        head, statuses = [None] * len(head), None
    return rows or [[*head, statuses, *[None] * 7]]


def _kind(accuracy: Accuracy) -> str:
    return "fitted" if accuracy.fitted else "predicted"


def _inside(case: CaseReport) -> bool:
    assert case.interval is not None
    measured = getattr(case.expected, case.interval.quantity)
    return bool(case.interval.low <= measured <= case.interval.high)


def _longest(cases: Sequence[CaseReport]) -> list[Section]:
    """Return the longest sequence that fits, predicted and measured, where a source tried several lengths."""
    rows: list[list[str | None]] = []
    for name, members in _grouped(cases, lambda c: BETWEEN.join((c.source, c.system, c.model))).items():
        tried = sorted({c.seq_tokens for c in members})
        known = [c for c in members if c.expected.status is not None and c.predicted.status != "invalid"]
        if len(tried) < 5 or {c.expected.status for c in known} <= {"ok"} or len(known) != len(tried):
            continue
        ran = ([c for c in known if c.predicted.status == "ok"], [c for c in known if c.expected.status == "ok"])
        ends = [max((tried.index(c.seq_tokens) for c in side), default=-1) for side in ran]
        shown = [format_tokens(tried[end]) if end >= 0 else "none" for end in ends]
        rows.append([*name.split(BETWEEN, 2), *shown, f"{ends[0] - ends[1]:+d}"])
    if not rows:
        return []
    headers = ["source", "system", "model", "predicted", "measured", "steps apart"]
    return [Section("Longest sequence that fits", [Table(headers, rows, "lllrrr")])]


def _by(cases: Sequence[CaseReport], names: Sequence[str]) -> Table:
    rows: list[list[str | None]] = []
    for accuracy in summarise(cases, names):
        source, system, group = accuracy.group.split(BETWEEN, 2)
        statuses = f"{accuracy.statuses_right}/{accuracy.statuses}" if accuracy.statuses else None
        speed = next((q for q in JUDGED if q in accuracy.errors), None)
        errors = accuracy.errors[speed] if speed else None
        row = [source, system, group, _kind(accuracy), str(accuracy.rows), statuses]
        if errors:
            shown = [percent(errors.bias, signed=True), percent(errors.mean_abs), percent(errors.max_abs)]
            row += [LABELS[speed] if speed else None, str(errors.count), *shown]
        rows.append(row + [None] * (11 - len(row)))
    headers = ["source", "system", "", "", "rows", "status right", "quantity", "n", "bias", "mean error", "largest"]
    return Table(headers, rows, "llllrrlrrrr")


def _worst(cases: Sequence[CaseReport], notes: Sequence[tuple[str, str]]) -> Table:
    known = [(abs(error), c) for c in cases if not c.fitted and (error := judged_error(c)) is not None]
    chosen = [case for _, case in sorted(known, key=lambda pair: -pair[0])[:WORST]]
    rows: list[list[str | None]] = [
        [case.case, percent(judged_error(case), signed=True), _terms(case), _note(case, notes)] for case in chosen
    ]
    return Table(["case", "error", "of the predicted step", "why it stays wrong"], rows, "lrll")


def _terms(case: CaseReport) -> str:
    """Return the parts of the predicted step: busy lanes, compute's waits, allocation retries."""
    busy = [
        f"{lane} {format_percent(share, 0)}"
        for lane, share in sorted(case.predicted.lanes.items(), key=lambda i: -i[1])
    ]
    waits = [f"{what} {format_percent(share, 0)}" for what, share in case.predicted.waits.items() if share >= 0.01]
    parts = [f"busy: {', '.join(b for b in busy if not b.endswith(' 0 %'))}"]
    if waits:
        parts.append(f"compute waits for {', '.join(waits)}")
    if case.predicted.allocation_retries:
        parts.append(f"{case.predicted.allocation_retries:.2g} allocation retries per micro-batch")
    return "; ".join(parts)


def _note(case: CaseReport, notes: Sequence[tuple[str, str]]) -> str:
    return " ".join(text for pattern, text in notes if fnmatchcase(case.case, pattern))


def _wrong(cases: Sequence[CaseReport], notes: Sequence[tuple[str, str]]) -> list[Section]:
    wrong = [c for c in cases if c.error.status is False]
    if not wrong:
        return []
    rows: list[list[str | None]] = []
    for case in wrong:
        reason = case.predicted.reason.split(";")[0]
        note = _note(case, notes)
        told = " ".join(part for part in (reason + "." if reason else "", note) if part)
        rows.append(
            [case.case, short_of(case.predicted.status), case.expected.status and short_of(case.expected.status), told]
        )
    return [Section("Wrong statuses", [Table(["case", "predicted", "measured", ""], rows, "llll")])]


def _every(cases: Sequence[CaseReport]) -> list[Block]:
    parts: list[Block] = []
    for source, members in _grouped(cases, lambda c: c.source).items():
        quantities = [q for q in LABELS if any(getattr(c.expected, q) is not None for c in members)]
        headers = ["case", "system", "", "status", "measured", "layout"]
        for quantity in quantities:
            headers += [LABELS[quantity], "measured", "error"]
        rows = [_case(case, quantities) for case in members]
        parts += [
            Heading(source),
            Table([*headers, "interval"], rows, "llllll" + "rrr" * len(quantities) + "r"),
        ]
    return parts


def _case(case: CaseReport, quantities: Sequence[str]) -> list[str | None]:
    predicted, expected = case.predicted, case.expected
    row = [case.case, case.system, "fitted" if case.fitted else None]
    row += [
        short_of(predicted.status) + " (wrong)" * (case.error.status is False),
        expected.status and short_of(expected.status),
    ]
    row.append(None if predicted.layout is None else layout_label(predicted.layout))
    for quantity in quantities:
        row += [_value(quantity, getattr(side, quantity)) for side in (predicted, expected)]
        row.append(percent(getattr(case.error, quantity), signed=True))
    if case.interval is None:
        return [*row, None]
    ends = (
        f"{_value(case.interval.quantity, case.interval.low)} to {_value(case.interval.quantity, case.interval.high)}"
    )
    measured = getattr(expected, case.interval.quantity)
    return [*row, ends + ("" if measured is None or _inside(case) else " (outside)")]


def _value(quantity: str, value: float | None) -> str | None:
    if value is None:
        return None
    return UNITS[quantity](value) if quantity in UNITS else f"{value:.1f}"
