"""Mesh coordinates of a rank in a layout, the ranks of its groups, and its share of a range that ZeRO divides."""

from __future__ import annotations

from dataclasses import dataclass

from memo_sim.contract.plan import Layout
from memo_sim.program.layout import rank_order as ranks


@dataclass(frozen=True, slots=True)
class MeshCoordinates:
    """The mesh coordinates of one rank in a layout.

    Groups are ``tp``, ``metp``, ``ulysses``, ``cp``, ``dp``, ``pp``, ``grads``, ``ends``, ``shard``, ``replicate``,
    ``ep``, ``expert_grads``, ``expert_shard`` and ``expert_replicate``.
    ``memo_sim.program.layout.rank_order`` says which ranks each group has.
    """

    layout: Layout
    rank: int = 0

    def at(self, group: str) -> int:
        """Return this rank's index in its group."""
        return ranks.coordinate(group, self.layout, self.rank)

    def size(self, group: str) -> int:
        """Return the number of ranks in the group."""
        return ranks.degree(group, self.layout)

    def members(self, group: str) -> list[int]:
        """Return the ranks of this rank's group, in order of their coordinates."""
        return ranks.members(group, self.layout, self.rank)


@dataclass(frozen=True, slots=True)
class Share:
    """A range of ``length`` elements in equal shares; the last ranks may have less, or nothing.

    length 10, 4 ranks:   [0 1 2][3 4 5][6 7 8][9]
    """

    length: int
    ranks: int

    def of(self, index: int) -> tuple[int, int]:
        """Return (first element, number of elements) of one rank's share."""
        size = -(-self.length // self.ranks)
        first = min(index * size, self.length)
        return first, min(first + size, self.length) - first

    @property
    def even(self) -> bool:
        """Whether all shares have the same length."""
        return self.length % self.ranks == 0
