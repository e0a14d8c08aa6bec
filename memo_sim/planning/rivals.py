"""Other candidates on whose plans a candidate's outcome depends: it is left out where a simpler one is as good."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memo_sim.contract.plan import Decisions, Layout
from memo_sim.planning.space import Candidate
from memo_sim.planning.subsequences import swap_each


@dataclass(frozen=True, slots=True)
class Rivals:
    """Plans of other candidates on the same layout; None where no candidate has such a plan."""

    kept: Decisions | None
    """The same plan without swaps."""
    hiding: Decisions | None
    """The plan that swaps what hides under the next subsequence (SPPO 5.2)."""


class Opened:
    """The candidates that a search has made so far, as far as others depend on them."""

    def __init__(self) -> None:
        self._bases: set[Decisions] = set()
        self._hiding: dict[Layout, Decisions] = {}

    def __contains__(self, decisions: Decisions) -> bool:
        """Return whether the plan is a candidate's, or the base of one with open alpha."""
        return decisions in self._bases

    def __bool__(self) -> bool:
        """Return whether there is a candidate."""
        return bool(self._bases)

    def add(self, layout: Layout, candidates: Iterable[Candidate]) -> None:
        """Take note of the candidates of a layout."""
        for candidate in candidates:
            self._bases.add(candidate.base)
            if candidate.policy.hides:
                self._hiding.setdefault(layout, candidate.base)

    def rivals(self, decisions: Decisions) -> Rivals:
        """Return the plans on which the outcome of a plan's candidate depends."""
        kept = swap_each(decisions, 0)
        return Rivals(kept if kept in self else None, self._hiding.get(decisions.layout))
