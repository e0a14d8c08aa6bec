"""Holds the requests read from a file, with the file's own columns and notes on what was left out or assumed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from memo_sim.contract.errors import BadInput
from memo_sim.contract.requests import Requests

Kind = Literal["csv", "log", "snapshot", "requests", "plan"]

MOST_BYTES = 2**62
"""The sum of all sizes and every instant are below this, so that no sum overflows 64 bits."""


@dataclass(frozen=True)
class Source:
    """Requests as read; ``header`` and ``rows`` hold a CSV's own text, in the order of the requests."""

    requests: Requests
    kind: Kind
    notes: list[str] = field(default_factory=list)
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    """Of a snapshot: what each buffer holds, by the stack that allocated it (``allocation_class.py``)."""
    reserved_eager_bytes: int | None = None
    """What an eager framework reserves for the plan, as predicted in its file; None for other inputs."""


def check_countable(requests: Requests, where: str) -> None:
    """Refuse requests without buffers, or with numbers too large to compute a placement.

    Raises:
        BadInput: naming the file ``where``.
    """
    if not requests.ids:
        raise BadInput("no buffer is requested", where=where, wanted="at least one")
    unit = requests.alignment_bytes
    if unit >= MOST_BYTES:
        raise BadInput("the alignment is too large", where=where, got=unit, wanted=f"less than {MOST_BYTES}")
    if sum(-(-size // unit) * unit for size in requests.size_bytes) >= MOST_BYTES:
        raise BadInput("the sizes add up to more than can be placed", where=where, wanted=f"less than {MOST_BYTES}")
    for phase in requests.phases:
        if phase.lower > phase.upper:
            got = f"{phase.name} [{phase.lower}, {phase.upper})"
            raise BadInput("a phase that ends before it begins", where=f"{where}: $.phases", got=got)
    if (last := max([*requests.upper, *(phase.upper for phase in requests.phases)])) >= MOST_BYTES:
        raise BadInput("an instant is too late to count", where=where, got=last, wanted=f"less than {MOST_BYTES}")
