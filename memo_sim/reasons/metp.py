"""Compares METP's best plan with its rivals: the same ranks as tensor parallelism, as a cp ring, and as Ulysses.

A rival has the same number of ranks, stages and replicas, and the same pins, but no METP. All activation policies and
ZeRO levels are open to it (where another system than memo's own or METP's is asked for, that system's). Where METP is
searched beside its rivals, they are compared only if METP has the best plan.

METP computes attention in p^3 tiles: p groups of heads, p ring steps, p ranks. With short sequences a tile is too small
to fill a device, and its messages are too small to hide. METP recomputes what it never keeps. What it saves is device
memory. Among equally fast plans the search prefers less host memory, so the text also names the plan with the least
device memory, for METP and for each rival.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Layout
from memo_sim.contract.systems import DEFAULT_SYSTEM, OPEN
from memo_sim.contract.units import counted, format_bytes, format_percent, format_seconds, format_tokens
from memo_sim.engine.simulate import Simulation
from memo_sim.planning.contradictions import repinned
from memo_sim.planning.layouts import searches_metp_beside_others
from memo_sim.planning.outcome import Evaluated, SearchResult
from memo_sim.planning.question import Question
from memo_sim.planning.search import play, search
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import Attention, Gemm
from memo_sim.reasons.runner_up import TIED

RIVALS = {"tp": "tp", "cp": "cp", "ulysses": "Ulysses"}
"""The layout knobs that divide a layer or a sequence over the same ranks, and their names in sentences."""
EXCHANGES = ("send_recv", "broadcast", "reduce")
"""METP's exchanges; they run on the compute lane where nothing overlaps."""
NOTHING = 0.001
"""Differences below this fraction of the step are not reported."""


def metp(question: Question, found: SearchResult, simulation: Simulation) -> list[str]:
    """Compare METP's best plan with its rivals; return nothing where the question is not about METP."""
    ours = [e for e in found.ranked if e.decisions.layout.metp > 1 and e.prediction.status == "ok"]
    if not ours or (searches_metp_beside_others(question) and ours[0] is not found.best):
        return []
    mine = ours[0]
    layout = mine.decisions.layout
    theirs = replace(question, system=DEFAULT_SYSTEM) if question.system in (*OPEN, "metp") else question
    has = (*theirs.preset.degrees, *theirs.preset.pinnable)
    rivals = {name: rival(theirs, layout, degree) for degree, name in RIVALS.items() if degree in has}
    lines = [_beside(ours, rivals)]
    fitting = {name: ranked[0] for name, ranked in rivals.items() if ranked and ranked[0].prediction.status == "ok"}
    if fitting:
        name = min(fitting, key=lambda each: fitting[each].rank_key)
        own = simulation if mine is found.best else play(question, mine.decisions)
        lines.append(_why(f"{name} {layout.metp}", own, play(question, fitting[name].decisions)))
    return lines


def rival(question: Question, layout: Layout, degree: str) -> list[Evaluated]:
    """Return plans that use METP's ranks for ``degree`` alone, the best first; none where that divides no model."""
    degrees: dict[str, Any] = dict.fromkeys((*RIVALS, "metp"), 1) | {degree: layout.metp}
    try:
        return search(repinned(question, **degrees, pp=layout.pp, dp=layout.dp)).ranked
    except Infeasible:
        return []


def _beside(ours: list[Evaluated], rivals: dict[str, list[Evaluated]]) -> str:
    """Return METP's step time and device memory, and those of each rival."""
    mine = ours[0]
    ranks, step_s = mine.decisions.layout.metp, mine.prediction.step_s or 0.0
    others = [e[0].prediction.step_s for e in rivals.values() if e and e[0].prediction.step_s is not None]
    faster = sum(step_s < other_s for other_s in others)
    if faster == len(others):
        verdict = "is faster than every rival that fits"
    else:
        verdict = (
            f"is faster than {faster} of {len(others)} rivals that fit" if faster else "is slower than every rival"
        )
    compared = "; ".join(f"{name} {ranks} {_outcome(mine, ranked)}" for name, ranked in rivals.items())
    return f"METP {ranks} {verdict}: it needs {_cost(mine)}{_least(ours)}. On the same ranks, {compared}."


