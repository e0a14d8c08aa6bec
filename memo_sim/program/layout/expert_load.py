"""How many rows each expert gets: the load that a plan is priced for.

A program's sizes do not depend on it, because the dispatched rows of all experts of a rank are as many whatever the
router decides. Prices do: products work in tiles of rows, and every expert's last tile may be nearly empty.

    balanced   equally many rows
    zipf-S     the rows of the n-th fullest expert go with n**-S, as far as each has at most one row of every token
    measured-  the rows of each expert in thousandths of the mean, the fullest first (``contract/expert_load.py``)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from memo_sim.contract.model import Experts

BALANCED = "balanced"
LEAST_SHARE = 1e-6
"""What an expert without measured rows asks for, in parts of the mean: rows that fuller ones cannot take go there."""
MOST_POWER = 500
"""Hundredths of the exponents that a load may have (``contract/units.py``)."""


@lru_cache(maxsize=256)
def rows_of(experts: Experts, rows: int, load: str) -> tuple[int, ...]:
    """Return the rows of each expert, the fullest first; they sum to ``rows`` (tokens x per_token)."""
    most = rows // experts.per_token
    weights = _weights(experts, load)
    full, left = 0, float(rows)
    while full < experts.count and weights[full] / sum(weights[full:]) * left > most:
        full, left = full + 1, left - most
    total = sum(weights[full:])
    shares = [float(most)] * full + [weight / total * left for weight in weights[full:]]
    ends = [round(end) for end in accumulate(shares)]
    ends[-1] = rows
    return tuple(sorted((end - before for before, end in zip([0, *ends], ends, strict=False)), reverse=True))


def _weights(experts: Experts, load: str) -> list[float]:
    """Return numbers in proportion to the rows that experts ask for, the fullest first."""
    if (shares := measured_shares(load)) is not None:
        return [max(share, LEAST_SHARE) for share in shares]
    power = 0.0 if load == BALANCED else float(load.removeprefix("zipf-"))
    return [float(n + 1) ** -power for n in range(experts.count)]


def measured_shares(load: str) -> list[float] | None:
    """Return the rows of each expert in a measured load, in parts of their mean; None for other loads."""
    prefix = "measured-"
    if not load.startswith(prefix):
        return None
    rows = sorted((float(share) for share in load.removeprefix(prefix).split("-")), reverse=True)
    return [row * len(rows) / sum(rows) for row in rows] if sum(rows) else None


def shown_load(load: str) -> str:
    """Return a load as text for people: a measured one by its fullest expert."""
    shares = measured_shares(load)
    return (
        load
        if shares is None
        else f"as measured (the fullest of {len(shares)} experts: {shares[0]:.2f} times the mean)"
    )


def nearest_load(experts: Experts, rows: Sequence[int]) -> str:
    """Return the load whose experts are nearest to measured ``rows`` of the fullest expert, of the next one, and so on.

    Near means that few rows would have to go to another expert.
    """
    total = sum(rows) // experts.per_token * experts.per_token

    def moved(power: float) -> int:
        return sum(abs(a - b) for a, b in zip(rows_of(experts, total, _named(power)), rows, strict=True))

    return _named(min((number / 100 for number in range(MOST_POWER)), key=moved))


def _named(power: float) -> str:
    return f"zipf-{power:g}" if power else BALANCED


def sizes_of(experts: Experts, rows: int, load: str, first: int, taken: int) -> tuple[tuple[int, int], ...]:
    """Return the rows that dispatched rows [first, first + taken) have of each expert, as (rows, number of experts).

    ``rows``: all dispatched rows. Experts without rows are left out; neighbours with equally many are joined.
    """
    found: list[tuple[int, int]] = []
    begin = 0
    for count in rows_of(experts, rows, load):
        inside = min(begin + count, first + taken) - max(begin, first)
        begin += count
        if inside <= 0:
            continue
        if found and found[-1][0] == inside:
            found[-1] = (inside, found[-1][1] + 1)
        else:
            found.append((inside, 1))
    return tuple(found)
