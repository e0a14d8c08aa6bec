"""The pages of questions about several machines: numbers of GPUs of several kinds, and several clusters."""

from __future__ import annotations

from itertools import pairwise

from memo_sim.contract.gpus import Gpus
from memo_sim.contract.results import Results
from memo_sim.contract.units import format_seconds, format_tokens
from memo_sim.views.chart import COLOURS
from memo_sim.views.gpus_table import gpus_verdict, sizes_cells
from memo_sim.views.report.curves import Chart, Line
from memo_sim.views.report.page import (
    Block,
    Bullets,
    Cell,
    Charts,
    Details,
    Notice,
    Page,
    Pairs,
    Section,
    Table,
)
from memo_sim.views.report.what_if import plans_table
from memo_sim.views.results_table import results_cells, results_verdict
from memo_sim.views.summary_text import verdict_lines


def gpus_page(document: Gpus, at_chosen: Page | None, *, command: str, created: str, version: str) -> Page:
    """Return the report of how many GPUs of which kind are needed; ``at_chosen`` is the page of the chosen plan."""
    several = any(one.kind == two.kind for one, two in pairwise(document.sizes))
    sizes: list[Block] = [Table(*sizes_cells(document)), *([_steps(document)] if several else [])]
    sections = [
        Section("", [Notice(text) for text in document.warnings]),
        Section("Numbers of GPUs worth knowing", sizes if document.sizes else []),
        Section("Numbers that were tried", [Details("All of them", [_tried(document)])]),
        Section("How they were searched", [Bullets(document.why)] if document.why else []),
        *_in_detail("The chosen plan", at_chosen, provenance(command, created, version)),
    ]
    return Page(
        title=f"{document.model}, {format_tokens(document.seq_tokens)} tokens: how many GPUs",
        subtitle=f"Kinds of GPU: {', '.join(document.kinds)}. All figures are predicted.",
        verdict=[gpus_verdict(document)],
        good=document.chosen is not None,
        sections=[section for section in sections if section.blocks],
    )


def _in_detail(heading: str, page: Page | None, last: Section) -> list[Section]:
    """Return the sections of one answer's page; without one, only ``last``, which says who made the page."""
    return [last] if page is None else [Section(heading, page.sections[0].blocks), *page.sections[1:]]


def _steps(document: Gpus) -> Charts:
    """Return the steps and GPU-hours by number of GPUs, a line for each kind."""
    steps, hours = list[Line](), list[Line]()
    for number, kind in enumerate(document.kinds):
        mine = [size for size in document.sizes if size.kind == kind]
        colour = COLOURS[number % len(COLOURS)]
        named = [(float(size.summary.devices), size.summary, size.cluster) for size in mine]
        steps.append(Line(kind, colour, [(n, s.step_s, name) for n, s, name in named if s.step_s is not None]))
        points = [(n, s.device_hours_per_billion_tokens, name) for n, s, name in named]
        hours.append(Line(kind, colour, [(n, value, name) for n, value, name in points if value is not None]))
    return Charts(
        [
            Chart("Step", "GPUs", "step, s", steps, from_zero=True),
            Chart("GPU-hours", "GPUs", "GPU-hours per billion tokens", hours, from_zero=True),
        ]
    )


def _tried(document: Gpus) -> Table:
    rows: list[list[Cell]] = [
        [
            tried.cluster,
            str(tried.devices),
            "fits" if tried.fits else "does not fit",
            None if tried.step_s is None else format_seconds(tried.step_s),
            tried.reason or None,
        ]
        for tried in document.tried
    ]
    return Table(["cluster", "GPUs", "", "a plan's step", "why not"], rows, "lrlrl")


def results_page(document: Results, at_best: Page | None, *, command: str, created: str, version: str) -> Page:
    """Return the report of one question about several clusters; ``at_best`` is the page of the best one's answer."""
    told = dict.fromkeys(text for result in document.results for text in result.warnings)
    first = document.results[0]
    sections = [
        Section("", [Notice(text) for text in told]),
        Section("Clusters", [Table(*results_cells(document), mark_first=True)]),
        *(Section(result.cluster, _of_cluster(document, number)) for number, result in enumerate(document.results)),
        *_in_detail(f"The best plan on {first.cluster}", at_best, provenance(command, created, version)),
    ]
    return Page(
        title=f"{document.model}, {format_tokens(document.seq_tokens)} tokens on several clusters",
        subtitle=f"Ranked by {document.ranked_by}. All figures are predicted.",
        verdict=[results_verdict(document)],
        good=first.best is not None,
        sections=[section for section in sections if section.blocks],
    )


def _of_cluster(document: Results, number: int) -> list[Block]:
    result = document.results[number]
    blocks: list[Block] = [Bullets(verdict_lines(result.summary))] if result.summary else [Bullets(result.why)]
    if fitting := [plan for plan in result.plans if plan.status == "ok"]:
        blocks += [Details("Ranked plans", [plans_table(fitting)])]
    if result.summary is not None and result.why:
        blocks += [Details("Why", [Bullets(result.why)])]
    return blocks


def provenance(command: str, created: str, version: str) -> Section:
    """Return who made the page."""
    return Section("Provenance", [Pairs([("command", command), ("created", created), ("memo", version)])])
