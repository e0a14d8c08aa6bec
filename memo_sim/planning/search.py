"""Evaluates the candidates of a question in the engine, and ranks them.

Every candidate first gets lower bounds (``lower_bounds.py``): no alpha of it is faster or needs less memory.
Candidates with the smallest bounds are played first; those that may fit come before those that cannot. Once ``keep``
plans rank before a candidate's bounds, that candidate and all after it are pruned. So the ``keep`` best plans are those
that evaluating everything would give. When the Pareto front is asked for, a candidate is pruned only if a played plan
is as fast as its bound and needs no more of either memory. Tighter bounds cost a lowering, so they are computed only
when the previous ones do not decide.

Where there are many layouts, a layout first gets lower bounds of its own, and its candidates are made only when these
do not decide. In pipelines, whose plays are long, ranges of alpha get lower bounds as well.

Plans on PyTorch's allocator that may be the best are played under lower limits of its memory, too
(``allocator_limits.py``).

Other candidates are pruned because a simpler plan is at least as good:

- a partial swap, when everything can be kept: keeping copies less;
- full recompute with swapped inputs, when the inputs can be kept: it computes the same;
- a wide offload window, when everything can be kept, or when, in the narrow window, a full swap is as fast as swapping
  only what hides.

A search for the Pareto front prunes none of these; the first two need less device memory.

Where no plan fits, the last resorts of some systems are tried (``System.last_resorts``). They are not tried beside a
plan that fits: it has allocation retries at most, and a second search would take as long as the first. So a device with
a little more memory, in which another plan just fits, may have a slower best plan than one without.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, Literal

from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.plan import Decisions, Layout, Prediction
from memo_sim.contract.progress import Progress
from memo_sim.engine.fast_loop import run_fast
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.planning.ahead import OUTCOME, Ahead, Number, Offer
from memo_sim.planning.allocator_limits import least_limited_s, may_gain, with_best_limit
from memo_sim.planning.alpha_linear_program import LinearProgram, linear_program
from memo_sim.planning.alpha_ranges import edges_of
from memo_sim.planning.alpha_ranges import least_step_s as least_step_s_of_alphas
from memo_sim.planning.alpha_search import Grid, best_alpha, best_partial_swap
from memo_sim.planning.bandwidth import offload_bandwidth
from memo_sim.planning.few_layers import Passes
from memo_sim.planning.lower_bounds import LowerBound, LowerBounds
from memo_sim.planning.offload_windows import with_best_window
from memo_sim.planning.outcome import Evaluated, SearchResult, as_good, ranked_s
from memo_sim.planning.pipeline_lower_bound import is_known, kept, least_step_s
from memo_sim.planning.presets import (
    FULL_SWAP,
    INPUTS_SWAPPED,
    INPUTS_SWAPPED_MLP_IN_BLOCKS,
    KEEP,
    PARTIAL_SWAP,
    ROWWISE_SWAPPED,
    Policy,
)
from memo_sim.planning.processes import Team, current_team
from memo_sim.planning.question import Question
from memo_sim.planning.space import Candidate, Space, last_resorts, policies, with_alpha
from memo_sim.planning.subsequences import swap_each

__all__ = ["Evaluated", "SearchResult", "best_with_more_memory", "play", "search", "search_beside"]

STAND_BACK = (PARTIAL_SWAP, INPUTS_SWAPPED, INPUTS_SWAPPED_MLP_IN_BLOCKS, ROWWISE_SWAPPED)
"""Policies that are not worth their copies when the same tensors can be kept on the device."""

MOST_KEPT = 400_000
"""Largest number of played instructions that a search keeps beside another plan; 100 to 300 MiB."""

MOST_LAYOUTS_AT_ONCE = 256
"""More layouts are not all opened: each first gets lower bounds of its own, from states and the compute lane, and its
candidates are made only when these do not decide. A layout that is pruned counts as many candidates as policies."""

RANGES: dict[str, int] = {"wide": 8, "narrow": 2}
"""Grid steps of the ranges of alpha that get lower bounds of their own, one after the other."""


def search(
    question: Question,
    *,
    keep: int = 1,
    front: bool = False,
    prune: bool = True,
    siblings: bool = False,
    enough_s: float | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Return every candidate of ``question`` evaluated or pruned; ``progress`` is called with (done, all).

    - The ``keep`` best plans are exact.
    - ``front``: the Pareto front is exact too; candidates with open alpha are then evaluated at every eighth as well.
    - ``prune``: without it, everything is evaluated.
    - ``siblings``: all policies on the best plan's layout are evaluated, for the explanation, but for attention in
      chunks beside a ring, which is played only where it may win.
    - ``enough_s``: the search ends at the first plan that fits and takes no longer; all others count as pruned.

    Raises:
        Infeasible: when no layout divides the model and the sequence.
        UsageError: when pinned knobs contradict each other or the cluster.
    """

    def made(passes: Passes | None = None) -> _Search:
        return _Search(
            question,
            keep=keep,
            front=front,
            prune=prune,
            siblings=siblings,
            enough_s=enough_s,
            passes=passes,
            team=current_team(),
        )

    result, tried = made().run(Space(question), progress), last_resorts(question)
    if result.best is not None or not tried:
        return result
    return _with_last_resorts(question, tried, result, made(result.passes))


