"""Compares the best plan with the others: the runner-up, where it loses time, and plans that are equally fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from memo_sim.contract.plan import Decisions, PlanRow, Prediction
from memo_sim.contract.units import counted, format_bytes, format_percent, format_seconds
from memo_sim.engine.simulate import ALLOCATOR
from memo_sim.planning.outcome import Evaluated, SearchResult, ranked_s
from memo_sim.views.plan_table import layout_label

TIED = 0.005
"""Step times within this fraction count as equal: no prediction is more exact."""
SHOWN = 3
"""How many tied plans are listed."""
PLAYED = 2
"""How many rivals are played again without allocation retries; each costs as much as a plan of the search."""


def label(evaluated: Evaluated) -> str:
    """Return a short name of a plan: its activation policy and its layout."""
    decisions = evaluated.decisions
    alpha = f" at alpha {decisions.alpha:.3g}" if evaluated.policy.alpha not in (0, 1) else ""
    size = f", micro-batch {decisions.micro_batch}" if decisions.micro_batch > 1 else ""
    return f"{evaluated.policy.label}{alpha} on {layout_label(decisions.layout)}{size}"


def runner_up(found: SearchResult) -> list[str]:
    """Say which plan comes second, and on which lane it loses time."""
    fitting = [e for e in found.ranked if e.prediction.status == "ok"]
    best, others = fitting[:1], fitting[1:2]
    if not others or not best:
        return []
    first_s, second_s = best[0].prediction.step_s or 0.0, others[0].prediction.step_s or 0.0
    if ranked_s(first_s) == ranked_s(second_s):
        return [f"Runner-up: {label(others[0])}, equally fast."]
    lost_s = second_s - first_s
    text = f"Runner-up: {label(others[0])}, {format_seconds(lost_s)} ({format_percent(lost_s / first_s)}) slower"
    return [f"{text}{_where_lost(best[0], others[0])}."]


def _where_lost(best: Evaluated, other: Evaluated) -> str:
    """Return the larger of the two causes of a loss: more compute, or more waiting."""
    lost = loss(best.prediction, other.prediction)
    if lost is None:
        return ""
    if lost.compute_s >= lost.waits_s:
        return f": {format_seconds(lost.compute_s)} more compute" if lost.compute_s > 0 else ""
    return f": {format_seconds(lost.waits_s)} more waiting" + (
        f", mostly for {lost.waits_for}" if lost.waits_for else ""
    )


@dataclass(frozen=True)
class Loss:
    """Seconds by which a step is longer than another one: more busy time of compute, and more waiting of it.

    ``waits_for`` is the wait that grew most.
    """

    slower_s: float
    compute_s: float
    waits_s: float
    waits_for: str


def loss(mine: Prediction | PlanRow, theirs: Prediction | PlanRow) -> Loss | None:
    """Return what ``theirs`` loses against ``mine``; None where one of them has no step."""
    if mine.step_s is None or theirs.step_s is None:
        return None
    waits, before = _waits_s(theirs), _waits_s(mine)
    slower_s, waits_s = theirs.step_s - mine.step_s, sum(waits.values()) - sum(before.values())
    grew = {name: seconds - before.get(name, 0.0) for name, seconds in waits.items()}
    longest = max(grew, key=lambda name: grew[name], default="")
    return Loss(slower_s, slower_s - waits_s, waits_s, longest if waits_s > 0 else "")


def _waits_s(prediction: Prediction | PlanRow) -> dict[str, float]:
    """Return the seconds that compute waits, by what it waits for."""
    return {stall.waits_for: stall.seconds for stall in prediction.stalls if stall.lane == "compute"}


def allocator_decides(found: SearchResult, predict: Callable[[Decisions], Prediction]) -> list[str]:
    """Say which plan would beat the best if PyTorch's allocator had the memory at hand that a framework asks for.

    ``predict`` plays a plan. An eager framework's plan is played again on the caching allocator without the eager
    framework's own requests; of other plans the waits for the allocator are taken away. The best is treated alike.
    """
    best = found.best
    if best is None or best.prediction.step_s is None:
        return []
    # What a stage waits for its allocator may be a bubble of the stage that sets the pace, so retries count, not waits.
    others = [e for e in found.ranked if e is not best and e.prediction.step_s is not None and _retries(e)]
    mine_s = _without_retries_s(best, predict) if others and _retries(best) else _step_s(best)
    for rival in sorted(others, key=lambda e: (_step_s(e) - _allocator_s(e), e.rank_key))[:PLAYED]:
        without_s = _without_retries_s(rival, predict)
        if without_s >= mine_s:
            continue
        often = rival.prediction.allocation_retries
        retries = "1 allocation retry" if often == 1 else f"{often} allocation retries"
        text = f"The allocator decides: {label(rival)} takes {format_seconds(_step_s(rival))} with {retries};"
        text += " without them"
        if rival.decisions.memory_policy == "eager":
            text += " (--memory-policy caching)"
        text += f" it would take {format_seconds(without_s)} and beat the best plan"
        if mine_s != _step_s(best):
            text += f", which would take {format_seconds(mine_s)}"
        return [f"{text}."]
    return []


def _retries(one: Evaluated) -> bool:
    return one.prediction.allocation_retries > 0


def _step_s(one: Evaluated) -> float:
    return one.prediction.step_s or 0.0


def _allocator_s(one: Evaluated) -> float:
    """Return the seconds that compute waits for calls of PyTorch's allocator."""
    return _waits_s(one.prediction).get(ALLOCATOR, 0.0)


