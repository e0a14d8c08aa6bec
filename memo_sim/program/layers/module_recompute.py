"""Recompute of single modules (Megatron-LM's recompute modules): norms, or the MLP.

    norms   Outputs and statistics of both norms are not kept. Each norm runs again where backward reaches its module:
            the second before the MLP's backward, the first before attention's (``layernorm`` there, which frees only
            outputs: ``CheckpointWithoutOutput``)
    mlp     The first product and the activation are not kept. The MLP runs forward again as a whole before its
            backward, from the norm's output, so its second product runs too and nothing reads that (``mlp`` there;
            ``moe`` with experts, whose routing is kept here)

Attention alone is ``selective`` (``core_attn``). Source: NVIDIA/Megatron-LM, core/transformer/transformer_layer.py.
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions

REBUILT = {
    "norms": frozenset({"norm1", "norm1_stats", "norm2", "norm2_stats"}),
    "mlp": frozenset({"up", "act", "shared_up", "shared_act"}),
}
"""By recompute mode: the skeletal tensors that backward computes again."""


def rebuilt(decisions: Decisions) -> frozenset[str]:
    """Return the skeletal tensors that backward computes again; none under other modes."""
    return REBUILT.get(decisions.recompute, frozenset())
