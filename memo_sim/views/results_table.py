"""Shows several clusters as text: a line that compares the first two, and one line for each cluster."""

from __future__ import annotations

from collections.abc import Sequence

from memo_sim.contract.goodput import Goodput
from memo_sim.contract.plain_text import one_line
from memo_sim.contract.result import Result
from memo_sim.contract.results import Results
from memo_sim.contract.summary import Summary
from memo_sim.contract.units import counted, format_bytes, format_percent, format_seconds, format_tokens
from memo_sim.views.goodput_columns import goodput_cells, goodput_headers
from memo_sim.views.plan_table import layout_label
from memo_sim.views.summary_text import not_read_lines
from memo_sim.views.text_table import Cells, number, text_table, three_digits, warning_lines

TIMES = 2
"""From this ratio on a factor is said, not a percentage."""


def results_table(document: Results) -> str:
    """Return the verdict and a row for each cluster, in the document's order."""
    told = dict.fromkeys(text for result in document.results for text in result.warnings)
    table = text_table(*results_cells(document))
    ignored = not_read_lines(result.summary for result in document.results)
    notes = ["\n".join(map(one_line, document.notes))] if document.notes else []
    return "\n\n".join([*warning_lines(list(told)), results_verdict(document), table, *ignored, *notes])


def results_cells(document: Results) -> Cells:
    """Return headers, rows and alignment of the table of clusters."""
    priced = document.ranked_by == "price"
    headers = ["", "cluster", "GPUs", "batch", "step", "tokens/s", "MFU %", "tokens/s/GPU", "GPU-h/B tokens"]
    headers += ["price/B tokens"] if priced else []
    kernels = len({f"{r.best.attention} {r.best.rowwise}" for r in document.results if r.best}) > 1
    goodputs = [result.summary.goodput if result.summary else None for result in document.results]
    headers += goodput_headers(goodputs)
    align = "rl" + "r" * (len(headers) - 2) + "l" * kernels + "l"
    headers += ["kernels"] if kernels else []
    rows = [
        [str(rank), *_row(result, goodputs, priced=priced, kernels=kernels)]
        for rank, result in enumerate(document.results, start=1)
    ]
    return [*headers, "plan"], rows, align


def results_verdict(document: Results) -> str:
    """Return one line: which cluster is first, and how far ahead of the next."""
    asked = one_line(f"{document.model}, {format_tokens(document.seq_tokens)} tokens")
    fitting = [(r.cluster, s) for r in document.results if (s := _fitting(r)) is not None]
    count = counted(len(document.results), "cluster")
    if not fitting:
        return f"{asked}: no plan fits on any of {count}."
    (first, best), *others = fitting
    what = "cheapest" if document.ranked_by == "price" else "fastest"
    text = f"{asked}: {one_line(first)} is the {what} of {count}"
    if others:
        second, next_best = others[0]
        if document.ranked_by == "price":
            ahead = (next_best.price_per_billion_tokens or 0.0) / (best.price_per_billion_tokens or 1.0)
            text += f"; a token costs {_more(ahead)}{' as much' if ahead >= TIMES else ''} on {one_line(second)}"
        else:
            ahead = _tokens_per_s(best) / _tokens_per_s(next_best)
            than = "as many tokens per second as" if ahead >= TIMES else "tokens per second than"
            text += f", {_more(ahead)} {than} {one_line(second)}"
        if _close(best, next_best, ahead):
            text += ". Their intervals overlap: measured, the order may be the other"
    return f"{text}."


def _more(ratio: float) -> str:
    """Return a ratio above 1 in words: ``20 % more``, or ``11.7 times`` from twice on."""
    return f"{ratio:.3g} times" if ratio >= TIMES else f"{format_percent(ratio - 1, 0)} more"


def _close(best: Summary, other: Summary, ahead: float) -> bool:
    """Whether the slow end of the best's interval is behind the quick end of the other's; ``ahead``: their ratio."""
    mine, theirs = best.interval, other.interval
    if mine is None or theirs is None or best.step_s is None or other.step_s is None:
        return False
    return mine.high_s / best.step_s > ahead * theirs.low_s / other.step_s


def _fitting(result: Result) -> Summary | None:
    return result.summary if result.summary is not None and result.summary.step_s is not None else None


def _tokens_per_s(summary: Summary) -> float:
    return summary.tokens_per_step / (summary.step_s or 1.0)


def _row(result: Result, goodputs: Sequence[Goodput | None], *, priced: bool, kernels: bool) -> list[str | None]:
    summary, best = _fitting(result), result.best
    if summary is None or summary.step_s is None or best is None:
        short = result.summary.shortfall_bytes if result.summary else 0
        why = f"does not fit: short by {format_bytes(short)}" if short else "does not fit: " + " ".join(result.why[:1])
        devices = str(result.summary.devices) if result.summary else None
        return [
            result.cluster,
            devices,
            *[None] * 6,
            *[None] * (priced + len(goodput_headers(goodputs)) + kernels),
            why,
        ]
    return [
        result.cluster,
        str(summary.devices),
        str(summary.tokens_per_step // result.seq_tokens),
        format_seconds(summary.step_s),
        three_digits(_tokens_per_s(summary)),
        None if summary.mfu is None else f"{100 * summary.mfu:.1f}",
        number(summary.tokens_per_device_s),
        three_digits(summary.device_hours_per_billion_tokens),
        *([three_digits(summary.price_per_billion_tokens)] if priced else []),
        *goodput_cells(summary.goodput, goodputs),
        *([f"{best.attention}, {best.rowwise}"] if kernels else []),
        f"{layout_label(best.layout)}; {best.system}",
    ]