def _with_last_resorts(
    question: Question, tried: tuple[Policy, ...], first: SearchResult, again: _Search
) -> SearchResult:
    """Return the result of a search without a plan that fits, with the last resorts where one of them fits."""
    again.limit = first.ranked[0] if first.ranked else None  # plans that are further from fitting are not played
    try:
        second = again.run(Space(question, tried))
    except Infeasible:
        return first
    if second.best is None:
        return first
    ranked = sorted([*first.ranked, *second.ranked], key=lambda e: e.rank_key)
    evaluated, pruned = first.evaluated + second.evaluated, first.pruned + second.pruned
    return SearchResult(ranked, evaluated, pruned, first.refused, first.passes, fastest=second.fastest)


def search_beside(
    question: Question,
    best: Evaluated,
    tried: Mapping[Layout, Policy],
    before: SearchResult,
    *,
    siblings: bool = False,
) -> SearchResult:
    """Return the plans that may be faster than ``best``, a plan of another question, in a search's result.

    ``tried``: the policy to try, by layout; with ``siblings`` all policies are evaluated on these layouts. The result
    has what was played on the way; it need not have a best plan. ``before``: a search whose lowered passes and played
    plans are used again.
    """
    try:
        space = Space(question)
    except (Infeasible, UsageError):
        return SearchResult([], 0, 0)
    space.layouts = [layout for layout in space.layouts if layout in tried]
    made = _beside(question, before, siblings=siblings)
    made.limit = None if siblings else best
    made.known = {e.decisions: e.prediction for e in before.ranked}
    made.fastest = before.fastest
    made.chosen = lambda one: siblings or one.policy == tried[one.base.layout]
    return made.run(space)


def _beside(question: Question, before: SearchResult, *, siblings: bool) -> _Search:
    """Return a search for plans beside those of a search, whose passes it uses again."""
    return _Search(
        question,
        keep=1,
        front=False,
        prune=True,
        siblings=siblings,
        enough_s=None,
        passes=before.passes,
        team=current_team(),
    )


def best_with_more_memory(question: Question, before: SearchResult) -> Evaluated | None:
    """Return the best plan of a question with more memory than the search ``before`` had.

    Plans that fitted before still fit, so only plans that may be faster are played.

    Raises:
        Infeasible: when no layout divides the model and the sequence.
    """
    if before.best is not None:  # which may have a larger micro-batch than the question
        question = replace(question, micro_batch=before.best.decisions.micro_batch)
    made = _beside(question, before, siblings=False)
    made.limit = before.best
    found = made.run(Space(question)).best
    fitting = [e for e in (before.best, found) if e is not None]
    return min(fitting, key=lambda e: e.rank_key, default=None)


def _eighths(candidate: Candidate) -> list[Candidate]:
    """Return a candidate with open alpha at every eighth: less host memory for more time or more device memory."""
    if candidate.policy.alpha is not None:
        return []
    least = 1 if candidate.policy == PARTIAL_SWAP else 0
    made = []
    for eighth in range(least, 8):
        policy = replace(candidate.policy, alpha=eighth / 8)
        base = with_alpha(candidate.base, candidate.base.recompute, eighth / 8)
        if base.swapped_tokens or not least:
            made.append(Candidate(base, policy))
    return made


NextBound = Literal["pipeline", "layers", "wide", "narrow", "alone", ""]


@dataclass(frozen=True, slots=True)
class _Bounded:
    """A candidate with its lower bounds; None when they cannot be computed, which the evaluation will explain."""

    candidate: Candidate
    bound: LowerBound | None
    shortfall_bytes: int
    next_bound: NextBound = ""
    """The tighter bounds that come next, at the cost of some lowerings: from the layout's kernels and waits, from a few
    of its layers, from these for each of some ranges of alpha (``RANGES``), or from one stage that is played alone."""

    @property
    def least_key(self) -> tuple[bool, bool, float]:
        """No outcome of the candidate ranks before this key (``Evaluated.rank_key``)."""
        return (False, False, 0.0) if self.bound is None else _least_key(self.bound, self.shortfall_bytes)


def _is_small(candidate: Candidate) -> bool:
    """Return whether a plan that cannot win is soon played: chunks in a ring have a call for every pair and rank."""
    return not (candidate.policy.attention_chunks and candidate.base.layout.cp > 1)


