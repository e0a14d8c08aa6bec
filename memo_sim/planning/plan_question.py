"""Asks about one plan: a question whose knobs are pinned to what a plan decides, so that one of them can be changed.

The policy (recompute, alpha, MLP and attention in chunks) is pinned with everything that depends on it, or left open as
a whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.knobs import CHOSEN, KNOBS, PINNED, Pins
from memo_sim.contract.plan import Decisions
from memo_sim.contract.systems import DEFAULT_SYSTEM
from memo_sim.planning.contradictions import repinned
from memo_sim.planning.presets import known_system
from memo_sim.planning.question import Question

OF_THE_POLICY = (
    "alpha",
    "recompute",
    "recompute_layers",
    "offload_inputs",
    "rounding_buffers",
    "early_stop",
    "rebuild_qkv",
    "mlp_chunk_tokens",
    "mlp_rebuild",
    "attention_chunk_tokens",
    "offload_window",
    "allocator_limit_gib",
)
"""Pins that say what happens to activations, or depend on it."""
_OWN_HOST_BLOCKS = "memo"
"""The system whose host memory is pinned block by block; the others have one slab of exact size."""


def question_of_plan(decisions: Decisions, cluster: Cluster, hardware: Hardware, *, system: str = "") -> Question:
    """Return the question that ``decisions`` answer with every knob pinned, of ``system`` where it is known."""
    own = _OWN_HOST_BLOCKS if decisions.host_allocator == "power_of_two" else DEFAULT_SYSTEM
    asked = Question(
        model=decisions.model,
        cluster=cluster,
        hardware=hardware,
        seq_tokens=decisions.seq_tokens,
        system=known_system(system, own),
    )
    return pinned_to(asked, decisions)


def pinned_to(question: Question, decisions: Decisions) -> Question:
    """Return ``question`` with every knob pinned to what ``decisions`` say."""
    chosen: dict[str, Any] = {knob.name: getattr(decisions, knob.name) for knob in CHOSEN}
    pins = {
        knob.name: getattr(decisions, knob.name, getattr(decisions.layout, knob.name, knob.default)) for knob in PINNED
    }
    kernels, full = decisions.kernels, decisions.recompute == "full"
    pins |= {"attention": kernels.attention, "rowwise": kernels.rowwise, "adamw": kernels.adamw}
    pins["zero_ranks"] = decisions.layout.zero_ranks or None
    pins["expert_tp"] = decisions.layout.expert_tp or None
    pins["pp_layers"] = decisions.layout.pp_layers if decisions.layout.pp > 1 else None  # () is nearly equal numbers
    pins["alpha"] = decisions.alpha if _leaves_alpha_open(question) else None
    pins["offload_inputs"] = decisions.offload_inputs if full and pins["alpha"] is None else None
    in_blocks = decisions.mlp_chunk_tokens > 0
    pins["rounding_buffers"] = decisions.rounding_buffers if full else None
    pins["early_stop"] = decisions.early_stop if full and not in_blocks else None
    pins["mlp_rebuild"] = decisions.mlp_rebuild if in_blocks else None
    pins["overlap_exchanges"] = decisions.layout.overlap_exchanges if decisions.layout.metp > 1 else None
    if kernels.rowwise not in ("eager", "compiled"):
        pins["adamw"] = None
    if decisions.memory_policy == "planned":
        pins["allocator_limit_gib"] = None
    if decisions.memory_policy != "eager":
        pins["sharding"] = None
    return repinned(replace(question, pins=Pins(), **chosen), **pins)


def with_open_policy(question: Question) -> Question:
    """Return a pinned question that leaves to the search what happens to activations."""
    unset: dict[str, Any] = {name: KNOBS[name].default for name in OF_THE_POLICY}
    return repinned(replace(question, modules="auto"), **unset)


def _leaves_alpha_open(question: Question) -> bool:
    """Return whether the system lets a question pin alpha."""
    return any(policy.alpha is None for policy in question.preset.policies)
