"""What would make a plan fit that does not: each knob is tried, and told where it helps."""

from __future__ import annotations

import msgspec

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.knobs import KNOBS, MOST_ZERO
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import format_bytes
from memo_sim.planning.layouts import WITHIN_A_STAGE
from memo_sim.planning.outcome import Evaluated
from memo_sim.planning.question import Question
from memo_sim.planning.search import play

WORTH_TELLING = 0.1
"""Part of what is short that a knob has to spare, where it does not spare all of it."""


def ways_out(question: Question, nearest: Evaluated) -> list[str]:
    """Return what would help the plan nearest to fitting, given what is short and what was asked for."""
    pins = question.pins
    names = ("alpha", "recompute", *WITHIN_A_STAGE, "zero")
    pinned = [KNOBS[name].option for name in names if getattr(pins, name) is not None]
    ways = [f"leave {', '.join(pinned)} to the search"] if pinned else []
    if nearest.prediction.status == "host_oom":
        return [*ways, "more host memory in a node", "more nodes"]
    ways.append("more devices")
    for option, changed in _knobs(question, nearest.decisions):
        ways += _tried(question, nearest, option, changed)
    capacity = question.hardware.device_memory_bytes.value
    if nearest.prediction.peak_by_class.get("state", 0) < capacity:  # else weights and optimizer alone are too much
        ways.append("a shorter sequence")
    return ways


def _knobs(question: Question, decisions: Decisions) -> list[tuple[str, Decisions]]:
    """Return the options that take less device memory, and the plan with each."""
    smaller = {"fp32": ("bf16", "host"), "bf16": ("host",)}.get(question.states, ())
    found = [(f"--states {states}", msgspec.structs.replace(decisions, states=states)) for states in smaller]
    layout = decisions.layout
    if layout.replicas > 1 and layout.zero < MOST_ZERO:
        divided = msgspec.structs.replace(layout, zero=MOST_ZERO)
        found.append((f"--zero {MOST_ZERO}", msgspec.structs.replace(decisions, layout=divided)))
    if question.memory_policy != "planned":
        found.append(("--memory-policy planned", msgspec.structs.replace(decisions, memory_policy="planned")))
    return found


def _tried(question: Question, nearest: Evaluated, option: str, changed: Decisions) -> list[str]:
    """Return the option where the plan fits with it or is short of much less, nothing where that is not so."""
    try:
        prediction = play(question, changed).prediction
    except Infeasible:
        return []
    if prediction.step_s is not None:
        return [option]
    left, short = prediction.shortfall_bytes, nearest.prediction.shortfall_bytes
    if prediction.status == "gpu_oom" and left > (1 - WORTH_TELLING) * short:
        return []
    where = "" if prediction.status == "gpu_oom" else " of host memory"
    return [f"{option} (then short of {format_bytes(left)}{where})"]
