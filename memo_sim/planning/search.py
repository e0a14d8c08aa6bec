"""Evaluates the candidates of a question in the engine, and ranks them.

Every candidate first gets lower bounds (``bounded_candidates.py``): no alpha of it is faster or needs less memory.
Candidates with the smallest bounds are played first; those that may fit come before those that cannot. Once ``keep``
plans rank before a candidate's bounds, that candidate and all after it are pruned. So the ``keep`` best plans are those
that evaluating everything would give. When the Pareto front is asked for, a candidate is pruned only if a played plan
is as fast as its bound and needs no more of either memory. Tighter bounds cost a lowering, so they are computed only
when the previous ones do not decide.

Bounds that cost much end early where a time is known that candidates have to beat. So plans without pipeline stages,
which are soon played, come before the first such bound; and a pipeline whose bound is far below that time comes next.

Where there are many layouts, a layout first gets lower bounds of its own, and tighter ones when it is the next: from
the later steps of its ring, if that is long, then from all kernels, then with waits. With ZeRO 3 and no pipeline
stages, waits come at first without what it gathers. A layout's candidates are made only when these do not decide. In
pipelines, whose plays are long, ranges of alpha get lower bounds as well.

Plans on PyTorch's allocator that may be the best are played under lower limits of its memory, too
(``allocator_limits.py``).

Other candidates are pruned because a simpler plan is at least as good (``evaluation.py``).

Where no plan fits, the last resorts of some systems are tried (``System.last_resorts``). They are not tried beside a
plan that fits: a second search would need as long as the first. So a device with a little more memory, in which another
plan just fits, may have a slower best plan than one without.

cp beside subsequences is tried before them, and also only where no other plan fits (``layouts.put_off``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf

from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.plan import Layout
from memo_sim.contract.progress import Progress
from memo_sim.engine.fast_loop import run_fast
from memo_sim.planning.ahead import Number
from memo_sim.planning.aims import Aims
from memo_sim.planning.allocator_limits import least_limited_s, may_gain, with_best_limit
from memo_sim.planning.bounded_candidates import LEAST, Bounded, BoundedLayout
from memo_sim.planning.examination import Examination
from memo_sim.planning.few_layers import Passes
from memo_sim.planning.findings import Findings, Waiting
from memo_sim.planning.layouts import put_off
from memo_sim.planning.offload_windows import with_best_window
from memo_sim.planning.outcome import Evaluated, Key, SearchResult, as_good
from memo_sim.planning.plays import play, predict
from memo_sim.planning.presets import Policy
from memo_sim.planning.processes import current_team
from memo_sim.planning.question import Question
from memo_sim.planning.ranking import Ranking
from memo_sim.planning.rivals import Opened
from memo_sim.planning.space import Candidate, Space, last_resorts, with_alpha
from memo_sim.planning.stage_alone import stands_alone

__all__ = ["Evaluated", "SearchResult", "best_with_more_memory", "play", "predict", "search", "search_beside"]

MOST_LAYOUTS_AT_ONCE = 256
"""More layouts are not all opened: each first gets lower bounds of its own, from states and the compute lane, or a part
of it, and its candidates are made only when these do not decide. A layout that is pruned counts as many candidates as
policies."""


def search(
    question: Question,
    *,
    keep: int = 1,
    front: bool = False,
    prune: bool = True,
    siblings: float = 0.0,
    enough_s: float | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Return every candidate of ``question`` evaluated or pruned; ``progress`` is called with (done, all).

    - The ``keep`` best plans are exact, but for layouts that are put off (``layouts.put_off``).
    - ``front``: the Pareto front is exact too; candidates with open alpha are then evaluated at every eighth as well.
    - ``prune``: without it, everything is evaluated.
    - ``siblings``: on the best plan's layout, the policies are evaluated that may take at most so many times its step;
      with infinity all, for the explanation. Attention in chunks beside a ring is played only where it may win.
    - ``enough_s``: the search ends at the first plan that fits and takes no longer; all others count as pruned.

    Raises:
        Infeasible: when no layout divides the model and the sequence.
        UsageError: when pinned knobs contradict each other or the cluster.
    """

    aims = Aims(keep=keep, front=front, prune=prune, siblings=siblings, enough_s=enough_s)
    space, tried = Space(question), last_resorts(question)
    later = put_off(question, space.layouts) if prune and not front else []
    space.layouts = [layout for layout in space.layouts if layout not in later]
    result = _Search(question, aims).run(space, progress)
    if later and result.best is None:
        space = Space(question)
        space.layouts = later
        result = _with_more(result, space, _Search(question, aims, result.passes))
    elif later:  # each counts as many candidates as policies, as layouts that are pruned do
        result.pruned += len(later) * len(space.policies)
    if result.best is not None or not tried:
        return result
    found = _with_more(result, Space(question, tried), _Search(question, aims, result.passes))
    return found if found.best is not None or not found.ranked else _with_nearer(found, question, tried)


