"""Selective recompute (Megatron-LM, core attention): backward runs attention's forward again, from kept Q, K, V.

Without a flash kernel this saves the scores and their softmax, each heads x tokens**2 elements. A flash kernel never
stores them, so selective recompute saves only the log-sum-exp: 4 bytes for each head and token, at the cost of one
attention forward for each layer. Under Ulysses it also saves the head-sharded output, because the projection keeps the
sequence-sharded one. Without Ulysses, recompute overwrites the kept output with equal values.
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.attention import attention
from memo_sim.program.ir.builder import TemplateBuilder
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.layout.shape import Shape


def rebuilt(shape: Shape) -> frozenset[str]:
    """Return the skeletal tensors that are not kept; without Ulysses the output is kept for the projection."""
    own = {"lse", "probs", "dropped", "kept"}
    return frozenset(own | {"attn"} if shape.ulysses > 1 else own)


def rebuild(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention's forward again, right before its backward; ``shape`` is attention's."""
    phase, builder.phase = builder.phase, Phase.RECOMPUTE
    attention.forward(builder, decisions, shape)
    builder.phase = phase
