"""Shows the lengths that a search for the longest sequence evaluated."""

from __future__ import annotations

from memo_sim.contract.longest import Longest, bound_in_words
from memo_sim.contract.units import format_seconds, format_tokens
from memo_sim.views.text_table import Cells, text_table


def tried_table(document: Longest) -> str:
    """Return every evaluated length, in increasing order: whether it fits, how long a step takes, what limits it."""
    return text_table(*tried_cells(document))


def tried_cells(document: Longest) -> Cells:
    """Return headers, rows and alignment of the table of lengths."""
    rows: list[list[str | None]] = [
        [
            format_tokens(tried.seq_tokens),
            "fits" if tried.fits else "does not fit",
            None if tried.step_s is None else format_seconds(tried.step_s),
            bound_in_words(tried.bound) if tried.bound else None,
        ]
        for tried in document.tried
    ]
    return ["tokens", "", "a plan's step", "limited by"], rows, "rlrl"