def _with_nearer(first: SearchResult, question: Question, tried: tuple[Policy, ...]) -> SearchResult:
    """Return a result without a plan that fits, with the policies of ``tried`` that are nearer, on its nearest layout.

    What is missing, and what would help, is then said of them.
    """
    nearest = first.ranked[0]
    again, space = _Search(question, Aims(), first.passes), Space(question, tried)
    space.layouts = [layout for layout in space.layouts if layout == nearest.decisions.layout]
    again.ranking.limit = nearest
    try:
        second = again.run(space)
    except Infeasible:
        return first
    nearer = [e for e in second.ranked if e.rank_key < nearest.rank_key]
    return _merged(first, replace(second, ranked=nearer, evaluated=len(nearer), pruned=0))


def _with_more(first: SearchResult, space: Space, again: _Search) -> SearchResult:
    """Return the result of a search without a plan that fits, with the plans of ``space`` where one of them fits."""
    again.ranking.fitting = True
    try:
        second = again.run(space)
    except Infeasible:
        return first
    return first if second.best is None else _merged(first, second)


def _merged(first: SearchResult, second: SearchResult) -> SearchResult:
    ranked = sorted([*first.ranked, *second.ranked], key=lambda e: e.rank_key)
    evaluated, pruned = first.evaluated + second.evaluated, first.pruned + second.pruned
    return SearchResult(ranked, evaluated, pruned, first.refused, first.passes, fastest=second.fastest)


def search_beside(
    question: Question,
    best: Evaluated,
    tried: Mapping[Layout, Policy],
    before: SearchResult,
    *,
    siblings: float = 0.0,
) -> SearchResult:
    """Return the plans that may be faster than ``best``, a plan of another question, in a search's result.

    ``tried``: the policy to try, by layout; with ``siblings`` all policies, as far as ``search`` evaluates them. The
    result has what was played on the way; it need not have a best plan. ``before``: a search whose lowered passes and
    played plans are used again.
    """
    try:
        space = Space(question)
    except (Infeasible, UsageError):
        return SearchResult([], 0, 0)
    space.layouts = [layout for layout in space.layouts if layout in tried]
    made = _Search(question, Aims(siblings=siblings), before.passes)
    made.ranking.limit = None if siblings else best
    made.plays.known = {**before.played, **{e.decisions: e.prediction for e in before.ranked}}
    made.plays.fastest = before.fastest
    made.chosen = lambda one: siblings > 0 or one.policy == tried[one.base.layout]
    return made.run(space)


def best_with_more_memory(question: Question, before: SearchResult) -> Evaluated | None:
    """Return the best plan of a question with more memory than the search ``before`` had.

    Plans that fitted before still fit, so only plans that may be faster are played.

    Raises:
        Infeasible: when no layout divides the model and the sequence.
    """
    if before.best is not None:  # which may have a larger micro-batch than the question
        question = replace(question, micro_batch=before.best.decisions.micro_batch)
    made, space = _Search(question, Aims(), before.passes), Space(question)
    made.ranking.limit = before.best
    later = put_off(question, space.layouts)
    if before.best is not None and before.best.decisions.layout not in later:
        space.layouts = [layout for layout in space.layouts if layout not in later]
    found = made.run(space)
    if found.best is None and before.best is None and (tried := last_resorts(question)):
        found = _with_more(found, Space(question, tried), _Search(question, Aims(), before.passes))
    fitting = [e for e in (before.best, found.best) if e is not None]
    return min(fitting, key=lambda e: e.rank_key, default=None)


