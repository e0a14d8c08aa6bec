"""Finds options that would make an infeasible plan fit: tries each knob and keeps those that help."""

from __future__ import annotations

import msgspec

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.knobs import KNOBS, MOST_ZERO
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import format_bytes
from memo_sim.planning.contradictions import repinned
from memo_sim.planning.layouts import WITHIN_A_STAGE
from memo_sim.planning.outcome import Evaluated
from memo_sim.planning.question import Question
from memo_sim.planning.refusals import tokens_that_divide
from memo_sim.planning.search import play
from memo_sim.program.layout.recomputed_layers import ALL

WORTH_TELLING = 0.1
"""A knob that does not make the plan fit is named when it saves at least this fraction of the shortfall."""


def ways_out(question: Question, nearest: Evaluated) -> list[str]:
    """Return the options that would help the plan nearest to fitting, given the memory that is short and the pins."""
    pins = question.pins
    names = ("alpha", "recompute", *WITHIN_A_STAGE, "zero")
    pinned = [KNOBS[name].option for name in names if getattr(pins, name) is not None]
    ways = [f"leave {', '.join(pinned)} to the search"] if pinned else []
    ways += _dividing_length(question)
    if nearest.prediction.status == "host_oom":
        return [*ways, "more host memory per node", "more nodes"]
    ways.append("more devices")
    for option, changed in _knobs(question, nearest.decisions):
        ways += _tried(question, nearest, option, changed)
    capacity = question.hardware.device_memory_bytes.value
    # Otherwise parameters and optimizer states alone do not fit.
    if nearest.prediction.peak_by_class.get("state", 0) < capacity:
        ways.append("a shorter sequence")
    return ways


def _dividing_length(question: Question) -> list[str]:
    """Return the next shorter length that every layout divides, where this one is no such length."""
    tokens, whole = question.seq_tokens, tokens_that_divide(question)
    if tokens % whole == 0 or tokens < whole:
        return []
    return [f"--seq-len {tokens // whole * whole}, which more layouts divide"]


def _knobs(question: Question, decisions: Decisions) -> list[tuple[str, Decisions]]:
    """Return the options that need less device memory, each with the plan changed by it."""
    smaller = {"fp32": ("bf16", "host"), "bf16": ("host",)}.get(question.states, ())
    found = [(f"--states {states}", msgspec.structs.replace(decisions, states=states)) for states in smaller]
    if decisions.recompute_layers != ALL:
        found.append(("--recompute-layers all", msgspec.structs.replace(decisions, recompute_layers=ALL)))
    elif decisions.recompute == "full" and not decisions.swapped_tokens and question.pins.offload_inputs is None:
        offloaded = msgspec.structs.replace(decisions, swapped_tokens=decisions.local_tokens)
        found.append(("--offload-inputs", offloaded))
    if decisions.rounding_buffers:
        found.append(("--no-rounding-buffers", msgspec.structs.replace(decisions, rounding_buffers=False)))
    if decisions.loss != "fused":
        found.append(("--loss fused", msgspec.structs.replace(decisions, loss="fused")))
    layout = decisions.layout
    if layout.replicas > 1 and layout.zero < MOST_ZERO:
        divided = msgspec.structs.replace(layout, zero=MOST_ZERO)
        found.append((f"--zero {MOST_ZERO}", msgspec.structs.replace(decisions, layout=divided)))
    if layout.zero_ranks:
        divided = msgspec.structs.replace(layout, zero_ranks=0)
        found.append((f"--zero-ranks {layout.replicas}", msgspec.structs.replace(decisions, layout=divided)))
    if question.memory_policy != "planned":
        rounding = repinned(question, memory_policy="planned").rounding_buffers(
            decisions.recompute, decisions.recompute_layers
        )
        planned = msgspec.structs.replace(decisions, memory_policy="planned", rounding_buffers=rounding)
        found.append(("--memory-policy planned", planned))
    return found


def _tried(question: Question, nearest: Evaluated, option: str, changed: Decisions) -> list[str]:
    """Return the option if the plan fits with it or is short by much less; else an empty list."""
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
    return [f"{option} (still short by {format_bytes(left)}{where})"]
