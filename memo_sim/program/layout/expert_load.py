"""How many rows each expert gets: the load that a plan is priced for.

Where a rank has all experts, a program's sizes do not depend on it, because the dispatched rows of all experts are as
many whatever the router decides. Prices do: products work in tiles of rows, and every expert's last tile may be nearly
empty.

    balanced   equally many rows
    zipf-S     the rows of the n-th fullest expert go with n**-S, as far as each has at most one row of every token
    measured-  the rows of each expert in thousandths of the mean, the fullest first (``contract/expert_load.py``)

With expert parallelism a rank receives the rows of its own experts alone, from every rank of the group. Which experts
are full is not known, so they are taken to be dealt to the ranks in turn: the fullest to the first rank, the next to
the second, and so on. The first rank is then the fullest; the others wait for it, so it is the one that is priced.

    rows 8 4 2 2 of 4 experts, ep 2:   rank 0 gets 8 + 2, rank 1 gets 4 + 2     share of the fullest 10 / 8 of the mean

Sizes are known before the step, so a rank sends to each rank of the group as many rows as the plan's capacity says,
filled up where there are fewer (``capacity_rows``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import ceil

from memo_sim.contract.experts import Experts

BALANCED = "balanced"
LEAST_SHARE = 1e-6
"""What an expert without measured rows asks for, in parts of the mean: rows that fuller ones cannot take go there."""
MARGIN = 1.25
"""Capacity over the load that is expected, where none is given (Fedus et al. 2021, Switch Transformer, table 1)."""
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
    return _cut(rows_of(experts, rows, load), first, taken)


def received_sizes(  # noqa: PLR0917 - the load, and a range of its rows
    experts: Experts, rows: int, load: str, ep: int, capacity: int, first: int, taken: int
) -> tuple[tuple[int, int], ...]:
    """Return the same of the rows that the fullest rank of ``ep`` receives; rows that fill buffers up are not counted.

    ``rows``: the dispatched rows of one rank, of which it sends ``capacity`` to each rank at most.
    """
    return _cut(_received(experts, rows, load, ep, capacity), first, taken)


def received_rows(experts: Experts, rows: int, load: str, ep: int, capacity: int) -> int:
    """Return how many rows the fullest rank of ``ep`` receives, without those that fill buffers up."""
    return sum(_received(experts, rows, load, ep, capacity))


def fullest_share(experts: Experts, rows: int, load: str, ep: int) -> float:
    """Return how many of a rank's dispatched rows go to the fullest rank of ``ep``, over the mean."""
    return sum(rows_of(experts, rows, load)[::ep]) * ep / rows


def capacity_factor(experts: Experts, rows: int, load: str, ep: int, given: float) -> float:
    """Return the capacity of a pair of ranks over the mean: ``given``, or (0) what the load asks for and a margin."""
    return given or MARGIN * fullest_share(experts, rows, load, ep)


def capacity_rows(experts: Experts, rows: int, load: str, ep: int, given: float) -> int:
    """Return how many rows a rank can send to each rank of ``ep``; at most all that its tokens can send there."""
    most = rows // experts.per_token * min(experts.per_token, experts.count // ep)
    return min(most, ceil(capacity_factor(experts, rows, load, ep, given) * rows / ep))


@lru_cache(maxsize=256)
def _received(experts: Experts, rows: int, load: str, ep: int, capacity: int) -> tuple[int, ...]:
    """Return the rows of each expert of the fullest rank, which every rank of ``ep`` sends equally many of."""
    ends = [min(end, capacity) for end in accumulate(rows_of(experts, rows, load)[::ep])]
    return tuple(ep * (end - before) for before, end in zip([0, *ends], ends, strict=False))


def _cut(rows: Sequence[int], first: int, taken: int) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    begin = 0
    for count in rows:
        inside = min(begin + count, first + taken) - max(begin, first)
        begin += count
        if inside <= 0:
            continue
        if found and found[-1][0] == inside:
            found[-1] = (inside, found[-1][1] + 1)
        else:
            found.append((inside, 1))
    return tuple(found)
