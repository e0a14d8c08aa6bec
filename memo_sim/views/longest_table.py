"""Shows the longest sequence that fits as text: the length, its limit, all evaluated lengths, and the best plan."""

from __future__ import annotations

from memo_sim.contract.longest import Longest
from memo_sim.contract.plain_text import one_line
from memo_sim.contract.units import format_seconds, format_tokens
from memo_sim.views.plan_table import ranked_table
from memo_sim.views.text_table import text_table, warning_lines


def longest_table(document: Longest) -> str:
    """Return the answer: a line with the length, the evaluated lengths, and the fastest plan at the longest."""
    head = one_line(f"{document.model} on {document.cluster}, {document.system}")
    if document.seq_tokens:
        head += f": {format_tokens(document.seq_tokens)} tokens at most (limited by {document.bound})"
    else:
        head += f": not even {format_tokens(document.step_tokens)} tokens fit ({document.bound})"
    rows = [
        [
            format_tokens(tried.seq_tokens),
            "fits" if tried.fits else "does not fit",
            None if tried.step_s is None else format_seconds(tried.step_s),
            tried.bound,
        ]
        for tried in document.tried
    ]
    blocks = [
        *warning_lines(document.warnings),
        head,
        text_table(["tokens", "", "a plan's step", "limited by"], rows, "rlrl"),
    ]
    if document.best is not None:
        blocks.append(f"the fastest plan at {format_tokens(document.seq_tokens)}:\n{ranked_table([document.best])}")
    return "\n\n".join(blocks)