def _least_key(bound: LowerBound, shortfall_bytes: int) -> tuple[bool, bool, float]:
    """Return a key that nothing with these bounds ranks before."""
    short = shortfall_bytes > 0
    return (short, False, float(shortfall_bytes) if short else ranked_s(bound.step_s))


_Waiting = tuple[tuple[bool, bool, float], Number, _Bounded | Layout]
"""What may still be the best: its least key, its number, and a candidate, or a layout whose candidates are not made."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What another process needs to know to evaluate a candidate."""

    kept: Decisions | None
    """The plan that swaps nothing, when it is a candidate."""
    hiding: Decisions | None
    """See ``_Search.hiding``."""
    known: dict[Decisions, Prediction]
    """Plans that need not be played again."""
    limit_s: float
    """See ``_Search._limit_s``."""
    compiled: bool
    """Whether to play in the compiled loop (``fast_loop.py``)."""


@dataclass(frozen=True, slots=True)
class PlayedBeside:
    """A candidate's outcome, and the predictions that its evaluation asked for, in this order."""

    outcome: Evaluated | None
    used: dict[Decisions, Prediction]


def begin_beside(
    here: dict[str, Any], question: Question, settings: Mapping[str, Any], goes_on: bool
) -> Iterator[object]:
    """Begin a search in another process, which computes bounds and plays plans for it.

    ``goes_on``: whether the search uses the passes of an earlier one, as it then does there.
    """
    before: _Search | None = here.pop("search", None)
    passes = before.bounds.passes if goes_on and before is not None and before.has_devices_of(question) else None
    here["search"] = _Search(question, **settings, passes=passes)
    return iter(())


def work_beside(
    here: dict[str, Any], one: _Bounded, last: tuple[bool, bool, float], told: Beside
) -> Iterator[tuple[Hashable, object]]:
    """Tighten a candidate's bounds, then evaluate it; end where its bounds pass ``last``."""
    search: _Search = here["search"]
    search.fastest = None
    run_fast.beside(told.compiled)
    return search.beside(one, last, told)


