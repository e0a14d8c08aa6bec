"""The outcomes that a search has found, and the rank that a candidate must reach to be among the best."""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.planning.outcome import Evaluated, Key


class Ranking:
    """Outcomes of one search, one for each plan, in the order in which they were found."""

    def __init__(self, keep: int) -> None:
        """``keep``: how many of the best plans count."""
        self._keep = keep
        self.outcomes: list[Evaluated] = []
        self._places: dict[Decisions, int] = {}
        """The index in ``outcomes`` of each plan."""
        self.limit: Evaluated | None = None
        """A plan that is known, though it is not an outcome of this search: plans that rank after it are pruned."""
        self.fitting = False
        """Whether plans that do not fit are of no use."""
        self._last: tuple[int, tuple[bool, bool, float, int, int, str] | None] = (-1, None)
        """How many plans are known, and the rank key of the last of the ``keep`` best."""

    def add(self, outcome: Evaluated) -> bool:
        """Add an outcome; return False when another candidate gave the same plan.

        That happens when the alpha found by a search is an eighth that a front asks for. The outcome of the search is
        kept, because it knows the neighbouring alphas.
        """
        at = self._places.setdefault(outcome.decisions, len(self.outcomes))
        if at == len(self.outcomes):
            self.outcomes.append(outcome)
            return True
        if outcome.policy.alpha is None:
            self.outcomes[at] = outcome
        return False

    def places(self) -> list[int]:
        """Return the indices of the outcomes, the best first."""
        return sorted(range(len(self.outcomes)), key=lambda at: self.outcomes[at].rank_key)

    def last_kept(self) -> tuple[bool, bool, float, int, int, str] | None:
        """Return the rank key of the last of the ``keep`` best plans so far; None where there are fewer."""
        known = [*self.outcomes, self.limit] if self.limit else self.outcomes
        if len(known) != self._last[0]:
            keys = sorted(e.rank_key for e in known)
            self._last = len(known), keys[self._keep - 1] if len(keys) >= self._keep else None
        return self._last[1]

    def limit_s(self) -> float:
        """Return the step seconds of the last of the ``keep`` best plans so far; infinite if it does not fit."""
        last = self.last_kept()
        return float("inf") if last is None or last[0] else last[2]

    def is_after(self, least_key: Key) -> bool:
        """Return whether nothing that ranks after ``least_key`` is among the ``keep`` best."""
        last = self.last_kept()
        return (self.fitting and least_key[0]) or (last is not None and last < least_key)
