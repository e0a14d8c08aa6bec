"""Columns of tables about what failures leave of a plan's speed; none where no row has such figures."""

from __future__ import annotations

from collections.abc import Sequence

from memo_sim.contract.goodput import Goodput
from memo_sim.views.text_table import percent, three_digits

HEADERS = ("goodput", "days/1e12 tokens")


def goodput_headers(found: Sequence[Goodput | None]) -> list[str]:
    """Return the headers; ``found`` is the goodput of every row, None where a row has none."""
    return list(HEADERS) if any(found) else []


def goodput_cells(goodput: Goodput | None, found: Sequence[Goodput | None]) -> list[str | None]:
    """Return the cells of one of the rows below ``goodput_headers``."""
    if not any(found):
        return []
    if goodput is None:
        return [None, None]
    return [percent(goodput.goodput), three_digits(goodput.days_per_trillion_tokens)]