class _Search:
    """One search: the outcomes played so far, and the lower bounds of the others."""

    def __init__(
        self,
        question: Question,
        *,
        keep: int,
        front: bool,
        prune: bool,
        siblings: bool,
        enough_s: float | None,
        passes: Passes | None = None,
        team: Team | None = None,
    ) -> None:
        self.question = question
        self.keep = keep
        self.front = front
        self.prune = prune
        self.siblings = siblings
        self.enough_s = enough_s
        self.limit: Evaluated | None = None
        """A plan that is known, though it is not an outcome of this search: plans that rank after it are pruned."""
        self.bounds = LowerBounds(question.hardware, question.cluster, passes)
        self.least_s: dict[Decisions, float] = {}
        """By plan that keeps everything: the lower bound of its layout's step time (``pipeline_lower_bound.py``)."""
        self.known: dict[Decisions, Prediction] = {}
        """Predictions that need not be made again, those of other processes included."""
        self.fastest: Simulation | None = None
        """The simulation of the best plan that was played here."""
        self.ranked: list[Evaluated] = []
        self.places: dict[Decisions, int] = {}
        """The index in ``ranked`` of each plan, until ``ranked`` is sorted."""
        self.bases: set[Decisions] = set()
        self.hiding: dict[Layout, Decisions] = {}
        """By layout: the plan that swaps what hides under the next subsequence (SPPO 5.2), when it is a candidate."""
        self.chosen: Callable[[Candidate], bool] | None = None
        """The candidates to look at, when not all."""
        self.used: dict[Decisions, None] = {}
        """The plans whose predictions the candidates asked for, in this order."""
        self.ranks: tuple[int, tuple[bool, bool, float, int, int, str] | None] = (-1, None)
        """How many plans are known, and the rank key of the last of the ``keep`` best."""
        self.told_limit_s: float | None = None
        """In another process: what ``_limit_s`` is in the search."""
        self.waiting: list[_Waiting] = []
        """What is still to be looked at, as a heap."""
        self.ahead = self._begin_ahead(team, goes_on=passes is not None) if team else None
        """What other processes find out meanwhile, where there are any."""
        self.all_matter = False
        """Whether what waits is evaluated whatever was found."""
        self.at: Collection[Decisions] = ()
        """The plans of the candidate that is being evaluated, as ``_shared_plans`` returns them."""

    def has_devices_of(self, question: Question) -> bool:
        """Return whether passes that this search has lowered serve another question."""
        return self.question.hardware == question.hardware and self.question.cluster == question.cluster

    def run(self, space: Space, progress: Progress | None = None) -> SearchResult:
        """Return the candidates of ``space`` evaluated or pruned.

        Raises:
            Infeasible: when there are none.
        """
        waiting = self.waiting
        lazily = self.prune and not self.front and len(space.layouts) > MOST_LAYOUTS_AT_ONCE
        for place, layout in enumerate(space.layouts):
            if lazily:
                heappush(waiting, (self._least_key_of_layout(space, layout), (place, -1), layout))
            else:
                self._open(space, layout, place, waiting)
        pruned: list[tuple[Number, Candidate]] = []
        done = stood_for = unopened = 0
        every = sum(len(space.policies) if isinstance(one, Layout) else 1 for _, _, one in waiting)
        while waiting:
            least_key, number, one = heappop(waiting)
            beyond = self.prune and (self._found_enough() or self._cannot_matter(one, least_key))
            if isinstance(one, Layout):
                every -= len(space.policies)
                if beyond:
                    unopened += len(space.policies)
                else:
                    every += self._open(space, one, number[0], waiting)
                continue
            if one.next_bound and self.prune and not beyond:
                one = self._tightened(number, one)
                heappush(waiting, (one.least_key, number, one))
                continue
            if beyond:
                pruned.append((number, one.candidate))
            else:
                stood_for += not self._add(number, one.candidate)
            done += 1
            if progress:
                progress(done, max(done, every))
        refused = space.refused(none_found=not (self.bases or unopened) and self.chosen is None)
        if not self.ranked:
            self._end_ahead()
            return SearchResult([], 0, len(pruned) + stood_for + unopened, refused, self.bounds.passes)
        self._limit_the_allocator()
        self._widen_the_window()
        best = min(self.ranked, key=lambda e: e.rank_key)
        layout = best.decisions.layout
        beside = [(n, c) for n, c in pruned if c.base.layout == layout and _is_small(c)] if self.siblings else []
        stood_for += self._add_all(beside)
        self._end_ahead()
        self.ranked.sort(key=lambda e: e.rank_key)
        self.ranked[0] = self._with_refusals(self.ranked[0])
        left = len(pruned) - len(beside) + stood_for + unopened
        return SearchResult(
            self.ranked,
            len(self.ranked),
            left,
            refused,
            self.bounds.passes,
            played=[self.known[plan] for plan in self.used],
            fastest=self.fastest,
        )

    def _open(self, space: Space, layout: Layout, number: int, waiting: list[_Waiting]) -> int:
        """Make a layout's candidates, with rough bounds, and return how many they are."""
        found = space.of(layout)
        if self.chosen is not None:
            found = [candidate for candidate in found if self.chosen(candidate)]
        if self.front:
            found = [*found, *(eighth for candidate in found for eighth in _eighths(candidate))]
        self.bases.update(candidate.base for candidate in found)
        for candidate in found:
            if candidate.policy.hides:
                self.hiding.setdefault(layout, candidate.base)
        for place, candidate in enumerate(found):
            one = self._with_rough_bounds(candidate)
            heappush(waiting, (one.least_key, (number, place), one))
        return len(found)

    def _least_key_of_layout(self, space: Space, layout: Layout) -> tuple[bool, bool, float]:
        """Return a key that no outcome on the layout ranks before; the least of all where it cannot be lowered."""
        try:
            keep, chunked = space.keeping(layout)
            timed = KEEP in space.policies and layout.subsequences == 1 and keep.modules == "auto"
            bound = self.bounds.of_layout(keep, timed=timed, in_chunks=chunked)
        except Infeasible:
            return (False, False, 0.0)
        return _least_key(bound, self.bounds.shortfall_bytes(bound))

    def _limit_the_allocator(self) -> None:
        """Play plans that may then be the best under lower limits of PyTorch's allocator (``allocator_limits.py``)."""
        question = self.question
        if question.memory_policy == "planned" or question.pins.allocator_limit_gib is not None or self.enough_s:
            return
        steps = [e.prediction.step_s for e in (*self.ranked, self.limit) if e and e.prediction.step_s is not None]
        best_s = min(steps, default=float("inf"))
        capacity_bytes = question.hardware.device_memory_bytes.value
        for at in sorted(range(len(self.ranked)), key=lambda at: self.ranked[at].rank_key):
            one = self.ranked[at]
            if not may_gain(one, capacity_bytes) or self._least_limited_s(one) >= best_s:
                continue
            self.ranked[at] = one = with_best_limit(one, self.predict, capacity_bytes=capacity_bytes)
            best_s = min(best_s, one.prediction.step_s or best_s)

    def _widen_the_window(self) -> None:
        """Play the best plan in wider offload windows, where none is pinned and copies may be late (SPPO)."""
        if self.question.pins.offload_window is not None or self.front or self.enough_s:
            return
        at = min(range(len(self.ranked)), key=lambda at: self.ranked[at].rank_key)
        best = self.ranked[at]
        chosen, fits = best.decisions, best.prediction.status == "ok"
        if chosen.offload_window and fits and not self._wider_gains_nothing(chosen, chosen):
            self.ranked[at] = with_best_window(best, self.predict)

    def _least_limited_s(self, one: Evaluated) -> float:
        """Return a time that no limit of the allocator makes a plan's step shorter than."""
        return self.bounds.of(one.decisions).step_s if one.prediction.step_s is None else least_limited_s(one)

    def _found_enough(self) -> bool:
        return bool(self.ranked) and self._enough(self.ranked[-1].prediction)

    def _enough(self, prediction: Prediction) -> bool:
        return self.enough_s is not None and prediction.step_s is not None and prediction.step_s <= self.enough_s

    def _add_all(self, candidates: list[tuple[Number, Candidate]]) -> int:
        """Evaluate candidates in their order; return of how many another candidate gives the same plan."""
        same, waiting, self.all_matter = 0, self.waiting, True
        for place, (number, candidate) in enumerate(candidates):
            waiting.append(((False, False, float(place)), number, _Bounded(candidate, None, 0)))
        while waiting:
            _, number, one = heappop(waiting)
            same += isinstance(one, _Bounded) and not self._add(number, one.candidate)
        return same

    def _add(self, number: Number, candidate: Candidate) -> bool:
        """Evaluate a candidate; return False when another candidate gives the same plan.

        That happens when the alpha found by a search is an eighth that a front asks for. The outcome of the search is
        kept, because it knows the neighbouring alphas.
        """
        outcome = self._found_outcome(number, candidate)
        if outcome is None:
            return False
        at = self.places.setdefault(outcome.decisions, len(self.ranked))
        if at == len(self.ranked):
            self.ranked.append(outcome)
            return True
        if outcome.policy.alpha is None:
            self.ranked[at] = outcome
        return False

    def _with_rough_bounds(self, candidate: Candidate) -> _Bounded:
        """Return lower bounds from what candidates share, without a lowering."""
        keep = kept(candidate.base)
        try:
            any_alpha = candidate.policy.alpha is None
            bound = self.bounds.rough(candidate.base, keep=keep if keep in self.bases else None, any_alpha=any_alpha)
        except Infeasible:
            return _Bounded(candidate, None, 0)
        short = self.bounds.shortfall_bytes(bound)
        by_pipeline = not short and is_known(candidate.base) and self._is_beside_kept(candidate)
        return _Bounded(candidate, bound, short, "pipeline" if by_pipeline else "layers")

    def _is_beside_kept(self, candidate: Candidate) -> bool:
        """Return whether another candidate keeps everything on the same layout."""
        keeping = kept(candidate.base)
        itself = candidate.policy.alpha is not None and candidate.base == keeping
        return not itself and keeping in self.bases

    def _with_next_bounds(self, one: _Bounded) -> _Bounded:
        """Return the next tighter lower bounds of a candidate.

        The pipeline's bound serves all candidates of its layout except the one that keeps everything, which costs no
        more to play.
        """
        candidate, bound = one.candidate, one.bound
        assert bound is not None
        try:
            if one.next_bound == "pipeline":
                bound = replace(bound, step_s=max(bound.step_s, self._least_s(kept(candidate.base))))
                return replace(one, bound=bound, next_bound="layers")
            if one.next_bound == "alone":
                return replace(one, bound=self._bound_of_one_stage(candidate, bound), next_bound="")
            width = RANGES.get(one.next_bound)
            higher = self._bound(candidate) if width is None else self._bound_of_ranges(candidate, width)
        except Infeasible:
            return _Bounded(candidate, None, 0)
        higher = replace(higher, step_s=max(higher.step_s, bound.step_s))
        return _Bounded(candidate, higher, self.bounds.shortfall_bytes(higher), self._after(one))

    def _after(self, one: _Bounded) -> NextBound:
        """Return the bounds that come after those of ``one``; without stages, a few plays take no longer than they."""
        layout = one.candidate.base.layout
        alone: NextBound = "" if self.front else "alone"
        if one.next_bound == "wide":
            return "narrow" if self.front else alone
        if one.next_bound == "layers" and layout.pp > 1 and layout.subsequences == 1:
            return "wide" if one.candidate.policy.alpha is None else alone
        return ""

    def _bound_of_one_stage(self, candidate: Candidate, bound: LowerBound) -> LowerBound:
        """Return a bound that no alpha of the candidate is below, if one stage shows that none ranks among the best.

        Else return ``bound``.
        """
        limit_s, base = self._limit_s(), candidate.base
        if limit_s == float("inf"):
            return bound
        if candidate.policy.alpha is not None:
            found_s = self.bounds.of_one_stage(base, base, limit_s)
        else:
            grid = Grid.of(base)
            partial = candidate.policy == PARTIAL_SWAP
            # Token-wise plans that swap every token are the full swap, a candidate of its own.
            full_swap = partial or any(p == FULL_SWAP for p in policies(self.question))
            low, high = int(partial), grid.steps - full_swap
            if high < low:
                return bound
            lacks = (lambda step: self.bounds.lack_device(grid.at(step))) if partial else None
            most = self._most(grid, low, high)
            found_s = least_step_s_of_alphas(self.bounds, grid, low, most, limit_s, lacks=lacks)
        return replace(bound, step_s=max(bound.step_s, found_s))

    def _limit_s(self) -> float:
        """Return the step seconds of the last of the ``keep`` best plans so far; infinite if it does not fit."""
        if self.told_limit_s is not None:
            return self.told_limit_s
        last = self._last_kept()
        return float("inf") if last is None or last[0] else last[2]

    def _last_kept(self) -> tuple[bool, bool, float, int, int, str] | None:
        """Return the rank key of the last of the ``keep`` best plans so far; None where there are fewer."""
        known = [*self.ranked, self.limit] if self.limit else self.ranked
        if len(known) != self.ranks[0]:
            keys = sorted(e.rank_key for e in known)
            self.ranks = len(known), keys[self.keep - 1] if len(keys) >= self.keep else None
        return self.ranks[1]

    def _least_s(self, keeping: Decisions) -> float:
        if keeping not in self.least_s:
            self.least_s[keeping] = least_step_s(keeping, self.question.hardware, self.question.cluster)
        return self.least_s[keeping]

    def _bound(self, candidate: Candidate) -> LowerBound:
        if candidate.policy.alpha is not None:
            return self.bounds.of(candidate.base)
        grid = Grid.of(candidate.base)
        partial = candidate.policy == PARTIAL_SWAP
        low, high = (1, grid.steps - 1) if partial else (0, grid.steps)
        if high < low:
            return self.bounds.of(candidate.base)
        most = self._most(grid, low, high)
        if not partial:
            return self.bounds.between(grid.at(low), grid.at(most))
        room = self.bounds.device_room_bytes
        bound = self.bounds.rough(grid.at(most), keep=None)
        if bound.device_bytes <= room:
            bound = self.bounds.between(grid.at(most), grid.at(most))
            bound = replace(bound, step_s=self.bounds.between(grid.at(low), grid.at(most)).step_s)
        if most < grid.steps - 1 and bound.device_bytes > room:
            # At every alpha, one of the two memories is too small; by how much is not known.
            return replace(bound, device_bytes=room + 1, host_bytes_per_node=0)
        return replace(bound, host_bytes_per_node=0)

    def _bound_of_ranges(self, candidate: Candidate, width: int) -> LowerBound:
        """Return the least of the lower bounds of ranges of ``width`` grid steps; those that do not fit come last."""
        grid = Grid.of(candidate.base)
        partial = candidate.policy == PARTIAL_SWAP
        low, high = (1, grid.steps - 1) if partial else (0, grid.steps)
        most = self._most(grid, low, high)
        pairs = list(pairwise(edges_of(low, most, width))) or [(most, most)]
        found = [self.bounds.between(grid.at(first), grid.at(last)) for first, last in pairs]
        return min(found, key=lambda bound: _least_key(bound, self.bounds.shortfall_bytes(bound)))

    def _most(self, grid: Grid, low: int, high: int) -> int:
        """Return the highest grid step from ``low`` to ``high`` that host memory may hold, or ``low``."""
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (low, middle - 1) if self.bounds.lack_host(grid.at(middle)) else (middle, high)
        return low

    def _cannot_matter(self, one: _Bounded | Layout, least_key: tuple[bool, bool, float]) -> bool:
        """Return whether no outcome of a candidate or layout can change the best plans, or the front."""
        bound = one.bound if isinstance(one, _Bounded) else None
        if isinstance(one, _Bounded) and bound is None:
            return False
        if self.front and bound is not None and not least_key[0]:
            least = (bound.step_s, bound.device_bytes, bound.host_bytes_per_node)
            return any(as_good(e.costs, least) for e in self.ranked if e.prediction.status == "ok")
        last = self._last_kept()
        return last is not None and last < least_key

    def predict(self, decisions: Decisions) -> Prediction:
        """Return the engine's prediction; each plan is played once."""
        if decisions not in self.known:
            self._play(decisions)
        self.used[decisions] = None
        return self.known[decisions]

    def _play(self, decisions: Decisions) -> Simulation:
        """Play a plan in the loop that is fast, and keep the simulation of the fastest plan for the answer.

        A long one is kept only until the next plan is played: two of them would take twice the memory.
        """
        if self.fastest is not None and self.fastest.instructions_played > MOST_KEPT:
            self.fastest = None
        simulation = simulate(decisions, self.question.hardware, self.question.cluster, loop=run_fast)
        self.known[decisions] = simulation.prediction
        self.used[decisions] = None
        self._give_ahead()
        if self.fastest is None or _ranks_before(simulation, self.fastest):
            self.fastest = simulation
        return simulation

    def _begin_ahead(self, team: Team, *, goes_on: bool) -> Ahead:
        """Return what other processes find out, before they begin."""
        settings = {name: getattr(self, name) for name in ("keep", "front", "prune", "siblings", "enough_s")}
        begin = (begin_beside, (self.question, settings, goes_on))
        return Ahead(team, self, begin=begin, task=work_beside, taken=_Bounded)

    def hear(self, found: PlayedBeside) -> None:
        """Keep the predictions that another process has made."""
        self.known.update(found.used)

    def _give_ahead(self) -> None:
        """Let other processes begin with the next candidates."""
        if self.ahead is not None:
            self.ahead.give()

    def _end_ahead(self) -> None:
        if self.ahead is not None:
            self.ahead.end()

    def limit_key(self) -> tuple[bool, bool, float]:
        """Return the largest key of a candidate that may matter."""
        last = self._last_kept()
        if self.front or self.all_matter or not self.prune or last is None:
            return (True, True, float("inf"))
        return last[:3]

    def offered(self, one: _Bounded, last: tuple[bool, bool, float]) -> Offer:
        """Return a candidate as a task of another process, which ends where the candidate's bounds pass ``last``."""
        candidate = one.candidate
        plays, keeping = self._shared_plans(candidate), swap_each(candidate.base, 0)
        known = {plan: self.known[plan] for plan in plays if plan in self.known}
        hiding = self.hiding.get(candidate.base.layout)
        told = Beside(
            kept=keeping if keeping in self.bases else None,
            hiding=hiding,
            known=known,
            limit_s=self._limit_s(),
            compiled=run_fast.compiled,
        )
        return Offer((one, last, told), plays - known.keys())

    def _shared_plans(self, candidate: Candidate) -> set[Decisions]:
        """Return plans that the candidate's evaluation may play, and that of another candidate as well."""
        policy, base = candidate.policy, candidate.base
        found = {base} if policy.alpha is not None else set()
        if self.front:
            return found
        if policy in STAND_BACK or candidate.narrow is not None:
            found.add(swap_each(base, 0))
        if candidate.narrow is not None:
            found |= {candidate.narrow, self.hiding.get(base.layout, base)}
        return found

    def next_name(self, one: _Bounded) -> Hashable:
        """Return the name of a candidate's next bounds, with what they depend on beside the candidate."""
        return (one.next_bound, self._limit_s()) if one.next_bound == "alone" else one.next_bound

    def _tightened(self, number: Number, one: _Bounded) -> _Bounded:
        """Return the next tighter lower bounds of a candidate, which another process may have computed."""
        self.at = ()
        self._give_ahead()
        found = self.ahead.bounded(number, one) if self.ahead else None
        return self._with_next_bounds(one) if found is None else replace(found, candidate=one.candidate)

    def _found_outcome(self, number: Number, candidate: Candidate) -> Evaluated | None:
        """Return the outcome of one candidate, as ``_outcome``; another process may have evaluated it."""
        if self.ahead is None:
            return self._outcome(candidate)
        self.at = self._shared_plans(candidate)
        self._give_ahead()
        found: PlayedBeside | None = self.ahead.outcome(number)
        if found is None:
            return self._outcome(candidate)
        self.used.update(dict.fromkeys(found.used))
        return found.outcome

    def beside(self, one: _Bounded, last: tuple[bool, bool, float], told: Beside) -> Iterator[tuple[Hashable, object]]:
        """Yield what is found out for the same search in another process (``work_beside``)."""
        self.told_limit_s = told.limit_s
        while one.next_bound and one.least_key <= last:
            name = self.next_name(one)
            one = self._with_next_bounds(one)
            yield name, one
        if one.next_bound or one.least_key > last:
            return
        self.known.update(told.known)
        if told.kept is not None:
            self.bases.add(told.kept)
        if told.hiding is not None:
            self.hiding[told.hiding.layout] = told.hiding
        self.used.clear()
        outcome = self._outcome(one.candidate)
        yield OUTCOME, PlayedBeside(outcome, {plan: self.known[plan] for plan in self.used})

    def beside_itself(self, one: _Bounded, last: tuple[bool, bool, float], told: Beside) -> Iterator[Any]:
        """Yield the same in this process: only predictions and the simulation of the best plan are kept."""
        used, at = self.used, self.at
        self.used, self.at = {}, {*at, *self._shared_plans(one.candidate)}
        try:
            yield from self.beside(one, last, told)
        finally:
            self.used, self.at, self.told_limit_s = used, at, None

    def _outcome(self, candidate: Candidate) -> Evaluated | None:
        try:
            return self._evaluate(candidate)
        except Infeasible as error:  # for example, the profile has not measured its work; other candidates may work
            reason = f"{error.what}: {error.got}"
            return Evaluated(candidate.policy, candidate.base, Prediction(status="invalid", reason=reason))

    def _evaluate(self, candidate: Candidate) -> Evaluated | None:
        """Return the outcome of one candidate, or None when another candidate gives the same plan."""
        policy, base = candidate.policy, candidate.base
        if policy in STAND_BACK and not self.front:
            kept = swap_each(base, 0)
            if (policy.alpha is None or kept in self.bases) and self.predict(kept).status == "ok":
                return None
        if candidate.narrow is not None and not self.front and self._wider_gains_nothing(base, candidate.narrow):
            return None
        if policy.alpha is not None:
            return Evaluated(policy, base, self.predict(base))
        bounds = self.bounds if self.prune else None
        if policy == PARTIAL_SWAP:
            partial = best_partial_swap(base, self.predict, bounds=bounds)
            return Evaluated(policy, partial.decisions, partial.prediction) if partial else None
        grid = Grid.of(base)
        most = self._most(grid, 0, grid.steps)
        for decisions in self._plans_to_start_with(base, grid.at(most)):
            simulation = self._play(decisions)
            if simulation.prediction.status == "ok":
                break
        if simulation.prediction.status != "ok" or self._enough(simulation.prediction):
            return Evaluated(policy, decisions, simulation.prediction)
        states_bytes = self.bounds.host_states_bytes(base)
        program = _linear_program(self.question, base, simulation, states_bytes=states_bytes)
        best = best_alpha(base, self.predict, start=program.alpha, most=most / grid.steps, bounds=bounds)
        # Swapping every token recomputes nothing. That is the full swap, which is a candidate of its own.
        full_swap = best.decisions.alpha == 1 and any(p == FULL_SWAP for p in policies(self.question))
        return None if full_swap else Evaluated(policy, best.decisions, best.prediction, program)

    def _wider_gains_nothing(self, base: Decisions, narrow: Decisions) -> bool:
        """Return whether a wider window gains nothing: no copies are needed, or none are late in the narrow window."""
        kept = swap_each(base, 0)
        if kept in self.bases and self.predict(kept).status == "ok":
            return True
        hiding = self.hiding.get(base.layout)
        if hiding is None:
            return False
        narrow_s, hides_s = self.predict(narrow).step_s, self.predict(hiding).step_s
        return narrow_s is not None and hides_s is not None and ranked_s(narrow_s) <= ranked_s(hides_s)

    def _plans_to_start_with(self, base: Decisions, most: Decisions) -> tuple[Decisions, ...]:
        """Return the plans to play first: the one that swaps the most, and one to play if it does not fit.

        The first is left out when its copies certainly make it slower.
        """
        if most == base or self.bounds.of(most).step_s > self.bounds.of(base).step_s:
            return (base,)
        return (most, base)

    def _with_refusals(self, one: Evaluated) -> Evaluated:
        """Return the plan with the predictions at the next alphas that do not fit, when alpha was searched."""
        if one.policy.alpha is not None or one.prediction.status != "ok":
            return one
        grid = Grid.of(one.decisions)
        step = grid.step_of(one.decisions)
        above, below = (grid.refusal(s, self._refused) for s in (step + 1, step - 1))
        return replace(one, above=above, below=below)

    def _refused(self, decisions: Decisions) -> Prediction | None:
        """Return the prediction of a plan that does not fit; for other plans, only one that is already known."""
        if decisions in self.known:
            return self.known[decisions]
        simulation = simulate(decisions, self.question.hardware, self.question.cluster, predict=False)
        return simulation.prediction if simulation.memory.fault else None


