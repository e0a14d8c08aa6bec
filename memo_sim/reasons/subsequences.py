"""Explains the number of subsequences: how the bubble and the kernels change with fewer and with more of them.

For SPPO's plans it also says what SPPO's own solver (section 6.1) chooses, and how many bytes SPPO's recurrence (5.2)
says a stage holds.
"""

from __future__ import annotations

from math import inf

import msgspec

from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.plan import Layout, Prediction
from memo_sim.contract.units import format_bytes, format_percent, format_seconds, format_tokens
from memo_sim.engine.simulate import Simulation
from memo_sim.engine.stalls import BUBBLE
from memo_sim.planning.contradictions import repinned
from memo_sim.planning.outcome import Evaluated, SearchResult
from memo_sim.planning.question import Question
from memo_sim.planning.search import predict
from memo_sim.planning.space import candidates
from memo_sim.planning.sppo import Choice, allowed
from memo_sim.planning.subsequences import hidden_tokens, most_held_bytes, part_prices, rounded
from memo_sim.program.ir.instruction import BufferClass
from memo_sim.program.layout.partition import partition, swapped_parts
from memo_sim.views.plan_table import short_by

SPPO = "sppo"
SKELETAL = BufferClass.SKELETAL.value


def subsequences(found: SearchResult, simulation: Simulation) -> list[str]:
    """Say how long the subsequences are, what each offloads, and what fewer or more subsequences would change."""
    decisions = simulation.decisions
    number = decisions.layout.subsequences
    if number == 1:
        return [] if found.best is None else _why_not_cut(found)
    parts, swapped = partition(decisions), swapped_parts(decisions)
    lengths = _range(format_tokens(parts[0]), format_tokens(parts[-1]))
    text = f"{number} subsequences of {lengths} tokens"
    if decisions.swapped_tokens:
        alphas = [some / part for some, part in zip(swapped, parts, strict=True)]
        text += f" offload {_each(parts, swapped)}: alpha {_range(f'{min(alphas):.2f}', f'{max(alphas):.2f}')}"
        if (window := decisions.offload_window) > 1:
            text += f", copied while the next {window} passes are computed"
    if cache := simulation.prediction.peak_by_class.get("kv_cache", 0):
        size = format_bytes(cache)
        text += f"; the KV cache of the prefix stays on the device: {size} at the peak, with its gradients"
    return [
        f"{text}.",
        *_held(simulation),
        *_beside(found, simulation.prediction),
        *_helper_rows(found, simulation.prediction),
    ]


def balance(question: Question, found: SearchResult) -> list[str]:
    """Say how many tokens of each subsequence SPPO's balance (5.2) offloads, exactly and rounded to blocks.

    Returns nothing where the search did not try it, or where it offloads everything.
    """
    best, aware = found.best, next((e.decisions for e in found.ranked if e.policy.hides), None)
    if best is None or aware is None:
        return []
    like = aware if best.decisions.layout.subsequences == 1 else best.decisions
    parts, granule = partition(like), like.swap_granule
    exact = hidden_tokens(question, like, part_prices(question.hardware, question.cluster))
    if exact >= parts[0]:
        return []
    alpha = sum(min(exact, part) for part in parts) / sum(parts)
    tried = rounded(exact, granule)
    text = f"SPPO's balance (5.2): {exact:.0f} tokens leave while one subsequence is computed, alpha {alpha:.2f}"
    blocks = f"rounded to blocks of {granule} this is {' or '.join(map(str, tried))}"
    taken = f"; {max(swapped_parts(best.decisions))} is faster" if best.policy.hides and len(tried) > 1 else ""
    return [f"{text}; {blocks}{taken}."]


def heuristic(question: Question, found: SearchResult) -> list[str]:
    """Compare the choice of SPPO's own solver with the best plan; return nothing for other systems.

    The solver plans one sequence on all devices, within the pinned knobs.
    """
    best = found.best
    if question.system != SPPO or best is None:
        return []
    for choice in allowed(question):
        try:
            played = _play(question, found, choice)
        except (Infeasible, UsageError):  # a pinned schedule excludes this choice: take the solver's next
            continue
        break
    else:
        return []
    if played is None:
        return []
    text = (
        f"SPPO's own solver (6.1) chooses SP {choice.sp}, PP {choice.pp}, N {choice.subsequences}: "
        f"{format_seconds(choice.step_s)} by its formula"
    )
    if played.step_s is None:
        return [f"{text}, but it does not fit: {short_by(played)}."]
    slower = played.step_s / (best.prediction.step_s or played.step_s) - 1
    against = f"{format_percent(abs(slower))} {'slower' if slower >= 0 else 'faster'} than the best plan of the search"
    ask = f" (--tp {choice.sp} --pp {choice.pp} --subsequences {choice.subsequences})" if slower < 0 else ""
    return [f"{text}, {format_seconds(played.step_s)} simulated, {against}{ask}."]


