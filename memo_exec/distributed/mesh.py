"""Where this rank stands in a layout: its coordinates, the ranks of its groups, and its share of what ZeRO divides."""

from __future__ import annotations

from dataclasses import dataclass

from memo_sim.contract.plan import Layout
from memo_sim.program.layout import rank_order as ranks


@dataclass(frozen=True, slots=True)
class MeshCoordinates:
    """One rank of a layout; groups are ``tp``, ``metp``, ``ulysses``, ``cp``, ``dp``, ``pp``, ``grads`` and ``ends``.

    ``program/layout/rank_order.py`` says which ranks each has.
    """

    layout: Layout
    rank: int = 0

    def at(self, group: str) -> int:
        """Return which of its group's ranks this is."""
        return ranks.coordinate(group, self.layout, self.rank)

    def size(self, group: str) -> int:
        """Return how many ranks the group has."""
        return ranks.degree(group, self.layout)

    def members(self, group: str) -> list[int]:
        """Return the ranks of this rank's group, in order of their coordinates."""
        return ranks.members(group, self.layout, self.rank)


@dataclass(frozen=True, slots=True)
class Share:
    """A stretch of ``length`` elements in equal shares; the last ranks may have less, or nothing.

    length 10, 4 ranks:   [0 1 2][3 4 5][6 7 8][9]
    """

    length: int
    ranks: int

    def of(self, index: int) -> tuple[int, int]:
        """Return first element and number of elements of one rank's share."""
        size = -(-self.length // self.ranks)
        first = min(index * size, self.length)
        return first, min(first + size, self.length) - first

    @property
    def even(self) -> bool:
        """Whether all shares are equally long."""
        return self.length % self.ranks == 0
