"""Bounds and outcomes of a search's candidates, found here, or ahead by other processes (``ahead.py``)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import replace

from memo_sim.contract.plan import Decisions
from memo_sim.planning.ahead import Ahead, Number, Offer
from memo_sim.planning.aims import Aims
from memo_sim.planning.bounded_candidates import Bounded, BoundedLayout
from memo_sim.planning.examination import Examination, Found, Needed, begin, examine
from memo_sim.planning.outcome import Evaluated, Key
from memo_sim.planning.plays import is_compiled
from memo_sim.planning.processes import Team
from memo_sim.planning.ranking import Ranking
from memo_sim.planning.rivals import Opened
from memo_sim.planning.space import Candidate

Waiting = tuple[Key, Number, Bounded | BoundedLayout]
"""What may still be the best: its least key, its number, and a candidate or layout."""


class Findings:
    """What one search finds out about its candidates, each when it is asked for."""

    def __init__(self, examination: Examination, ranking: Ranking, opened: Opened, aims: Aims) -> None:
        self._examination = examination
        self._ranking = ranking
        self._opened = opened
        self._aims = aims
        self._ahead: Ahead | None = None
        self.waiting: list[Waiting] = []
        """What is still to be looked at, as a heap."""
        self.at: Collection[Decisions] = ()
        """The plans of the candidate that is being evaluated, as ``Evaluation.shared_plans`` returns them."""
        self.all_matter = not aims.prune or aims.front
        """Whether what waits is evaluated whatever was found."""

    def share(self, team: Team, *, goes_on: bool) -> None:
        """Let other processes work ahead. ``goes_on``: whether the search uses the passes of an earlier one."""
        first = (begin, (self._examination.question, self._aims, goes_on))
        self._ahead = Ahead(team, self, begin=first, task=examine, taken=Bounded)
        self._examination.plays.between = self._ahead.give

    def end(self) -> None:
        """Take back what other processes have not begun."""
        if self._ahead:
            self._ahead.end()

    def tightened(self, number: Number, one: Bounded) -> Bounded:
        """Return a candidate with its next tighter bounds."""
        found: Bounded | None = None
        if self._ahead:
            self.at = ()
            self._ahead.give()
            found = self._ahead.bounded(number, one)
        if found is None:
            return self._examination.bounds.tightened(one, self._ranking.limit_s())
        return replace(found, candidate=one.candidate)

    def outcome(self, number: Number, candidate: Candidate) -> Evaluated | None:
        """Return the outcome of one candidate, as ``Evaluation.outcome``."""
        evaluation, rivals = self._examination.evaluation, self._opened.rivals(candidate.base)
        found: Found | None = None
        if self._ahead:
            self.at = evaluation.shared_plans(candidate, rivals)
            self._ahead.give()
            found = self._ahead.outcome(number)
        if found is None:
            return evaluation.outcome(candidate, rivals)
        self._examination.plays.note(found.used)
        return found.outcome

    # The methods that ``Ahead`` calls (``ahead.Searching``):

    def limit_key(self) -> Key:
        """Return the largest key of a candidate that may matter."""
        last = self._ranking.last_kept()
        return (True, True, float("inf")) if self.all_matter or last is None else last[:3]

    def next_name(self, one: Bounded) -> Hashable:
        """Return the name of a candidate's next bounds."""
        return one.next_name(self._ranking.limit_s())

    def offered(self, one: Bounded, last: Key) -> Offer:
        """Return a candidate as a task of another process, which ends where the candidate's bounds pass ``last``."""
        candidate, plays = one.candidate, self._examination.plays
        rivals = self._opened.rivals(candidate.base)
        shared = self._examination.evaluation.shared_plans(candidate, rivals)
        known = plays.known_among(shared)
        needed = Needed(last=last, limit_s=self._ranking.limit_s(), rivals=rivals, known=known, compiled=is_compiled())
        return Offer((one, needed), shared - known.keys())

    def beside_itself(self, one: Bounded, needed: Needed) -> Iterator[tuple[Hashable, Bounded | Found]]:
        """Examine a candidate in this process: only predictions and the simulation of the best plan are kept."""
        at = self.at
        self.at = {*at, *self._examination.evaluation.shared_plans(one.candidate, needed.rivals)}
        try:
            yield from self._examination.parts(one, needed)
        finally:
            self.at = at

    def hear(self, found: Found) -> None:
        """Keep the predictions that another process has made."""
        self._examination.plays.known.update(found.used)
