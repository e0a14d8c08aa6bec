"""Recompute by operator (torchtitan, selective activation checkpointing): what is cheap to compute is not kept.

Of a layer's products, in the order in which forward calls them, every second one runs again in backward. The outputs of
the others are kept, and so are attention's output and the results of reduce-scatters. Norms, rotary embeddings,
residual sums and activations are recomputed, and shards are gathered again (torchtitan,
``distributed/activation_checkpoint.py``, ``SelectiveAC``).

    model             products in order             kept            computed again
    Llama             qkv  proj  gate  up  down     qkv  gate       norms, proj, residual, up, activation
    GPT               qkv  proj  up  down           qkv  up         norms, proj, residual, activation

- The last product has no reader in backward; a compiled graph does not keep its output.
- With tensor parallelism the projection's reduced sum is kept, as part of the residual, so the product does not run
  again.
- Q, K and V are one product here. torchtitan has three and computes K again: it keeps ``kv_width`` features a token
  less, and computes that product and the rotary embedding once more.
- Gate and up are one product here. Forward copies out the gate half, which is kept; backward computes the other half.
"""

from __future__ import annotations

from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import Fate, Skeletal

GATE = "gate"
"""The kept half of the first product of a gated MLP."""


def keeps_gate(decisions: Decisions) -> bool:
    """Return whether forward keeps the gate half of the MLP's first product apart."""
    return decisions.recompute == "operators" and decisions.model.gated


def gate(decisions: Decisions, shape: Shape) -> tuple[Skeletal, ...]:
    """Return the kept half of the first product as a skeletal tensor; empty when the product is kept whole."""
    if not keeps_gate(decisions):
        return ()
    return (Skeletal(GATE, shape.tokens, shape.ffn, decisions.dtype, Fate.BY_TOKEN),)


def rebuilt(model: Model, shape: Shape) -> frozenset[str]:
    """Return the skeletal tensors that backward computes again."""
    own = {"norm1", "norm1_stats", "norm2", "norm2_stats", "act"}
    return frozenset(own | ({"up"} if model.gated else set()) | (set() if shape.tp > 1 else {"resid"}))
