"""Inputs of frozen products: tensors that backward does not read, so no layer keeps them (``contract/adapters.py``).

A product's input is kept for the gradient of its weight, or of its adapter. With the weight frozen and no adapter,
backward needs the input's gradient alone, which the weight gives:

    product    input                     kept with an adapter at
    qkv        norm1                     q, k or v
    proj       attn_seq (with Ulysses)   proj; without Ulysses the attention kernel's backward reads its output anyway
    ffn_up     norm2                     gate or up; recompute of the MLP as a module begins with it
    ffn_down   act                       down

Experts are not adapted: their layers keep no activation, and the norm's output only where recompute dispatches its
rows again.

Norms, the activation and attention read their own inputs, whatever is trained.
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions

INPUTS = {"qkv": "norm1", "proj": "attn_seq", "ffn_up": "norm2", "ffn_down": "act"}
"""By product: the skeletal tensor that only its own gradients read."""


def unread(decisions: Decisions, *, experts: bool = False) -> frozenset[str]:
    """Return the skeletal tensors of a layer that backward does not read; none without adapters.

    ``experts``: whether the layer has experts in place of its MLP.
    """
    adapters = decisions.lora
    if adapters is None:
        return frozenset()
    found = {name for product, name in INPUTS.items() if not adapters.targets_of(product, decisions.model)}
    if experts:
        found |= {"shared_act"}
    if decisions.recompute == "mlp" or (experts and decisions.recompute == "tokenwise"):
        found -= {"norm2"}
    return frozenset(found)
