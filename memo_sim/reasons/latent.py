"""What latent attention changes: the memory of its latents and heads, computing heads again, padded values."""

from __future__ import annotations

import numpy as np

from memo_sim.contract.attention_kernels import computes_values_wide, pads_values
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES, format_bytes, format_seconds
from memo_sim.engine.simulate import Simulation
from memo_sim.program.ir.instruction import Instruction
from memo_sim.program.layout.shape import shape_of


def expansion(decisions: Decisions) -> str:
    """Return how a plan with latent attention has its heads: always expanded, and kept or computed again."""
    latents, heads = _features(decisions)
    kept = "backward computes heads again from latents" if decisions.rebuild_qkv else "heads are like other activations"
    text = f"expanded to Q, K and V of heads, as in training: {heads:,} features a token, latents {latents:,}; {kept}"
    return f"{text}; {_padding(decisions)}" if _widened(decisions) else text


def _features(decisions: Decisions) -> tuple[int, int]:
    """Return the features of a token on a rank: of the latents that backward needs, and of the packed Q, K, V."""
    shape, latent = shape_of(decisions), decisions.model.latent
    assert latent is not None
    return 2 * latent.width - latent.rope_dim, shape.attention.qkv_width


def _widened(decisions: Decisions) -> bool:
    return decisions.model.narrow_values > 0 and computes_values_wide(decisions.kernels.attention, backward=True)


def _padding(decisions: Decisions) -> str:
    model, kernel = decisions.model, decisions.kernels.attention
    if pads_values(kernel):
        return f"{kernel} pads values from {model.value_dim} to {model.head_dim} features with zeros"
    return f"{kernel} computes backward with values of {model.head_dim} features in place of {model.value_dim}"


def latent_attention(simulation: Simulation) -> list[str]:
    """Say what a layer's heads and latents take on a rank, what computing heads again takes, and what padding costs."""
    decisions = simulation.decisions
    if decisions.model.latent is None:
        return []
    latents, heads = _features(decisions)
    shape, size = shape_of(decisions), DTYPE_BYTES[decisions.dtype]
    packed = format_bytes(shape.attention.tokens * heads * size)
    narrow = format_bytes(shape.shard_tokens * latents * size)
    text = f"Latent attention: Q, K and V of a layer's heads take {packed} on a rank, the latents that they come from"
    text += f" {narrow}."
    if decisions.rebuild_qkv:
        taken = max(
            float(np.sum(stage.seconds * stage.per_instruction(_again) * stage.weights)) for stage in simulation.stages
        )
        text += f" Backward computes the heads again, in {format_seconds(taken)} of a rank's step (--rebuild-qkv)."
    elif decisions.recompute != "full":
        text += " With --rebuild-qkv backward computes the heads again, and only latents are kept or swapped."
    if _widened(decisions):
        model = decisions.model
        more = 5 * model.head_dim / (3 * model.head_dim + 2 * model.value_dim) - 1
        text += f" The kernel {_padding(decisions)}: {100 * more:.0f} % more FLOPs in backward."
    return [text]


def _again(instruction: Instruction) -> float:
    """Return 1 for the instructions that compute heads again in backward."""
    phase, _, name = instruction.name.partition("/")
    return float(phase == "rec" and name.startswith(("q_up", "kv_up", "latent.assemble")))
