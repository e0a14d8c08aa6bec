"""The page of the longest sequence that fits: which lengths were tried, then the page of the plan there."""

from __future__ import annotations

from dataclasses import replace

from memo_sim.contract.longest import Longest, bound_in_words
from memo_sim.contract.units import format_seconds, format_tokens
from memo_sim.views.longest_table import tried_cells
from memo_sim.views.palette import phase_colour
from memo_sim.views.report.curves import Chart, Line
from memo_sim.views.report.page import Bullets, Charts, Page, Section, Table
from memo_sim.views.report.sizes import provenance


def longest_page(document: Longest, at_longest: Page | None, *, command: str, created: str, version: str) -> Page:
    """Return the report; ``at_longest`` is the page of the answer at that length, None where no length fits."""
    points = [
        (float(tried.seq_tokens), tried.step_s, f"{format_tokens(tried.seq_tokens)}: {format_seconds(tried.step_s)}")
        for tried in document.tried
        if tried.fits and tried.step_s is not None
    ]
    chart = Chart("Step of a plan that fits", "tokens", "step, s", [Line("step", phase_colour("fwd"), points)], True)
    lengths = Section(
        "Lengths that were tried", [Table(*tried_cells(document)), *([Charts([chart])] if points else [])]
    )
    where = f"{document.model} on {document.cluster}"
    if at_longest is None:
        return Page(
            title=f"{where}: no length fits",
            verdict=document.why[:1],
            good=False,
            sections=[lengths, Section("Why", [Bullets(document.why)]), provenance(command, created, version)],
        )
    length = format_tokens(document.seq_tokens)
    head = f"{length} tokens at most (limited by {bound_in_words(document.bound)})."
    return replace(
        at_longest,
        title=f"{where}: {length} tokens at most",
        verdict=[head, *document.why[:1], *at_longest.verdict],
        sections=[at_longest.sections[0], lengths, *at_longest.sections[1:]],
    )
