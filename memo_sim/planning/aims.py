"""What a search is asked for beside its question."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Aims:
    """What a search has to find, and what it may leave out (``search.search``)."""

    keep: int = 1
    """How many of the best plans are exact."""
    front: bool = False
    """Whether the Pareto front is exact, too."""
    prune: bool = True
    """Whether candidates may be left out."""
    siblings: float = 0.0
    """How many times the best plan's step the plans take at most whose policies are evaluated on its layout."""
    enough_s: float | None = None
    """Step seconds at which the search ends: with the first plan that fits and needs no longer."""
