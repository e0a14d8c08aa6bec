"""What a search does with one candidate, here or in another process: it tightens its bounds, then evaluates it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from msgspec import Struct

from memo_sim.contract.plan import Decisions, Layout, Prediction
from memo_sim.planning.ahead import LOWERED, OUTCOME, PLAYED
from memo_sim.planning.aims import Aims
from memo_sim.planning.bounded_candidates import Bounded, BoundedLayout, CandidateBounds
from memo_sim.planning.evaluation import Evaluation
from memo_sim.planning.few_layers import Lowered, Passes
from memo_sim.planning.outcome import Evaluated, Key
from memo_sim.planning.plays import Plays, play_beside
from memo_sim.planning.presets import Policy
from memo_sim.planning.question import Question
from memo_sim.planning.rivals import Rivals
from memo_sim.planning.space import Space

OF_MEMORY = frozenset({"device_memory_bytes", "host_memory_bytes", "sources"})
"""Fields of a profile and of a cluster that no pass depends on: sizes of memory, and where numbers are from."""

SENT = "sent"
"""Where a process keeps how many results of its lowerings need not be sent to the search (``Passes.counts``)."""


@dataclass(frozen=True, slots=True)
class Needed:
    """What a process needs to know to examine a candidate or layout."""

    last: Key
    """Where the candidate's bounds pass this key, the examination ends."""
    soon: Key
    """Where they pass this key, no plan is played."""
    limit_s: float
    """Step seconds of the last of the best plans so far (``Ranking.limit_s``)."""
    rivals: Rivals
    """Of a candidate."""
    known: dict[Decisions, Prediction]
    """Plans that need not be played again."""
    compiled: bool
    """Whether the search plays in the compiled loop (``plays.is_compiled``), and so the process, too."""


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate's outcome, and the predictions that its evaluation asked for, in this order.

    Without an outcome, predictions that its bounds asked for.
    """

    outcome: Evaluated | None
    used: dict[Decisions, Prediction]


class Examination:
    """The bounds, plays and evaluation of one question's candidates."""

    def __init__(self, question: Question, aims: Aims, passes: Passes | None = None) -> None:
        """``passes``: those of an earlier search on the same devices (``LowerBounds``)."""
        self.question = question
        self.space: Space | None = None
        """Where the layouts are from."""
        self.bounds = CandidateBounds(question, passes, front=aims.front)
        self.plays = Plays(question)
        self.bounds.played_s = self.plays.step_s
        self.evaluation = Evaluation(question, self.bounds.of_plans, self.plays, aims)

    @property
    def passes(self) -> Passes:
        """The passes that were lowered for bounds."""
        return self.bounds.of_plans.passes

    def layouts(self, found: Sequence[Layout]) -> list[BoundedLayout]:
        """Return layouts with their first bounds."""
        assert self.space is not None
        return [self.bounds.layout(self.space, layout) for layout in found]

    def tightened(self, one: Bounded | BoundedLayout, limit_s: float) -> Bounded | BoundedLayout:
        """Return a candidate or layout with its next tighter bounds (``CandidateBounds.tightened``)."""
        if isinstance(one, Bounded):
            return self.bounds.tightened(one, limit_s)
        assert self.space is not None
        return self.bounds.tightened_layout(self.space, one)

    def parts(
        self, one: Bounded | BoundedLayout, needed: Needed
    ) -> Iterator[tuple[Hashable, Bounded | BoundedLayout | Found]]:
        """Yield a candidate with each of its tighter bounds, by their names, and then what its evaluation found.

        A layout ends with its bounds: opening it is the search's.
        """
        self.plays.known.update(needed.known)
        while (name := one.next_name(needed.limit_s)) and one.least_key <= needed.last:
            if isinstance(one, Bounded) and one.is_played_next and one.least_key > needed.soon:
                return
            before = len(self.plays.known)
            one = self.tightened(one, needed.limit_s)
            if len(self.plays.known) > before:
                yield PLAYED, Found(None, dict(islice(self.plays.known.items(), before, None)))
            yield name, one
        if isinstance(one, BoundedLayout) or one.least_key > min(needed.last, needed.soon):
            return
        with self.plays.apart() as used:
            outcome = self.evaluation.outcome(one.candidate, needed.rivals)
        yield OUTCOME, Found(outcome, {plan: self.plays.known[plan] for plan in used})


def begin(
    here: dict[str, Any], question: Question, aims: Aims, policies: tuple[Policy, ...], goes_on: bool
) -> Iterator[object]:
    """Begin to examine candidates of a question in another process.

    ``goes_on``: whether the search uses the passes of an earlier one, as it then does there.
    """
    before: Examination | None = here.pop("examination", None)
    passes = before.passes if goes_on and before is not None and _same_devices(before.question, question) else None
    here["examination"] = made = Examination(question, aims, passes)
    made.space = Space(question, policies)
    here[SENT] = made.passes.counts
    return iter(())


def _same_devices(question: Question, other: Question) -> bool:
    """Return whether passes that were lowered for one question serve the other; sizes of memory change none."""
    pairs: tuple[tuple[Struct, Struct], ...] = (
        (question.hardware, other.hardware),
        (question.cluster, other.cluster),
    )
    return all(
        getattr(one, name) == getattr(another, name)
        for one, another in pairs
        for name in one.__struct_fields__
        if name not in OF_MEMORY
    )


def learn(here: dict[str, Any], lowered: Lowered) -> Iterator[object]:
    """Keep in another process the results of the search's lowerings."""
    passes = _examination(here).passes
    here[SENT] = passes.learn(lowered, here[SENT])
    return iter(())


def bound_layouts(here: dict[str, Any], found: Sequence[Layout]) -> Iterator[list[BoundedLayout]]:
    """Compute the first bounds of layouts in another process."""
    yield _examination(here).layouts(found)


def examine(here: dict[str, Any], one: Bounded | BoundedLayout, needed: Needed) -> Iterator[tuple[Hashable, object]]:
    """Examine a candidate or layout in another process, which also sends the results of its lowerings."""
    examination = _examination(here)
    examination.plays.stand_aside()
    play_beside(compiled=needed.compiled)
    passes = examination.passes
    for part in examination.parts(one, needed):
        if here[SENT] != passes.counts:
            yield LOWERED, passes.lowered_since(here[SENT])
            here[SENT] = passes.counts
        yield part


def _examination(here: dict[str, Any]) -> Examination:
    """Return what a process keeps; one that was forked has it from the search, with results that need not be sent."""
    examination: Examination = here["examination"]
    here.setdefault(SENT, examination.passes.counts)
    return examination