def _cost(one: Evaluated) -> str:
    prediction = one.prediction
    return f"{format_seconds(prediction.step_s or 0.0)} and {format_bytes(prediction.peak_device_bytes)} per device"


def _least(ranked: list[Evaluated]) -> str:
    """Return the least device memory among plans equally fast as the first; an empty text if the first has it."""
    best = ranked[0].prediction
    limit_s = (best.step_s or 0.0) * (1 + TIED)
    tied = (e for e in ranked if e.prediction.step_s is not None and e.prediction.step_s <= limit_s)
    least = min(tied, key=lambda e: (e.prediction.peak_device_bytes, e.rank_key))
    if least.prediction.peak_device_bytes >= best.peak_device_bytes:
        return ""
    needs, zero = format_bytes(least.prediction.peak_device_bytes), least.decisions.layout.zero
    states = f" and ZeRO {zero}" if zero != ranked[0].decisions.layout.zero else ""
    return f" (as little as {needs} with {least.policy.label}{states}, within {format_percent(TIED)} of that time)"


def _outcome(mine: Evaluated, ranked: list[Evaluated]) -> str:
    """Return how a rival does: its time and memory, or why it gives no plan."""
    if not ranked:
        return "does not divide this model or sequence"
    other = ranked[0]
    if other.prediction.step_s is None or mine.prediction.step_s is None:
        return f"does not fit, short by {format_bytes(other.prediction.shortfall_bytes)}"
    slower = other.prediction.step_s / mine.prediction.step_s - 1
    said = f"{format_percent(abs(slower))} {'slower' if slower > 0 else 'faster'} with {other.policy.label}"
    return f"needs {_cost(other)}, {said}{_least(ranked)}"


def _why(name: str, ours: Simulation, theirs: Simulation) -> str:
    """Return how METP's step differs from the fastest rival's, by kind of time."""
    mine, others = _seconds(ours), _seconds(theirs)
    differences = {kind: mine[kind] - others[kind] for kind in mine}
    compared = [
        f"{kind} take {format_seconds(abs(seconds))} {'longer' if seconds > 0 else 'shorter'}"
        for kind, seconds in differences.items()
        if abs(seconds) >= NOTHING * (ours.prediction.step_s or 0.0)
    ]
    decisions, again_s = ours.decisions, ours.pace.own_rebuild_s
    ranks, heads = decisions.layout.metp, decisions.model.heads // decisions.layout.metp
    return (
        f"Compared with {name}: METP's {', '.join(compared) or 'times are the same'}. An attention tile of METP has "
        f"{counted(heads, 'head')} and {format_tokens(decisions.local_tokens)} tokens, its matrix products have "
        f"1/{ranks} of the features, and recomputing Q, K, V and the MLP takes {format_seconds(again_s)}."
    )


def _seconds(simulation: Simulation) -> dict[str, float]:
    """Return the step's seconds by kind; ``waits``: compute is idle, or slowed by what runs at the same time."""
    stage, step_s = simulation.pace, simulation.prediction.step_s or 0.0
    kinds: dict[str, Callable[[Instruction], bool]] = {
        "attention kernels": lambda i: isinstance(i.work, Attention),
        "matrix products": lambda i: isinstance(i.work, Gemm),
        "other kernels": lambda i: i.op not in EXCHANGES and not isinstance(i.work, Attention | Gemm),
    }
    compute = stage.seconds * stage.weights * (stage.columns.lane == Lane.COMPUTE)
    found = {kind: float(compute @ stage.per_instruction(chosen)) for kind, chosen in kinds.items()}
    return found | {"waits": step_s - sum(found.values())}
