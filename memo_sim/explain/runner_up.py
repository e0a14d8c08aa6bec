"""How the best plan stands to the others: the runner-up and what it loses, and plans that are as good as equal."""

from __future__ import annotations

from memo_sim.contract.plan import Prediction
from memo_sim.contract.units import format_bytes, format_seconds
from memo_sim.planning.outcome import Evaluated, SearchResult, ranked_s
from memo_sim.views.plan_table import layout_label

TIED = 0.005
"""Step times this much apart are as good as equal: no prediction is that exact."""
SHOWN = 3
"""Tied plans that are named."""


def label(evaluated: Evaluated) -> str:
    """Return a plan in a few words: what it does with activations, and its layout."""
    decisions = evaluated.decisions
    alpha = f" at alpha {decisions.alpha:.3g}" if evaluated.policy.alpha not in (0, 1) else ""
    return f"{evaluated.policy.label}{alpha} on {layout_label(decisions.layout)}"


def runner_up(found: SearchResult) -> list[str]:
    """Say which plan comes next, and what it loses where."""
    fitting = [e for e in found.ranked if e.prediction.status == "ok"]
    best, others = fitting[:1], fitting[1:2]
    if not others or not best:
        return []
    first_s, second_s = best[0].prediction.step_s or 0.0, others[0].prediction.step_s or 0.0
    if ranked_s(first_s) == ranked_s(second_s):
        return [f"Runner-up: {label(others[0])}, as fast."]
    loss = second_s - first_s
    text = f"Runner-up: {label(others[0])}, {format_seconds(loss)} ({loss / first_s:.1%}) slower"
    return [f"{text}{_where_lost(best[0], others[0])}."]


def _where_lost(best: Evaluated, other: Evaluated) -> str:
    """Name the lane-level difference that explains most of a loss."""
    mine, theirs = best.prediction, other.prediction
    busier = theirs.lanes.get("compute", 0.0) - mine.lanes.get("compute", 0.0)
    idle = (theirs.step_s or 0.0) - (mine.step_s or 0.0) - busier
    if busier >= idle:
        return f": {format_seconds(busier)} more compute" if busier > 0 else ""
    waits, before = _waits_s(theirs), _waits_s(mine)
    grew = max(waits, key=lambda name: waits[name] - before.get(name, 0.0), default="")
    return f": {format_seconds(idle)} more waiting" + (f", most for {grew}" if grew else "")


def _waits_s(prediction: Prediction) -> dict[str, float]:
    """Return how long compute waits, by what it waits for."""
    return {stall.waits_for: stall.seconds for stall in prediction.stalls if stall.lane == "compute"}


def ties(found: SearchResult) -> list[str]:
    """Say which plans are within half a percent of the best, what sets them apart, and what decided."""
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
    decides = "less host memory, then less device memory decides" if equal else "the step time decides"
    return [f"As good as equal (within {TIED:.1%}): {listed}{more}. Between them {decides}."]


def _beside(best: Evaluated, other: Evaluated) -> str:
    """Return a tied plan with what it takes more or less than the best."""
    mine, theirs = best.prediction, other.prediction
    slower = (theirs.step_s or 0.0) / (mine.step_s or 1.0) - 1
    parts = [f"{slower:.2%} slower" if slower > 0 else "as fast"]
    for name, difference in (
        ("on a device", theirs.peak_device_bytes - mine.peak_device_bytes),
        ("on a node's host", theirs.peak_host_bytes_per_node - mine.peak_host_bytes_per_node),
    ):
        if difference:
            parts.append(f"{format_bytes(abs(difference))} {'more' if difference > 0 else 'less'} {name}")
    return f"{label(other)} ({', '.join(parts)})"