def _play(question: Question, found: SearchResult, choice: Choice) -> Prediction | None:
    """Return the prediction for the solver's choice with the offloading of SPPO 5.2, at the faster of its roundings.

    Returns None where a pinned policy excludes that offloading.
    """
    shared = question.pins.multiplexed or False
    asked = repinned(question, tp=choice.sp, pp=choice.pp, subsequences=choice.subsequences, multiplexed=shared)
    known = {e.decisions: e.prediction for e in found.ranked}
    offered = [c.base for c in candidates(asked)[0] if c.policy.hides]
    played = [known.get(base) or predict(asked, base) for base in offered]
    return min(played, key=lambda one: inf if one.step_s is None else one.step_s, default=None)


def _held(simulation: Simulation) -> list[str]:
    """Compare the activations that a stage holds by SPPO's recurrence (5.2) with those of the simulation."""
    decisions = simulation.decisions
    if decisions.offload_window != 1 or decisions.micro_batches > 1 or decisions.layout.multiplexed:
        return []
    most, live = most_held_bytes(decisions), int(simulation.memory.device_curves[SKELETAL].max())
    held = f"{format_bytes(int(most))} of skeletal tensors by SPPO's recurrence (5.2)"
    return [f"A stage holds at most {held}, and {format_bytes(live)} in the simulation."]


def _each(parts: tuple[int, ...], swapped: tuple[int, ...]) -> str:
    """Return how many tokens the subsequences offload: one number for all, or a range for a plan written by hand."""
    most = max(swapped)
    if swapped == tuple(min(most, part) for part in parts):
        return f"{format_tokens(most)} tokens each, or all of a shorter one"
    return f"{_range(format_tokens(min(swapped)), format_tokens(most))} tokens each"


def _range(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"


def _why_not_cut(found: SearchResult) -> list[str]:
    """Say what the best plan with subsequences loses, where the search evaluated one."""
    best = found.best
    assert best is not None
    cut = [e for e in found.ranked if e.decisions.layout.subsequences > 1 and e.prediction.step_s is not None]
    if not cut:
        return []
    nearest = min(cut, key=lambda e: e.prediction.step_s or 0.0)
    return [f"One subsequence is best: {_against(nearest, best.prediction)}."]


def _beside(found: SearchResult, chosen: Prediction) -> list[str]:
    """Say what the next smaller and the next larger number of subsequences would change in the same layout."""
    best = found.best
    if best is None:
        return []
    layout = best.decisions.layout
    others: dict[int, Evaluated] = {}
    for one in found.ranked:  # the best plan of each number comes first
        if one.prediction.step_s is not None and _uncut(one.decisions.layout) == _uncut(layout):
            others.setdefault(one.decisions.layout.subsequences, one)
    fewer = max((n for n in others if n < layout.subsequences), default=None)
    more = min((n for n in others if n > layout.subsequences), default=None)
    told = [_against(others[n], chosen) for n in (fewer, more) if n is not None]
    return [f"{'; '.join(told)}.".capitalize()] if told else []


def _helper_rows(found: SearchResult, chosen: Prediction) -> list[str]:
    """Say what multiplexing (SPPO 6.2) changes, where the search evaluated plans with and without it."""
    best = found.best
    if best is None:
        return []
    layout = best.decisions.layout
    turned = msgspec.structs.replace(_uncut(layout), multiplexed=not layout.multiplexed)
    others = (e for e in found.ranked if e.prediction.step_s is not None and _uncut(e.decisions.layout) == turned)
    if (other := next(others, None)) is None:
        return []
    number = other.decisions.layout.subsequences
    if layout.multiplexed:
        text = f"Idle stages compute rows of other stages. Without that, at best with {number} subsequences,"
    else:
        text = f"Idle stages do not compute rows of other stages. With that, at best with {number} subsequences,"
    return [f"{text} {_change(other, chosen)}."]


def _uncut(layout: Layout) -> Layout:
    return msgspec.structs.replace(layout, subsequences=1)


def _against(other: Evaluated, chosen: Prediction) -> str:
    """Return what another number of subsequences changes."""
    return f"with {other.decisions.layout.subsequences} subsequences, {_change(other, chosen)}"


def _change(other: Evaluated, chosen: Prediction) -> str:
    """Return how bubble (if there is one), kernels and step of another plan differ from the chosen one."""
    bubbles_s = _bubble_s(other.prediction), _bubble_s(chosen)
    compute_s = other.prediction.lanes.get("compute", 0.0) - chosen.lanes.get("compute", 0.0)
    step_s = (other.prediction.step_s or 0.0) - (chosen.step_s or 0.0)
    waits = f"the bubble is {_longer(bubbles_s[0] - bubbles_s[1])}, " if any(bubbles_s) else ""
    return f"{waits}kernels take {_longer(compute_s)}, and the step is {_longer(step_s)}"


def _longer(seconds: float) -> str:
    return f"{format_seconds(abs(seconds))} {'longer' if seconds >= 0 else 'shorter'}"


def _bubble_s(prediction: Prediction) -> float:
    return sum(s.seconds for s in prediction.stalls if s.lane == "compute" and s.waits_for.startswith(BUBBLE))
