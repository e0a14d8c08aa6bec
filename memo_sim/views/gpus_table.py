"""Shows how many GPUs of which kind a question needs, as text: the verdict, and a row for each number worth knowing."""

from __future__ import annotations

from collections.abc import Sequence

from memo_sim.contract.goodput import Goodput
from memo_sim.contract.gpus import Gpus, Sized
from memo_sim.contract.plain_text import one_line
from memo_sim.contract.units import counted, format_seconds, format_tokens
from memo_sim.views.goodput_columns import goodput_cells, goodput_headers
from memo_sim.views.plan_table import layout_label
from memo_sim.views.text_table import Cells, number, text_table, three_digits, warning_lines

ROLES = {"fits": "smallest that fits", "within": "smallest within the time", "cheapest": "fewest GPU-hours"}
"""What the roles are called in the table."""


def gpus_table(document: Gpus) -> str:
    """Return the verdict, the table of numbers, and the kinds of which none fits."""
    blocks = [*warning_lines(document.warnings), gpus_verdict(document)]
    if document.sizes:
        blocks.append(_table(document))
    return "\n\n".join(blocks)


def gpus_verdict(document: Gpus) -> str:
    """Return one line: which number of which kind, and its speed and price."""
    asked = (
        f"{document.model}, {format_tokens(document.seq_tokens)} tokens, {counted(document.global_batch, 'sequence')}"
    )
    head = one_line(f"{asked} a step")
    limit = "" if document.within_s is None else f" within {format_seconds(document.within_s)}"
    chosen = document.chosen
    if chosen is None:
        slow = "a step" + limit if document.sizes else "any plan"
        kinds = ", ".join(document.kinds)
        return f"{head}: no number up to {document.most_devices} of {one_line(kinds)} is enough for {slow}."
    summary = chosen.summary
    nodes = counted(chosen.nodes, "node")
    parts = [f"{head}{limit}: {summary.devices} x {one_line(chosen.kind)} ({nodes})", f"step {_step(chosen)}"]
    parts.append(f"{three_digits(summary.device_hours_per_billion_tokens)} GPU-hours per billion tokens")
    if summary.price_per_billion_tokens is not None:
        parts.append(f"price {three_digits(summary.price_per_billion_tokens)} per billion tokens")
    return f"{', '.join(parts)}."


def _table(document: Gpus) -> str:
    return text_table(*sizes_cells(document))


def sizes_cells(document: Gpus) -> Cells:
    """Return headers, rows and alignment of the table of numbers of GPUs."""
    priced = any(size.summary.price_per_billion_tokens is not None for size in document.sizes)
    headers = ["kind", "GPUs", "nodes", "", "step", "MFU %", "tokens/s/GPU", "GPU-h/B tokens"]
    headers += ["price/B tokens", "price/step"] if priced else []
    goodputs = [size.summary.goodput for size in document.sizes]
    headers += goodput_headers(goodputs)
    rows = [_row(size, goodputs, priced=priced) for size in document.sizes]
    return [*headers, "plan"], rows, "lrrl" + "r" * (len(headers) - 4) + "l"


def _row(size: Sized, goodputs: Sequence[Goodput | None], *, priced: bool) -> list[str | None]:
    summary = size.summary
    prices = [three_digits(summary.price_per_billion_tokens), three_digits(summary.price_per_step)] if priced else []
    return [
        size.kind,
        str(summary.devices),
        str(size.nodes),
        ", ".join(ROLES[role] for role in size.roles),
        _step(size),
        None if summary.mfu is None else f"{100 * summary.mfu:.1f}",
        number(summary.tokens_per_device_s),
        three_digits(summary.device_hours_per_billion_tokens),
        *prices,
        *goodput_cells(summary.goodput, goodputs),
        f"{layout_label(size.best.layout)}; {size.best.system}",
    ]


def _step(size: Sized) -> str:
    return "-" if size.summary.step_s is None else format_seconds(size.summary.step_s)
