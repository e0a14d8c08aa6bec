"""Candidates with lower bounds, which get tighter step by step, each at a higher cost.

rough        from what candidates share, without a lowering
beside       from the layout's plan that keeps everything, with its collectives and waits; where nothing is recomputed,
             also from the bytes that are copied
unswapped    from a few layers of the plan that swaps nothing, where every backward rebuilds its layer
pipeline     from the kernels of each stage and their waits, once for all candidates of a layout
layers       from a few of the plan's layers
passes       from the passes of all stages, which wait for each other
fitting      from a few of the plan's layers, without alphas that they show not to fit on the device
halved       from a few of the plan's layers, for ranges of alpha of which the fastest is halved again and again
wide, narrow from a few of the plan's layers, for each of some ranges of alpha
alone        from one stage that is played by itself, against the best plans so far; where they are far off, again
             against longer and longer times, with other candidates in between
memory       from the buffers of the stage that is likely to need most memory
played       from one stage for each alpha, and from plays of those alphas that it leaves open
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import astuple, replace

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.knobs import MOST_ZERO
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.planning.alpha_ranges import WIDEST, edges_of
from memo_sim.planning.alpha_ranges import least_step_s as least_step_s_of_alphas
from memo_sim.planning.alpha_search import Grid, least_that_fits, most_that_host_holds
from memo_sim.planning.few_layers import Passes
from memo_sim.planning.lower_bounds import LowerBound, LowerBounds, rebuilds_all
from memo_sim.planning.outcome import Key, ranked_s
from memo_sim.planning.pipeline_lower_bound import is_known, kept, least_step_s
from memo_sim.planning.presets import FULL_SWAP, KEEP, Policy
from memo_sim.planning.question import Question
from memo_sim.planning.recent import Recent
from memo_sim.planning.rivals import Opened
from memo_sim.planning.short_rings import steps_repeat
from memo_sim.planning.space import Candidate, Space, policies
from memo_sim.planning.stage_alone import StageBytes, stands_alone

RANGES: dict[str, int] = {"wide": WIDEST, "narrow": 2}
"""Grid steps of the ranges of alpha that get lower bounds of their own, one after the other."""

LEAST: Key = (False, False, 0.0)
"""The key of what has no bounds: it may be the best of all."""

FARTHER = 1.05
"""By how much a candidate's bound grows at once when one stage is played: other candidates may come before it then."""

MOST_HELD = 4096
"""Number of candidates whose alphas that memory may hold are kept."""

LEAST_SHARED = 3
"""Least number of policies that are worth a lowering of the plan that keeps everything, where it is none of them."""

OfStage = Literal["alone", "memory", "played"]
"""Bounds from one stage of a pipeline."""
NextBound = Literal[
    "beside", "unswapped", "pipeline", "layers", "passes", "fitting", "halved", "wide", "narrow", OfStage, ""
]

OF_TIME: Collection[NextBound] = {"passes", "fitting", "alone", "played"}
"""Bounds that tell nothing of memory. A plan that does not fit has no step time."""

Counted = Literal["steps", "kernels", "ungathered", "waits"]
"""What a layout's least key counts beside states: the later steps of a long ring alone, all kernels, or also waits.

``ungathered``: with waits, but without what ZeRO 3 gathers. Layouts with another number of replicas then have the same
passes.
"""


class BoundedLayout(Struct, frozen=True):
    """A layout whose candidates are not made."""

    layout: Layout
    least_key: Key
    """No outcome of the layout ranks before this key."""
    counted: Counted
    """What the key counts; with waits, it gets no higher."""

    @property
    def counted_next(self) -> Counted:
        """What the next key counts; ``waits`` is the last."""
        if self.counted == "steps":
            return "kernels"
        gathers = self.layout.zero >= MOST_ZERO and self.layout.pp == 1  # with stages, bounds leave gathers out
        return "ungathered" if self.counted == "kernels" and gathers else "waits"

    def next_name(self, _: float) -> Hashable:
        """Return the name of the next bounds; empty where there are none."""
        return "" if self.counted == "waits" else self.counted_next


