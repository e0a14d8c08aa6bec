"""Where METP wins and where it loses: its best plan beside the same ranks as tp, as a ring of cp and as Ulysses.

A rival has as many ranks, stages and replicas, what the question pins, and every way with activations and ZeRO that
there is (of a system other than ``any`` and ``metp`` its own). METP computes in p^3 tiles (p parts of the heads, p
steps of a ring, p ranks): of short sequences each is too small to fill a device, and its messages too small to hide.
What it never keeps it builds again. What it saves is device memory: of plans that are as good as equally fast the
search takes the one with less host memory, so the one with the least device memory is told beside it, the rivals' too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Layout
from memo_sim.contract.units import counted, format_bytes, format_seconds, format_tokens
from memo_sim.engine.simulate import Simulation
from memo_sim.explain.runner_up import TIED
from memo_sim.planning.outcome import Evaluated, SearchResult
from memo_sim.planning.presets import find_system
from memo_sim.planning.question import Question
from memo_sim.planning.search import play, search
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import Attention, Gemm

RIVALS = {"tp": "tp", "cp": "cp", "ulysses": "Ulysses"}
"""Degrees that divide a layer or a sequence over as many ranks, and how they are called."""
AT_THEIR_BEST = "every-layout"
EXCHANGES = ("send_recv", "broadcast", "reduce")
"""Of METP; on compute's lane where nothing overlaps."""
NOTHING = 0.001
"""Differences below this part of the step are not told."""


def metp(question: Question, found: SearchResult, simulation: Simulation) -> list[str]:
    """Return how METP's best plan stands to its rivals, and why; nothing where the question is not about METP."""
    pinned = question.pins.metp
    about_it = pinned > 1 if pinned is not None else "metp" in find_system(question.system).degrees
    ours = [e for e in found.ranked if e.decisions.layout.metp > 1 and e.prediction.status == "ok"]
    if not about_it or not ours:
        return []
    mine = ours[0]
    layout = mine.decisions.layout
    asked_of = find_system(AT_THEIR_BEST if question.system in ("any", "metp") else question.system)
    has = (*asked_of.degrees, *asked_of.pinnable)
    theirs = replace(question, system=asked_of.name)
    rivals = {name: rival(theirs, layout, degree) for degree, name in RIVALS.items() if degree in has}
    lines = [_beside(ours, rivals)]
    fitting = {name: ranked[0] for name, ranked in rivals.items() if ranked and ranked[0].prediction.status == "ok"}
    if fitting:
        name = min(fitting, key=lambda each: fitting[each].rank_key)
        own = simulation if mine is found.best else play(question, mine.decisions)
        lines.append(_why(f"{name} {layout.metp}", own, play(question, fitting[name].decisions)))
    return lines


def rival(question: Question, layout: Layout, degree: str) -> list[Evaluated]:
    """Return plans of METP's ranks divided by ``degree`` alone, the best first; none where that divides no model."""
    degrees: dict[str, Any] = dict.fromkeys((*RIVALS, "metp"), 1) | {degree: layout.metp}
    pins = replace(question.pins, **degrees, pp=layout.pp, dp=layout.dp, overlap_exchanges=None, keep_norms=False)
    try:
        return search(replace(question, pins=pins)).ranked
    except Infeasible:
        return []


def _beside(ours: list[Evaluated], rivals: dict[str, list[Evaluated]]) -> str:
    """Return METP's step and device memory beside every rival's."""
    mine = ours[0]
    ranks, step_s = mine.decisions.layout.metp, mine.prediction.step_s or 0.0
    others = [e[0].prediction.step_s for e in rivals.values() if e and e[0].prediction.step_s is not None]
    faster = sum(step_s < other_s for other_s in others)
    verdict = "wins" if faster == len(others) else f"wins against {faster} of {len(others)}" if faster else "loses"
    told = "; ".join(f"{name} {ranks} {_outcome(mine, ranked)}" for name, ranked in rivals.items())
    return f"METP {ranks} {verdict}, {_cost(mine)}{_least(ours)}: {told}."


def _cost(one: Evaluated) -> str:
    prediction = one.prediction
    return f"{format_seconds(prediction.step_s or 0.0)} and {format_bytes(prediction.peak_device_bytes)} of a device"


def _least(ranked: list[Evaluated]) -> str:
    """Return the least device memory of plans as good as equally fast as the first, where that needs more itself."""
    best = ranked[0].prediction
    limit_s = (best.step_s or 0.0) * (1 + TIED)
    tied = (e for e in ranked if e.prediction.step_s is not None and e.prediction.step_s <= limit_s)
    least = min(tied, key=lambda e: (e.prediction.peak_device_bytes, e.rank_key))
    if least.prediction.peak_device_bytes >= best.peak_device_bytes:
        return ""
    needs, zero = format_bytes(least.prediction.peak_device_bytes), least.decisions.layout.zero
    states = f" and ZeRO {zero}" if zero != ranked[0].decisions.layout.zero else ""
    return f" (as little as {needs} with {least.policy.label}{states}, within {TIED:.1%} of that time)"


def _outcome(mine: Evaluated, ranked: list[Evaluated]) -> str:
    """Return what a rival makes of the question."""
    if not ranked:
        return "does not divide this model or sequence"
    other = ranked[0]
    if other.prediction.step_s is None or mine.prediction.step_s is None:
        return f"does not fit, short of {format_bytes(other.prediction.shortfall_bytes)}"
    slower = other.prediction.step_s / mine.prediction.step_s - 1
    said = f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'} with {other.policy.label}"
    return f"{_cost(other)}, {said}{_least(ranked)}"


def _why(name: str, ours: Simulation, theirs: Simulation) -> str:
    """Return what sets METP's step apart from the fastest rival's, kind by kind."""
    mine, others = _seconds(ours), _seconds(theirs)
    differences = {kind: mine[kind] - others[kind] for kind in mine}
    told = [
        f"{kind} are {format_seconds(abs(seconds))} {'longer' if seconds > 0 else 'shorter'}"
        for kind, seconds in differences.items()
        if abs(seconds) >= NOTHING * (ours.prediction.step_s or 0.0)
    ]
    decisions, again_s = ours.decisions, ours.pace.own_rebuild_s
    ranks, heads = decisions.layout.metp, decisions.model.heads // decisions.layout.metp
    return (
        f"Against {name} METP's {', '.join(told) or 'times are the same'}: a tile of its attention is "
        f"{counted(heads, 'head')} of {format_tokens(decisions.local_tokens)} tokens, its products have 1/{ranks} of "
        f"the features, and making Q, K, V and the MLP again takes {format_seconds(again_s)}."
    )


def _seconds(simulation: Simulation) -> dict[str, float]:
    """Return where the step's time goes; ``waits``: compute stands still, or is slowed by what runs beside it."""
    stage, step_s = simulation.pace, simulation.prediction.step_s or 0.0
    kinds: dict[str, Callable[[Instruction], bool]] = {
        "attention kernels": lambda i: isinstance(i.work, Attention),
        "products": lambda i: isinstance(i.work, Gemm),
        "other kernels": lambda i: i.op not in EXCHANGES and not isinstance(i.work, Attention | Gemm),
    }
    compute = stage.seconds * stage.weights * (stage.columns.lane == Lane.COMPUTE)
    found = {kind: float(compute @ stage.per_instruction(chosen)) for kind, chosen in kinds.items()}
    return found | {"waits": step_s - sum(found.values())}