def _eighths(candidate: Candidate) -> list[Candidate]:
    """Return a candidate with open alpha at every eighth: less host memory for more time or more device memory."""
    if candidate.policy.alpha is not None:
        return []
    least = 1 if candidate.policy.swaps_some else 0
    made = []
    for eighth in range(least, 8):
        policy = replace(candidate.policy, alpha=eighth / 8)
        base = with_alpha(candidate.base, candidate.base.recompute, eighth / 8)
        if base.swapped_tokens or not least:
            made.append(Candidate(base, policy))
    return made


def _is_small(candidate: Candidate) -> bool:
    """Return whether a plan that cannot win is soon played: chunks in a ring have a call for every pair and rank."""
    return not (candidate.policy.attention_chunks and candidate.base.layout.ring > 1)


NEAR = 1.1
"""Plans without pipeline stages are looked at first whose bounds are at most so many times the least one of a pipeline.

The first bounds of a pipeline are often a tenth below its step."""

PROMISING = 0.992
"""The bound of one stage is about so many times the step of most pipelines, or more."""


@dataclass
class _Counts:
    """How many candidates a search has looked at; a layout that is not opened counts as many as policies."""

    every: int = 0
    done: int = 0
    unopened: int = 0
    stood_for: int = 0
    """Whose plan another one has, or one that is as good."""


def _layout_of(one: Bounded | BoundedLayout) -> Layout:
    return one.layout if isinstance(one, BoundedLayout) else one.candidate.base.layout