def _without_retries_s(one: Evaluated, predict: Callable[[Decisions], Prediction]) -> float:
    """Return the step of a plan whose allocator has memory at hand."""
    if one.decisions.memory_policy == "eager":
        at_hand = msgspec.structs.replace(one.decisions, memory_policy="caching", allocator_limit_gib=0)
        found = predict(at_hand)
        if found.step_s is not None and not found.allocation_retries:
            return found.step_s
    return _step_s(one) - _allocator_s(one)


def ties(found: SearchResult) -> list[str]:
    """Say which plans are within half a percent of the best, how they differ, and what broke the tie."""
    best = found.best
    if best is None or best.prediction.step_s is None:
        return []
    limit_s = best.prediction.step_s * (1 + TIED)
    fitting = [e for e in found.ranked if e is not best and e.prediction.step_s is not None]
    tied = [e for e in fitting if (e.prediction.step_s or 0.0) <= limit_s]
    if not tied:
        return []
    listed = "; ".join(_beside(best, other) for other in tied[:SHOWN])
    more = f"; and {len(tied) - SHOWN} more" if len(tied) > SHOWN else ""
    first_s = ranked_s(best.prediction.step_s)
    equal = [e for e in tied if ranked_s(e.prediction.step_s or 0.0) == first_s]
    decides = "least host memory, then least device memory" if equal else "step time"
    return [f"Equally fast (within {format_percent(TIED)}): {listed}{more}. They are ranked by {decides}."]


@dataclass(frozen=True)
class Closeness:
    """Plans that differ from the best by less than the error of a comparison.

    ``plans`` of them have the best plan's class of errors. For these, ``margin`` says by which fraction the ratio of
    two steps may be off, from ``pairs`` of published plans in ``sources`` publications; ``level`` is the share of such
    pairs that it holds. ``others`` have another class: another kind of memory, or allocation retries.
    """

    margin: float
    level: float
    pairs: int
    sources: int
    plans: int
    others: int = 0


def closer_than_the_interval(close: Closeness | None) -> list[str]:
    """Say how many plans are closer to the best than two predictions can be compared."""
    if close is None or close.plans + close.others == 0:
        return []
    lines = []
    if close.plans:
        plans = "1 other evaluated plan is" if close.plans == 1 else f"{close.plans} other evaluated plans are"
        known = f"{counted(close.pairs, 'pair')} of plans in {counted(close.sources, 'source')}"
        text = f"{plans} within {format_percent(close.margin)} of the best, too close to tell apart; measured, one of"
        text += (
            f" them may be faster. In {format_percent(close.level, 0)} of {known} the ratio of the two measured steps"
        )
        text += f" was within {format_percent(close.margin)} of the predicted one."
        lines.append(text)
    if close.others:
        plans = "1 plan" if close.others == 1 else f"{close.others} plans"
        text = f"{plans} with another kind of memory, or with and without allocation retries, may be faster too"
        lines.append(f"{text}: errors of such plans are not shared.")
    return lines


def _beside(best: Evaluated, other: Evaluated) -> str:
    """Return a tied plan, and how its time and memory differ from the best plan's."""
    mine, theirs = best.prediction, other.prediction
    slower = (theirs.step_s or 0.0) / (mine.step_s or 1.0) - 1
    parts = [f"{format_percent(slower, 2)} slower" if slower > 0 else "the same step time"]
    for name, difference in (
        ("device memory", theirs.peak_device_bytes - mine.peak_device_bytes),
        ("host memory per node", theirs.peak_host_bytes_per_node - mine.peak_host_bytes_per_node),
    ):
        if difference:
            parts.append(f"{format_bytes(abs(difference))} {'more' if difference > 0 else 'less'} {name}")
    return f"{label(other)} ({', '.join(parts)})"