def _ranks_before(simulation: Simulation, other: Simulation) -> bool:
    """Return whether a plan ranks before another one; of equally fast ones the best is kept, too."""
    mine_s, other_s = simulation.prediction.step_s, other.prediction.step_s
    if mine_s is None or other_s is None:
        return mine_s is not None
    if ranked_s(mine_s) != ranked_s(other_s):
        return mine_s < other_s
    pair = (Evaluated(KEEP, each.decisions, each.prediction).rank_key for each in (simulation, other))
    return next(pair) < next(pair)


def play(question: Question, decisions: Decisions, found: SearchResult | None = None) -> Simulation:
    """Return one plan played on the question's cluster, as answers show it; a search may already have simulated it."""
    fastest = found.fastest if found else None
    if fastest is not None and fastest.decisions == decisions:
        return fastest.shown()
    return simulate(decisions, question.hardware, question.cluster)


def _linear_program(question: Question, base: Decisions, simulation: Simulation, *, states_bytes: int) -> LinearProgram:
    """Return the paper's problem for a plan; ``states_bytes`` of a rank's host memory hold optimizer states."""
    host = question.cluster.host_memory_bytes or question.hardware.host_memory_bytes
    local = min(question.cluster.devices_per_node, base.layout.devices)
    program = linear_program(
        base,
        layer_forward_s=simulation.layer_forward_s,
        bandwidth_bytes_per_s=1.0,
        host_bytes=max(0.0, host.value / local - states_bytes),
    )
    size = program.input_bytes + program.attention_bytes + program.others_bytes
    return replace(program, bandwidth_bytes_per_s=offload_bandwidth(question, base, size))
