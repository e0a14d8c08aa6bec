"""Where METP wins and where it loses: its best plan beside the same ranks as tp, as a ring of cp and as Ulysses.

A rival has as many ranks, stages and replicas, what the question pins, and every way with activations and ZeRO that
there is (of a system other than ``any`` and ``metp`` its own). METP computes in p^3 tiles (p parts of the heads, p
steps of a ring, p ranks): of short sequences each is too small to fill a device, and its messages too small to hide.
What it never keeps it builds again. What it saves is device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Layout
from memo_sim.contract.units import counted, format_bytes, format_seconds, format_tokens
from memo_sim.engine.simulate import Simulation
from memo_sim.planning.outcome import Evaluated, SearchResult
from memo_sim.planning.presets import find_system
from memo_sim.planning.question import Question
from memo_sim.planning.search import play, search
from memo_sim.program.instruction import Instruction, Lane
from memo_sim.program.work import Attention, Gemm

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
    mine = next((e for e in found.ranked if e.decisions.layout.metp > 1 and e.prediction.status == "ok"), None)
    if not about_it or mine is None:
        return []
    layout = mine.decisions.layout
    asked_of = find_system(AT_THEIR_BEST if question.system in ("any", "metp") else question.system)
    has = (*asked_of.degrees, *asked_of.pinnable)
    theirs = replace(question, system=asked_of.name)
    rivals = {name: rival(theirs, layout, degree) for degree, name in RIVALS.items() if degree in has}
    lines = [_beside(mine, rivals)]
    fitting = {name: e for name, e in rivals.items() if e is not None and e.prediction.status == "ok"}
    if fitting:
        name = min(fitting, key=lambda each: fitting[each].rank_key)
        ours = simulation if mine is found.best else play(question, mine.decisions)
        lines.append(_why(f"{name} {layout.metp}", ours, play(question, fitting[name].decisions)))
    return lines


def rival(question: Question, layout: Layout, degree: str) -> Evaluated | None:
    """Return the best plan of METP's ranks divided by ``degree`` alone; None where that does not divide the model."""
    degrees: dict[str, Any] = dict.fromkeys((*RIVALS, "metp"), 1) | {degree: layout.metp}
    pins = replace(question.pins, **degrees, pp=layout.pp, dp=layout.dp, overlap_exchanges=None, keep_norms=False)
    try:
        return search(replace(question, pins=pins)).ranked[0]
    except Infeasible:
        return None


def _beside(mine: Evaluated, rivals: dict[str, Evaluated | None]) -> str:
    """Return METP's step and device memory beside every rival's."""
    ranks, step_s = mine.decisions.layout.metp, mine.prediction.step_s or 0.0
    others = [e.prediction.step_s for e in rivals.values() if e is not None and e.prediction.step_s is not None]
    faster = sum(step_s < other_s for other_s in others)
    verdict = "wins" if faster == len(others) else f"wins against {faster} of {len(others)}" if faster else "loses"
    told = "; ".join(f"{name} {ranks} {_outcome(mine, other)}" for name, other in rivals.items())
    return f"METP {ranks} {verdict}, {_cost(mine)}: {told}."


def _cost(one: Evaluated) -> str:
    prediction = one.prediction
    return f"{format_seconds(prediction.step_s or 0.0)} and {format_bytes(prediction.peak_device_bytes)} of a device"


def _outcome(mine: Evaluated, other: Evaluated | None) -> str:
    """Return what a rival makes of the question."""
    if other is None:
        return "does not divide this model or sequence"
    if other.prediction.step_s is None or mine.prediction.step_s is None:
        return f"does not fit, short of {format_bytes(other.prediction.shortfall_bytes)}"
    slower = other.prediction.step_s / mine.prediction.step_s - 1
    return f"{_cost(other)}, {abs(slower):.1%} {'slower' if slower > 0 else 'faster'} with {other.policy.label}"


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
    role, step_s = simulation.pace, simulation.prediction.step_s or 0.0
    kinds: dict[str, Callable[[Instruction], bool]] = {
        "attention kernels": lambda i: isinstance(i.work, Attention),
        "products": lambda i: isinstance(i.work, Gemm),
        "other kernels": lambda i: i.op not in EXCHANGES and not isinstance(i.work, Attention | Gemm),
    }
    compute = role.seconds * role.weights * (role.columns.lane == Lane.COMPUTE)
    found = {kind: float(compute @ role.per_instruction(chosen)) for kind, chosen in kinds.items()}
    return found | {"waits": step_s - sum(found.values())}