class Bounded(Struct, frozen=True):
    """A candidate with its lower bounds; None when they cannot be computed, which the evaluation will explain."""

    candidate: Candidate
    bound: LowerBound | None = None
    shortfall_bytes: int = 0
    next_bound: NextBound = ""
    """The tighter bounds that come next; empty where there are none."""

    @property
    def least_key(self) -> Key:
        """No outcome of the candidate ranks before this key (``Evaluated.rank_key``)."""
        return LEAST if self.bound is None else _least_key(self.bound, self.shortfall_bytes)

    @property
    def is_played_next(self) -> bool:
        """Whether plans are played next, for its bounds or its outcome."""
        return self.next_bound in {"played", ""}

    def next_name(self, limit_s: float) -> Hashable:
        """Return the name of the next bounds, with what they depend on beside the candidate.

        One stage is played against longer and longer times, and ranges are halved until they need these, each from the
        bounds before it.
        """
        if self.next_bound in {"alone", "halved", "played"} and self.bound is not None:
            return self.next_bound, limit_s, self.bound.step_s
        return self.next_bound


@lru_cache(maxsize=8)
def _beside(tried: tuple[Policy, ...], *, chunked: bool) -> tuple[Policy, ...]:
    """Return the policies of a layout, whose attention can be ``chunked`` or not."""
    return tuple(dataclasses.replace(policy, attention_chunks=policy.attention_chunks and chunked) for policy in tried)


def _higher(one: LowerBound, other: LowerBound) -> LowerBound:
    """Return the higher of two lower bounds in each field."""
    return LowerBound(*map(max, astuple(one), astuple(other)))


def _least_key(bound: LowerBound, shortfall_bytes: int) -> Key:
    """Return a key that nothing with these bounds ranks before."""
    short = shortfall_bytes > 0
    return (short, False, float(shortfall_bytes) if short else ranked_s(bound.step_s))