class _Search:
    """One search: what waits, what it has found, and the best so far."""

    def __init__(self, question: Question, aims: Aims, passes: Passes | None = None) -> None:
        """``passes``: those of an earlier search on the same devices, whose lowerings are used again."""
        self._question = question
        self._aims = aims
        self._examination = Examination(question, aims, passes)
        self.plays = self._examination.plays
        self.ranking = Ranking(aims.keep)
        self._opened = Opened()
        self._findings = Findings(self._examination, self.ranking, self._opened, aims)
        self._goes_on = passes is not None
        self.chosen: Callable[[Candidate], bool] | None = None
        """The candidates to look at, when not all."""
        self._pruned: list[tuple[Number, Bounded]] = []
        self._counts = _Counts()
        self._tried_without_stages = False

    def run(self, space: Space, progress: Progress | None = None) -> SearchResult:
        """Return the candidates of ``space`` evaluated or pruned.

        Raises:
            Infeasible: when there are none.
        """
        waiting, counts = self._findings.waiting, self._counts
        self._begin(space)
        counts.every = sum(len(space.policies) if isinstance(one, BoundedLayout) else 1 for _, _, one in waiting)
        while waiting:
            if self._is_costly(waiting[0]):
                self._try_without_stages(space, progress)
            self._look_at_next(space, waiting, progress)
        pruned, unopened = self._pruned, counts.unopened
        refused = space.refused(none_found=not (self._opened or unopened) and self.chosen is None)
        ranked, passes = self.ranking.outcomes, self._examination.passes
        if not ranked:
            self._findings.end()
            return SearchResult([], 0, len(pruned) + counts.stood_for + unopened, refused, passes)
        self._limit_the_allocator()
        self._widen_the_window()
        best = min(ranked, key=lambda e: e.rank_key)
        chosen = [(number, one.candidate) for number, one in pruned if self._is_sibling(one, best)]
        beside = sorted(chosen, key=lambda each: each[0])
        counts.stood_for += self._add_all(beside)
        self._findings.end()
        ranked = sorted(ranked, key=lambda e: e.rank_key)
        ranked[0] = self._examination.evaluation.with_refusals(ranked[0])
        left = len(pruned) - len(beside) + counts.stood_for + unopened
        played = {plan: self.plays.known[plan] for plan in self.plays.used}
        return SearchResult(ranked, len(ranked), left, refused, passes, played=played, fastest=self.plays.fastest)

    def _look_at_next(self, space: Space, waiting: list[Waiting], progress: Progress | None) -> None:
        """Prune, tighten, open or evaluate the first of what waits; what comes of it waits with the others."""
        counts, prune = self._counts, self._aims.prune
        least_key, number, one = heappop(waiting)
        beyond = prune and (self._found_enough() or self._cannot_matter(one, least_key))
        if isinstance(one, BoundedLayout):
            if not (beyond or one.counted == "waits"):
                bounded = self._findings.tightened(number, one)
                heappush(waiting, (bounded.least_key, number, bounded))
                return
            counts.every -= len(space.policies)
            if beyond:
                counts.unopened += len(space.policies)
            else:
                counts.every += self._open(space, one.layout, number[0], waiting)
            return
        if one.next_bound and prune and not beyond:
            bounded = self._findings.tightened(number, one)
            assert isinstance(bounded, Bounded)
            heappush(waiting, (LEAST if self._is_promising(bounded) else bounded.least_key, number, bounded))
            return
        if beyond:
            self._pruned.append((number, one))
        else:
            if not (waiting or self._findings.waiting or self.ranking.outcomes):
                self.plays.loop = run_fast.with_simpy  # the only one is played as it is shown, and not again
            counts.stood_for += not self._add(number, one.candidate)
        counts.done += 1
        if progress:
            progress(counts.done, max(counts.done, counts.every))

    def _is_promising(self, one: Bounded) -> bool:
        """Return whether a pipeline may be faster than the best plans by more than bounds of one stage are too low.

        It is evaluated next: with shorter times, most bounds of others end earlier.
        """
        base, limit_s = one.candidate.base, self.ranking.limit_s()
        if one.next_bound not in {"memory", "played", ""} or one.bound is None or one.shortfall_bytes:
            return False
        return base.layout.pp > 1 and stands_alone(base) and one.bound.step_s < PROMISING * limit_s < inf

    def _is_costly(self, first: Waiting) -> bool:
        """Return whether a pipeline's alphas are to be bound against no time yet, for the first time."""
        one, prunes = first[2], self._aims.prune and not self._aims.front
        if self._tried_without_stages or not (prunes and isinstance(one, Bounded)) or _layout_of(one).pp == 1:
            return False
        if one.next_bound not in {"halved", "alone"}:
            return False
        return self.ranking.limit_s() == inf

    def _try_without_stages(self, space: Space, progress: Progress | None) -> None:
        """Look first at what has no pipeline stages, as far as its bounds are near the least ones.

        Such plans are soon played, and most bounds of pipelines end early where a time is known that they have to beat.
        """
        self._tried_without_stages = True
        first, waiting = self._findings.first, self._findings.waiting
        most = (False, False, NEAR * waiting[0][0][2])
        first[:] = [entry for entry in waiting if _layout_of(entry[2]).pp == 1]
        waiting[:] = [entry for entry in waiting if _layout_of(entry[2]).pp > 1]
        heapify(waiting)
        heapify(first)
        while first and first[0][0] < most and not self.ranking.is_after(first[0][0]):
            self._look_at_next(space, first, progress)
        for entry in first:
            heappush(waiting, entry)
        first.clear()

    def _is_sibling(self, one: Bounded, best: Evaluated) -> bool:
        """Return whether a pruned candidate is evaluated nevertheless, as it is on the best plan's layout.

        Its bounds are computed anew: those that pruned it may have been made against other times by other processes.
        """
        if not self._aims.siblings:
            return False
        candidate, most_s = one.candidate, self._aims.siblings * (best.prediction.step_s or inf)
        if candidate.base.layout != best.decisions.layout or not _is_small(candidate):
            return False
        if most_s < inf:
            one = self._examination.bounds.rough(candidate, self._opened)
        while one.next_bound and one.least_key < (False, False, most_s) < (False, False, inf):
            one = self._examination.bounds.tightened(one, most_s)
        return one.least_key <= (False, False, most_s) or most_s == inf

    def _begin(self, space: Space) -> None:
        """Let all layouts wait: with their candidates, or where there are many, with lower bounds of their own."""
        self._examination.space = space
        if team := current_team():
            self._findings.share(team, space, goes_on=self._goes_on)
        if self._aims.prune and not self._aims.front and len(space.layouts) > MOST_LAYOUTS_AT_ONCE:
            for place, one in enumerate(self._findings.bounded_layouts(space.layouts)):
                heappush(self._findings.waiting, (one.least_key, (place, -1), one))
        else:
            for place, layout in enumerate(space.layouts):
                self._open(space, layout, place, self._findings.waiting)

    def _open(self, space: Space, layout: Layout, number: int, waiting: list[Waiting]) -> int:
        """Make a layout's candidates, with rough bounds, which then wait, and return how many they are."""
        found = space.of(layout)
        if self.chosen is not None:
            found = [candidate for candidate in found if self.chosen(candidate)]
        if self._aims.front:
            found = [*found, *(eighth for candidate in found for eighth in _eighths(candidate))]
        self._opened.add(layout, found)
        for place, candidate in enumerate(found):
            one = self._examination.bounds.rough(candidate, self._opened)
            heappush(waiting, (one.least_key, (number, place), one))
        return len(found)

    def _limit_the_allocator(self) -> None:
        """Play plans that may then be the best under lower limits of PyTorch's allocator (``allocator_limits.py``)."""
        question, ranked = self._question, self.ranking.outcomes
        if question.memory_policy == "planned" or question.pins.allocator_limit_gib is not None or self._aims.enough_s:
            return
        steps = [e.prediction.step_s for e in (*ranked, self.ranking.limit) if e and e.prediction.step_s is not None]
        best_s = min(steps, default=float("inf"))
        capacity_bytes = question.hardware.device_memory_bytes.value
        for at in self.ranking.places():
            one = ranked[at]
            if not may_gain(one, capacity_bytes) or self._least_limited_s(one) >= best_s:
                continue
            ranked[at] = one = with_best_limit(one, self.plays.predict, capacity_bytes=capacity_bytes)
            best_s = min(best_s, one.prediction.step_s or best_s)

    def _widen_the_window(self) -> None:
        """Play the best plan in wider offload windows, where none is pinned and copies may be late (SPPO)."""
        if self._question.pins.offload_window is not None or self._aims.front or self._aims.enough_s:
            return
        at, ranked = self.ranking.places()[0], self.ranking.outcomes
        chosen, fits = ranked[at].decisions, ranked[at].prediction.status == "ok"
        if not (chosen.offload_window and fits):
            return
        if not self._examination.evaluation.wider_gains_nothing(chosen, self._opened.rivals(chosen)):
            ranked[at] = with_best_window(ranked[at], self.plays.predict)

    def _least_limited_s(self, one: Evaluated) -> float:
        """Return a time that no limit of the allocator makes a plan's step shorter than."""
        bounds = self._examination.bounds.of_plans
        return bounds.of(one.decisions).step_s if one.prediction.step_s is None else least_limited_s(one)

    def _found_enough(self) -> bool:
        found = self.ranking.outcomes
        return bool(found) and self._examination.evaluation.enough(found[-1].prediction)

    def _cannot_matter(self, one: Bounded | BoundedLayout, least_key: Key) -> bool:
        """Return whether no outcome of a candidate or layout can change the best plans, or the front."""
        bound = one.bound if isinstance(one, Bounded) else None
        if isinstance(one, Bounded) and bound is None:
            return False
        if self._aims.front and bound is not None and not least_key[0]:
            least = (bound.step_s, bound.device_bytes, bound.host_bytes_per_node)
            return any(as_good(e.costs, least) for e in self.ranking.outcomes if e.prediction.status == "ok")
        return self.ranking.is_after(least_key)

    def _add_all(self, candidates: list[tuple[Number, Candidate]]) -> int:
        """Evaluate candidates in their order; return of how many another candidate gives the same plan."""
        same, waiting, self._findings.all_matter = 0, self._findings.waiting, True
        for place, (number, candidate) in enumerate(candidates):
            waiting.append(((*LEAST[:2], float(place)), number, Bounded(candidate)))
        while waiting:
            _, number, one = heappop(waiting)
            same += isinstance(one, Bounded) and not self._add(number, one.candidate)
        return same

    def _add(self, number: Number, candidate: Candidate) -> bool:
        """Evaluate a candidate; return False when another candidate gives the same plan."""
        outcome = self._findings.outcome(number, candidate)
        return outcome is not None and self.ranking.add(outcome)
