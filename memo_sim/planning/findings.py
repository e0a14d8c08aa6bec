"""Bounds and outcomes of a search's candidates, found here, or ahead by other processes (``ahead.py``)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from functools import partial
from itertools import islice
from math import inf

import msgspec

from memo_sim.contract.plan import Decisions, Layout
from memo_sim.planning.ahead import LONG_QUEUE, QUEUE, Ahead, Number, Offer
from memo_sim.planning.aims import Aims
from memo_sim.planning.bounded_candidates import Bounded, BoundedLayout
from memo_sim.planning.examination import Examination, Found, Needed, begin, bound_layouts, examine, learn
from memo_sim.planning.few_layers import Counts, Lowered
from memo_sim.planning.outcome import Evaluated, Key, ranked_s
from memo_sim.planning.plays import is_compiled
from memo_sim.planning.processes import Helper, Task, Team
from memo_sim.planning.ranking import Ranking
from memo_sim.planning.rivals import Opened, Rivals
from memo_sim.planning.space import Candidate, Space
from memo_sim.planning.subsequences import swap_each

Waiting = tuple[Key, Number, Bounded | BoundedLayout]
"""What may still be the best: its least key, its number, and a candidate or layout."""

AT_ONCE = 32
"""Layouts whose first bounds are one part of the work that processes share: some tens of milliseconds."""


def _family(layout: Layout) -> Layout:
    """Return a layout that others have whose kernels are the same, which one process prices (``few_layers.Passes``)."""
    return msgspec.structs.replace(layout, pp=1, pp_layers=(), schedule="1f1b", virtual_stages=1, dp=1, zero=0)


class Findings:
    """What one search finds out about its candidates, each when it is asked for."""

    def __init__(self, examination: Examination, ranking: Ranking, opened: Opened, aims: Aims) -> None:
        self._examination = examination
        self._ranking = ranking
        self._opened = opened
        self._aims = aims
        self._ahead: Ahead | None = None
        self._sent: dict[Helper, Counts] = {}
        """How many of the passes' results each process has got."""
        self._earlier = examination.passes.counts
        """How many of them are from earlier searches."""
        self._plays_seen = 0
        """How many plays are counted in ``_fastest_s``, or are from earlier searches."""
        self._fastest_s = inf
        """The least step seconds of candidates' plans that were played."""
        self.first: list[Waiting] = []
        """What is looked at before all that waits, as a heap."""
        self.waiting: list[Waiting] = []
        """What is still to be looked at, as a heap."""
        self.at: Collection[Decisions] = ()
        """The plans of the candidate that is being evaluated, as ``Evaluation.shared_plans`` returns them."""
        self.all_matter = not aims.prune or aims.front
        """Whether what waits is evaluated whatever was found."""

    def share(self, team: Team, space: Space, *, goes_on: bool) -> None:
        """Let other processes work ahead. ``goes_on``: whether the search uses the passes of an earlier one."""
        examination = self._examination
        first = (begin, (examination.question, self._aims, space.policies, goes_on))
        self._plays_seen = len(examination.plays.known)
        self._ahead = Ahead(team, self, begin=first, kept={"examination": examination}, task=examine)
        examination.plays.before = partial(self._ahead.give, LONG_QUEUE)

    def end(self) -> None:
        """Take back what other processes have not begun."""
        if self._ahead:
            self._ahead.end()

    def bounded_layouts(self, layouts: Sequence[Layout]) -> list[BoundedLayout]:
        """Return layouts with their first bounds."""
        if self._ahead is None:
            return self._examination.layouts(layouts)
        families: dict[Layout, list[int]] = {}
        for place, layout in enumerate(layouts):
            families.setdefault(_family(layout), []).append(place)
        places = [place for alike in families.values() for place in alike]
        parts = [[layouts[at] for at in places[first : first + AT_ONCE]] for first in range(0, len(places), AT_ONCE)]
        divided = self._ahead.divided(bound_layouts, self._examination.layouts, parts)
        found = dict(zip(places, (one for part in divided for one in part), strict=True))
        return [found[place] for place in range(len(layouts))]

    def tightened(self, number: Number, one: Bounded | BoundedLayout) -> Bounded | BoundedLayout:
        """Return a candidate or layout with its next tighter bounds."""
        found: Bounded | BoundedLayout | None = None
        if self._ahead:
            self.at = ()
            self._ahead.give(LONG_QUEUE if self.takes_long(one) else QUEUE)
            found = self._ahead.bounded(number, one)
        if found is None:
            return self._examination.tightened(one, self._ranking.limit_s())
        # What this process has is used again; the other's is equal.
        if isinstance(found, Bounded) and isinstance(one, Bounded):
            return msgspec.structs.replace(found, candidate=one.candidate)
        return found

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

    def expected_key(self) -> Key:
        """Return the limit, or the key of the fastest played plan where that is lower: likely the next limit.

        That plan is a candidate's, which may not be evaluated yet. Plays count where the best plan alone is kept, and
        once one is ranked.
        """
        most, known = self.limit_key(), self._examination.plays.known
        if most[0] or self._aims.keep > 1:
            return most
        for decisions, prediction in islice(known.items(), self._plays_seen, None):
            if prediction.step_s is not None and self._is_of_candidate(decisions):
                self._fastest_s = min(self._fastest_s, ranked_s(prediction.step_s))
        self._plays_seen = len(known)
        return min(most, (False, False, self._fastest_s))

    def _is_of_candidate(self, decisions: Decisions) -> bool:
        """Return whether a plan is a candidate's, at any alpha; other plans are played for comparison."""
        return decisions in self._opened or swap_each(decisions, 0) in self._opened

    def _limit_s(self, most: Key) -> float:
        """Return the step seconds of the limit ``most``, or of the last of the best plans where that tells nothing."""
        return self._ranking.limit_s() if most[0] else most[2]

    def takes_long(self, one: Bounded | BoundedLayout) -> bool:
        """Return whether ranges are halved or a stage is played for the next bounds, or plans are."""
        return isinstance(one, Bounded) and one.next_bound in {"alone", "halved", "played"}

    def plays_next(self, one: Bounded | BoundedLayout) -> bool:
        """Return whether plans are played next for a candidate or layout."""
        return isinstance(one, Bounded) and one.is_played_next

    def next_name(self, one: Bounded | BoundedLayout, most: Key) -> Hashable:
        """Return the name of the next bounds of a candidate or layout."""
        return one.next_name(self._limit_s(most))

    def offered(self, one: Bounded | BoundedLayout, last: Key, soon: Key, most: Key) -> Offer | None:
        """Return a task of another process, which ends where bounds pass ``last``; None where there is nothing to do.

        Layouts are opened by the search, and plans are played only as long as bounds do not pass ``soon``.
        """
        limit_s = self._limit_s(most)
        if isinstance(one, BoundedLayout):
            if not one.next_name(limit_s):
                return None
            none = Rivals(None, None)
            return Offer((one, Needed(last, soon, limit_s, none, known={}, compiled=is_compiled())), ())
        if one.is_played_next and one.least_key > soon:
            return None
        candidate, plays = one.candidate, self._examination.plays
        rivals = self._opened.rivals(candidate.base)
        shared = self._examination.evaluation.shared_plans(candidate, rivals)
        known = plays.known_among(shared)
        needed = Needed(last, soon, limit_s, rivals, known=known, compiled=is_compiled())
        return Offer((one, needed), shared - known.keys())

    def beside_itself(
        self, one: Bounded | BoundedLayout, needed: Needed
    ) -> Iterator[tuple[Hashable, Bounded | BoundedLayout | Found]]:
        """Examine a candidate or layout in this process: only predictions and the best plan's simulation are kept."""
        if isinstance(one, BoundedLayout):
            yield from self._examination.parts(one, needed)
            return
        at = self.at
        self.at = {*at, *self._examination.evaluation.shared_plans(one.candidate, needed.rivals)}
        try:
            yield from self._examination.parts(one, needed)
        finally:
            self.at = at

    def unsent(self, helper: Helper) -> tuple[Task, Lowered] | None:
        """Return a task that gives another process new results of lowerings, and them; None where there are none."""
        passes = self._examination.passes
        sent, self._sent[helper] = self._sent.get(helper, self._earlier), passes.counts
        return None if sent == passes.counts else (learn, passes.lowered_since(sent))

    def hear(self, found: Found | Lowered, helper: Helper | None) -> None:
        """Keep the predictions or the results of lowerings of another process, or predictions of this one."""
        if isinstance(found, Found):
            self._examination.plays.known.update(found.used)
            return
        assert helper is not None
        sent = self._sent.get(helper, self._earlier)
        self._sent[helper] = self._examination.passes.learn(found, sent)
