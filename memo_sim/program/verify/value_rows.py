"""What rows of buffers hold, and what sums of gradients consist of (``values.py``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from memo_sim.program.ir.kinds import BlockKind


class Value(NamedTuple):
    """The tensor that rows hold.

    ``part``: of which rank's weights, where these pass round (METP); ``terms``: what a sum consists of so far, or which
    rank's rows of an exchanged tensor these are.
    """

    name: str
    layer: int
    micro_batch: int
    part: object = None
    terms: object = None

    def __str__(self) -> str:
        part = f", {self.part}" if self.part is not None else ""
        return f"{self.name} of layer {self.layer}, micro-batch {self.micro_batch}{part}"


class Held(NamedTuple):
    """Rows [first, end) of a buffer hold rows [row, row + end - first) of ``value``; None if that is unknown.

    Unknown rows follow from a fault that was reported, or come from a stage whose part nothing here tells.
    """

    first: int
    end: int
    value: Value | None
    row: int


@dataclass
class Sum:
    """The gradient of one parameter: the tokens whose terms it has, by micro-batch and source of the term."""

    first: int
    hop: int = 0
    """How many ranks away the weights are whose gradient this is (METP's ring)."""
    anything: bool = False
    """Whether another stage added terms that nothing here tells."""
    tokens: dict[tuple[int, object], list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, key: tuple[int, object], first: int, end: int) -> bool:
        """Add rows [first, end); return False when the sum has some of them already."""
        ranges = self.tokens.setdefault(key, [])
        joined = add_range(ranges, first, end)
        if joined is None:
            return False
        self.tokens[key] = joined
        return True


def add_range(ranges: list[tuple[int, int]], first: int, end: int) -> list[tuple[int, int]] | None:
    """Return sorted disjoint ``ranges`` with [first, end) added and neighbours joined; None if they overlap."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted([*ranges, (first, end)]):
        if joined and low < joined[-1][1]:
            return None
        if joined and low == joined[-1][1]:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return joined


ParameterKey = tuple[BlockKind, int, str]
"""A parameter: its block, the number of the layer in the model, and its name in the block."""