class CandidateBounds:
    """The lower bounds of one question's candidates and layouts."""

    def __init__(self, question: Question, passes: Passes | None = None, *, front: bool) -> None:
        """``front``: whether candidates may matter that are not among the fastest. ``passes``: see ``LowerBounds``."""
        self._question = question
        self._front = front
        self.of_plans = LowerBounds(question.hardware, question.cluster, passes)
        self.played_s: Callable[[Decisions], float] | None = None
        """The step seconds of a plan, infinite where it does not fit, if plans may be played for bounds."""
        self._known_held: Recent[tuple[Decisions, bool], tuple[Grid, int, int]] = Recent(MOST_HELD)
        """By the base of an open alpha, and whether it is a partial swap."""
        self._least_s: dict[Decisions, float] = {}
        """By plan that keeps everything: the lower bound of its layout's step time (``pipeline_lower_bound.py``)."""

    @cached_property
    def _policies(self) -> tuple[Policy, ...]:
        return policies(self._question)

    def layout(self, space: Space, layout: Layout) -> BoundedLayout:
        """Return a layout with its first bounds, the cheapest that are known."""
        key = self._least_key_of_layout(space, layout, "steps")
        return self._with_kernels(space, layout) if key == LEAST else BoundedLayout(layout, key, "steps")

    def tightened_layout(self, space: Space, one: BoundedLayout) -> BoundedLayout:
        """Return a layout with its next bounds, which are no lower unless nothing is known."""
        if one.counted == "steps":
            found = self._with_kernels(space, one.layout)
            return found if found.least_key == LEAST else replace(found, least_key=max(one.least_key, found.least_key))
        key = self._least_key_of_layout(space, one.layout, one.counted_next)
        return BoundedLayout(one.layout, max(key, one.least_key), one.counted_next)

    def _with_kernels(self, space: Space, layout: Layout) -> BoundedLayout:
        key = self._least_key_of_layout(space, layout, "kernels")
        # Where nothing is known, waits tell nothing either.
        return BoundedLayout(layout, key, "waits" if key == LEAST else "kernels")

    def _least_key_of_layout(self, space: Space, layout: Layout, counted: Counted) -> Key:
        """Return a key that no outcome on the layout ranks before; the least of all where it cannot be lowered.

        Of a layout without a long ring, or whose attention tells nothing, ``steps`` are not known, either.
        """
        try:
            keep, chunked = space.keeping(layout)
            if counted == "steps" and not steps_repeat(keep):
                return LEAST
            beside = _beside(space.policies, chunked=chunked)
            known = layout.subsequences == 1 and self._keeps_tell(space.policies, layout)
            known &= all(self._question.modules_of(policy.recompute) == keep.modules for policy in beside)
            if counted == "steps":
                bound = self.of_plans.of_steps(keep, beside) if known else LowerBound(0.0, 0, 0)
            else:
                waits, gathered = counted in {"ungathered", "waits"}, counted == "waits"
                bound = self.of_plans.of_layout(keep, beside if known else [], waits=waits, gathered=gathered)
        except Infeasible:
            return LEAST
        return _least_key(bound, self.of_plans.shortfall_bytes(bound))

    @staticmethod
    def _keeps_tell(tried: Sequence[Policy], layout: Layout) -> bool:
        """Return whether the plan that keeps everything is lowered for bounds of the others.

        METP's has a hop for every pair of ranks, so it is lowered only where it is a candidate.
        """
        return KEEP in tried or (len(tried) >= LEAST_SHARED and layout.metp == 1)

    def rough(self, candidate: Candidate, opened: Opened) -> Bounded:
        """Return a candidate with bounds from what it shares with those that are ``opened``, without a lowering.

        The pipeline's bound serves all candidates of its layout except the one that keeps everything, which costs no
        more to play. A plan with subsequences that does not fit goes on to the memory of its last stage: a few of its
        layers have as many templates as the stage.
        """
        base, any_alpha = candidate.base, candidate.policy.alpha is None
        keep = kept(base)
        beside_kept = keep in opened
        tells = beside_kept or self._keeps_tell(self._policies, base.layout)
        try:
            bound = self._rough(base, keep if tells else None, any_alpha=any_alpha, is_candidate=beside_kept)
        except Infeasible:
            return Bounded(candidate)
        short = self.of_plans.shortfall_bytes(bound)
        itself = not any_alpha and base == keep
        if short and not any_alpha and base.layout.subsequences > 1:
            return Bounded(candidate, bound, short, "memory" if base.layout.pp > 1 else "")
        of_layers = self._of_few(candidate)
        if short or itself or not tells:
            return Bounded(candidate, bound, short, of_layers)
        if base.layout.subsequences == 1:
            return Bounded(candidate, bound, short, "beside" if bound.step_s else of_layers)
        return Bounded(candidate, bound, short, "pipeline" if is_known(base) and beside_kept else of_layers)

    def _rough(self, base: Decisions, keep: Decisions | None, *, any_alpha: bool, is_candidate: bool) -> LowerBound:
        """Return rough bounds, without ``keep`` where that is no candidate and cannot be lowered.

        Raises:
            Infeasible: see ``LowerBounds.rough``.
        """
        try:
            return self.of_plans.rough(base, keep=keep, any_alpha=any_alpha)
        except Infeasible:
            if is_candidate:
                raise
            return self.of_plans.rough(base, keep=None, any_alpha=any_alpha)

    def tightened(self, one: Bounded, limit_s: float) -> Bounded:
        """Return a candidate with its next tighter bounds.

        ``limit_s``: step seconds of the last of the best plans so far; infinite where there is none.
        """
        candidate, bound = one.candidate, one.bound
        assert bound is not None
        try:
            if one.next_bound in {"beside", "unswapped", "pipeline", "passes", "fitting"}:
                return self._in_time(one, bound)
            if one.next_bound in get_args(OfStage):
                return self._from_a_stage(one, bound, limit_s)
            if one.next_bound == "halved":
                return self._halved(one, bound, limit_s)
            width = RANGES.get(one.next_bound)
            higher = self._of_layers(candidate) if width is None else self._of_ranges(candidate, width)
        except Infeasible:
            return Bounded(candidate)
        higher = _higher(higher, bound)
        return self._followed(replace(one, bound=higher, shortfall_bytes=self.of_plans.shortfall_bytes(higher)))

    def _from_a_stage(self, one: Bounded, bound: LowerBound, limit_s: float) -> Bounded:
        """Return a candidate with the next bound from one stage of its pipeline."""
        candidate = one.candidate
        if one.next_bound == "alone":
            target_s = min(limit_s, bound.step_s * FARTHER)
            bound = self._of_one_stage(candidate, bound, target_s)
            again = 0 < target_s <= bound.step_s < limit_s and candidate.policy.alpha is None
            return replace(one, bound=bound, next_bound="alone" if again else self._after(one))
        if one.next_bound == "played":
            bound = self._of_one_stage(candidate, bound, limit_s, self.played_s) if limit_s < inf else bound
            return replace(one, bound=bound, next_bound="")
        bound = self._of_fullest_stage(candidate, bound)
        short = self.of_plans.shortfall_bytes(bound)
        return Bounded(candidate, bound, short, "" if short else self._after(one))

    def _in_time(self, one: Bounded, bound: LowerBound) -> Bounded:
        """Return a candidate with the next bound of its step time; of memory, where a partial swap always lacks some.

        That costs no lowering, and no time is asked for then.
        """
        candidate = one.candidate
        if one.next_bound == "beside" and candidate.policy.swaps_some and (short := self._short_of(candidate)):
            bound = self.of_plans.with_shortage(bound, short)
            return Bounded(candidate, bound, short, "layers")
        bound = replace(bound, step_s=max(bound.step_s, self._step_s(one)))
        return replace(one, bound=bound, next_bound=self._after(one))

    def _followed(self, one: Bounded) -> Bounded:
        """Return a candidate with the bounds that come next; those of time alone only where memory is not short."""
        one = replace(one, next_bound=self._after(one))
        while one.shortfall_bytes and one.next_bound in OF_TIME:
            one = replace(one, next_bound=self._after(one))
        return one

    def _after(self, one: Bounded) -> NextBound:
        """Return the bounds that come after those of ``one``; without stages, a few plays take no longer than they."""
        layout, policy = one.candidate.base.layout, one.candidate.policy
        if one.next_bound == "beside" and policy.alpha != 0 and rebuilds_all(one.candidate.base):
            return "unswapped"
        if one.next_bound in {"beside", "unswapped", "pipeline"}:
            return self._of_few(one.candidate)
        if one.next_bound == "layers" and self._is_plain(layout):
            return "fitting" if policy.swaps_some else ""
        if layout.pp == 1 or layout.subsequences > 1:
            return ""
        if one.next_bound == "halved":
            return "alone"
        ranges: tuple[NextBound, ...] = ("wide", "narrow") if self._front else ("wide", "alone")
        if policy.alpha is not None:
            ranges = () if self._front else ("alone",)
        plays: tuple[NextBound, ...] = () if self._front or policy.alpha is not None else ("played",)
        order: tuple[NextBound, ...] = ("layers", "passes", *ranges, "memory", *plays, "")
        return order[order.index(one.next_bound) + 1]

    def _is_plain(self, layout: Layout) -> bool:
        """Return whether plans on a layout are soon lowered, and only their time matters."""
        return layout.pp == layout.subsequences == layout.metp == 1 and not self._front

    def _of_few(self, candidate: Candidate) -> NextBound:
        """Return the first bounds that are from a few of the plan's layers.

        More swapped tokens of a token-wise plan copy more and compute less, so its alphas are not bound at once.
        """
        open_alpha = candidate.policy.alpha is None and not candidate.policy.swaps_some
        if not open_alpha or self._front:
            return "layers"
        return "halved" if stands_alone(candidate.base) else "layers"

    def _step_s(self, one: Bounded) -> float:
        """Return the next lower bound of a candidate's step seconds, where that tells nothing of memory."""
        base = one.candidate.base
        if one.next_bound == "beside":
            beside_s = self.of_plans.beside_s(kept(base), [Policy.of(base)], waits=True)
            return max(beside_s, self._copied_s(one.candidate))
        if one.next_bound == "unswapped":
            return self.of_plans.unswapped_s(base)
        if one.next_bound == "fitting":
            return self._of_fitting(one.candidate)
        return self._least_s_of_layout(kept(base)) if one.next_bound == "pipeline" else self._of_passes(one.candidate)

    def _copied_s(self, candidate: Candidate) -> float:
        """Return a lower bound of the step seconds from the bytes that are copied at least."""
        if candidate.policy.alpha is not None:
            return self.of_plans.copied_s(candidate.base)
        grid, low, most = self._held(candidate)
        return self.of_plans.copied_s(grid.at(low)) if low <= most else 0.0

    def _least_s_of_layout(self, keeping: Decisions) -> float:
        if keeping not in self._least_s:
            self._least_s[keeping] = least_step_s(keeping, self._question.hardware, self._question.cluster)
        return self._least_s[keeping]

    def _of_layers(self, candidate: Candidate) -> LowerBound:
        bounds, base = self.of_plans, candidate.base
        if candidate.policy.alpha is not None:
            return bounds.where_it_fits(base, base)
        partial = candidate.policy.swaps_some
        grid, low, most = self._held(candidate)
        if most < low:
            return bounds.where_it_fits(base, base)
        if not partial:
            return bounds.where_it_fits(grid.at(low), grid.at(most))
        bound = bounds.rough(grid.at(most), keep=None)
        if not bounds.exceeds_device(bound):
            bound = bounds.memory_between(grid.at(most), grid.at(most))
            if not bounds.exceeds_device(bound):  # where no alpha fits, no time is asked for
                bound = replace(bound, step_s=bounds.step_s_between(grid.at(low), grid.at(most)))
        bound = replace(bound, host_bytes_per_node=0)
        if most < grid.steps - 1 and bounds.exceeds_device(bound):
            return bounds.with_shortage(bound, self._least_short(grid, most, bounds.shortfall_bytes(bound)))
        return bound

    def _short_of(self, candidate: Candidate) -> int:
        """Return bytes that every alpha of a partial swap is short of, without a lowering; 0 where some may fit."""
        bounds, grid = self.of_plans, Grid.of(candidate.base)
        if grid.steps < 2:
            return 0
        most = self._held(candidate)[2]
        device_short = bounds.shortfall_bytes(replace(bounds.memory(grid.at(most)), host_bytes_per_node=0))
        return self._least_short(grid, most, device_short) if most < grid.steps - 1 else device_short

    def _least_short(self, grid: Grid, most: int, device_short: int) -> int:
        """Return the fewest bytes that an alpha is short of, where each is short of device or of host memory.

        Up to step ``most`` of the grid, the device lacks ``device_short`` bytes at least; beyond it, a node's host
        lacks what it does at the next step.
        """
        host_bytes = self.of_plans.memory(grid.at(most + 1)).host_bytes_per_node
        return min(device_short, max(1, host_bytes - self.of_plans.host_room_bytes))

    def _of_ranges(self, candidate: Candidate, width: int) -> LowerBound:
        """Return what no alpha is below, from ranges of ``width`` grid steps: of those that may fit, if there are any.

        The range with the shortest step need not be the one with the fewest bytes, which a Pareto front asks for too.
        """
        bounds, partial = self.of_plans, candidate.policy.swaps_some
        grid, low, most = self._held(candidate)
        high = grid.steps - partial
        pairs = list(pairwise(edges_of(low, most, width))) or [(most, most)]
        found = [bounds.where_it_fits(grid.at(first), grid.at(last)) for first, last in pairs]
        may_fit = [bound for bound in found if not bounds.shortfall_bytes(bound)]
        if not may_fit and partial and most < high:
            short = self._least_short(grid, most, min(map(bounds.shortfall_bytes, found)))
            return bounds.with_shortage(replace(found[0], step_s=0.0), short)
        if not may_fit:
            return min(found, key=bounds.shortfall_bytes)
        return replace(
            may_fit[0],
            step_s=min(bound.step_s for bound in may_fit),
            device_bytes=min(bound.device_bytes for bound in may_fit),
            host_bytes_per_node=min(bound.host_bytes_per_node for bound in may_fit),
        )

    def _halved(self, one: Bounded, bound: LowerBound, limit_s: float) -> Bounded:
        """Return a candidate with the bound of its fastest range of alphas, or alpha, once that is ``FARTHER``."""
        target_s = min(limit_s, bound.step_s * FARTHER)
        higher = _higher(self._of_halved(one.candidate, target_s), bound)
        short = self.of_plans.shortfall_bytes(higher)
        again = bound.step_s < higher.step_s < limit_s and higher.step_s >= target_s and not short
        one = replace(one, bound=higher, shortfall_bytes=short)
        return one if again else self._followed(one)

    def _of_halved(self, candidate: Candidate, enough_s: float) -> LowerBound:
        """Return what no alpha is below; of time, from ranges of which the fastest is halved until it needs enough."""
        bounds, steps = self.of_plans, self._steps(candidate)
        if steps is None:
            return bounds.where_it_fits(candidate.base, candidate.base)
        grid, low, most = steps
        bound = bounds.memory_between(grid.at(low), grid.at(most))
        if bounds.shortfall_bytes(bound):
            return bound
        waiting: list[tuple[float, int, int]] = []

        def add(first: int, last: int) -> None:
            heappush(waiting, (bounds.step_s_between(grid.at(first), grid.at(last)), first, last))

        if most == grid.steps:  # at both ends, row blocks are whole: waits between are not those of the ends
            add(most, most)
            add(low, low)
            low, most = min(low + 1, most - 1), most - 1
        if low <= most:
            add(low, most)
        while True:
            step_s, first, last = waiting[0]
            if first == last or step_s >= enough_s:
                return replace(bound, step_s=step_s)
            heappop(waiting)
            middle = (first + last) // 2
            add(first, middle)
            add(middle if last - first > 1 else last, last)

    def _of_fitting(self, candidate: Candidate) -> float:
        """Return a lower bound of the step seconds of a partial swap's alphas that may fit; it swaps more the later.

        An alpha that does not fit has no step time. The search for alpha asks for the same lowerings.
        """
        bounds, steps = self.of_plans, self._steps(candidate)
        if steps is None:
            return 0.0
        grid, low, most = steps
        low = least_that_fits(lambda step: bounds.lack_device(grid.at(step)), low, most)
        return bounds.step_s_between(grid.at(low), grid.at(most))

    def _of_passes(self, candidate: Candidate) -> float:
        """Return a lower bound of the step seconds of all alphas of a candidate, from the passes of all stages."""
        steps = self._steps(candidate)
        if steps is None:
            return self.of_plans.of_passes(candidate.base, candidate.base)
        grid, low, most = steps
        return self.of_plans.of_passes(grid.at(low), grid.at(most))

    def _of_one_stage(
        self,
        candidate: Candidate,
        bound: LowerBound,
        limit_s: float,
        played_s: Callable[[Decisions], float] | None = None,
    ) -> LowerBound:
        """Return a bound of all alphas of a candidate, which need not be higher than ``limit_s``.

        ``played_s``: plays a plan for which one stage does not show that it needs as much.
        """
        bounds, base = self.of_plans, candidate.base
        steps = self._steps(candidate)
        if steps is None:
            found_s = bounds.of_one_stage(base, base, limit_s)
        else:
            grid, low, most = steps
            lacks = (lambda step: bounds.lack_device(grid.at(step))) if candidate.policy.swaps_some else None
            plays = (lambda step: played_s(grid.at(step))) if played_s else None
            found_s = least_step_s_of_alphas(bounds, grid, low, most, limit_s, lacks=lacks, played_s=plays)
        return replace(bound, step_s=max(bound.step_s, found_s))

    def _steps(self, candidate: Candidate) -> tuple[Grid, int, int] | None:
        """Return the grid of a candidate's alphas, with the lowest step and the highest; None where alpha is given.

        Host memory may suffice for the highest, and device memory of a partial swap for the lowest.
        """
        if candidate.policy.alpha is not None:
            return None
        grid, low, most = self._held(candidate)
        # Token-wise plans that swap every token are the full swap, a candidate of its own.
        most = min(most, grid.steps - (candidate.policy.swaps_some or FULL_SWAP in self._policies))
        return (grid, low, most) if low <= most else None

    def _held(self, candidate: Candidate) -> tuple[Grid, int, int]:
        """Return the grid of a candidate's alphas, with the lowest step and the highest; there may be none between.

        Without a lowering, host memory is not known to be too small for the highest, nor device memory for the lowest
        of a partial swap.
        """
        base, partial, bounds = candidate.base, candidate.policy.swaps_some, self.of_plans

        def found() -> tuple[Grid, int, int]:
            grid = Grid.of(base)
            low, high = int(partial), grid.steps - int(partial)
            if high < low:
                return grid, low, high
            most = most_that_host_holds(grid, bounds, low, high)
            if partial:
                low = least_that_fits(lambda step: bounds.exceeds_device(bounds.memory(grid.at(step))), low, most)
            return grid, low, most

        return self._known_held.of((base, partial), found)

    def _of_fullest_stage(self, candidate: Candidate, bound: LowerBound) -> LowerBound:
        """Return ``bound`` with the device bytes that no alpha of the candidate is below, from one stage.

        A plan that does not fit is else seen only when the programs of all its stages are written.
        """
        bounds, base = self.of_plans, candidate.base
        if candidate.policy.alpha is not None:
            of_stage = bounds.of_last_stage if base.layout.subsequences > 1 else bounds.of_fullest_stage
            return self._with_stage(bound, of_stage(base))
        grid, low, most = self._held(candidate)
        partial = candidate.policy.swaps_some
        if most < low:
            return bound
        raised = self._with_stage(bound, bounds.of_fullest_stage(grid.at(most)))
        if partial and most < grid.steps - 1 and bounds.exceeds_device(raised):
            short = bounds.shortfall_bytes(replace(raised, host_bytes_per_node=0))
            device_bytes = bounds.with_shortage(raised, self._least_short(grid, most, short)).device_bytes
            return replace(bound, device_bytes=max(bound.device_bytes, device_bytes))
        return raised

    def _with_stage(self, bound: LowerBound, stage: StageBytes | None) -> LowerBound:
        """Return ``bound`` with what one stage needs at least.

        What it needs beside its buffers counts among them only where it does not fit: then nothing else is of interest.
        """
        if stage is None:
            return bound
        fits = stage.total <= self.of_plans.device_room_bytes
        device_bytes = stage.buffers if fits else stage.total - bound.beside_bytes
        return replace(bound, device_bytes=max(bound.device_bytes, device_bytes))
