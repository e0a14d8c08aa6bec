"""Selective recompute (Megatron-LM, core attention): backward runs attention forward once more, from kept Q, K, V.

Without a flash kernel that spares the scores and their softmax, heads x tokens**2 each. A flash kernel never stores
them: what is left to spare is the log-sum-exp, 4 bytes a head and token, for one attention forward a layer; under
Ulysses the output on the heads' side too, of which the projection keeps its own tokens. The output is written where it
lies.
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.attention import attention
from memo_sim.program.ir.builder import TemplateBuilder
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.layout.shape import Shape


def rebuilt(shape: Shape) -> frozenset[str]:
    """Return the skeletal tensors that are not kept; the output is the projection's input unless Ulysses sends it."""
    own = {"lse", "probs", "dropped", "kept"}
    return frozenset(own | {"attn"} if shape.ulysses > 1 else own)


def rebuild(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention's forward once more, right before its backward; ``shape`` is attention's."""
    phase, builder.phase = builder.phase, Phase.RECOMPUTE
    attention.forward(builder, decisions, shape)
    builder.phase = phase
