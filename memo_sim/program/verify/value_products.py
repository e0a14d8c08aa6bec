"""Which product reads a value, and of which product's result a value is the gradient (``value_rules.py``)."""

from __future__ import annotations

from memo_sim.program.ir.kinds import BlockKind
from memo_sim.program.verify.value_call import Call
from memo_sim.program.verify.value_experts import shared_norm, shared_output
from memo_sim.program.verify.value_rows import Value
from memo_sim.program.verify.value_terms import gradient_name, product_name, whole

Product = tuple[str, BlockKind, str]
"""A product that reads a value: name and block of its weight, and name of its result."""
ProductBehind = tuple[str, BlockKind, str, int, str]
"""A product whose result has a gradient: weight, block, gradient of its input, layers before, and its input."""

EMBED, HEAD, LAYER = BlockKind.EMBED, BlockKind.HEAD, BlockKind.LAYER


LATENT_PRODUCTS = {"norm1": ("latent", LAYER, "latent"), "kv_latent": ("kv_up", LAYER, "kv_up")}
"""Products of latent attention by what they read: the latents of a token shard, and the heads of gathered latents."""


def product_of(call: Call, value: Value) -> Product | None:
    """Return the product that reads a value: its weight's name and block, and its result's name.

    In a layer with experts the plain products are those of the shared expert.
    """
    v, name = call.values, value.name
    partial = "~" if v.tp > 1 else ""
    base = name.removesuffix("*")
    if v.model.latent and base in LATENT_PRODUCTS:
        return LATENT_PRODUCTS[base] if name == (base if base == "norm1" else f"{base}{v.full}") else None
    if base in ("norm1", "norm2", "final") and v.full and not name.endswith("*"):
        return None
    if base == "norm2" and v.has_experts(value.layer):
        return "shared_up", LAYER, "shared_up"
    products = {
        "norm1": ("qkv", LAYER, product_name(v)),
        "attn": ("proj", LAYER, f"proj{partial}"),
        "norm2": ("ffn_up", LAYER, "up"),
        "act": ("ffn_down", LAYER, f"down{partial}"),
        "shared_act": ("shared_down", LAYER, shared_output(v)),
        "final": ("tokens", EMBED, "logits") if v.model.tied_embeddings else ("classifier", HEAD, "logits"),
    }
    return products.get(base)


def gradient_of(call: Call, value: Value) -> ProductBehind | None:
    """Return the product whose result's gradient a value is: weight, block, input, layers before, name of the input."""
    v = call.values
    base, partial = value.name.removesuffix("*"), "~" if v.tp > 1 else ""
    behind = v.model.post_norms
    if base == "d_x" and v.has_experts(value.layer - 1):
        return "shared_down", LAYER, "d_shared_act", 1, "shared_act"
    if base == ("d_down" if behind else "d_x"):
        return "ffn_down", LAYER, "d_act", 0 if behind else 1, "act"
    if v.model.latent and base == "d_kv_up":
        return "kv_up", LAYER, f"d_kv_latent{partial}", 0, "kv_latent"
    if v.model.latent and base == "d_latent":
        return "latent", LAYER, "d_norm1", 0, "norm1"
    if base == gradient_name(v):
        return "qkv", LAYER, f"d_norm1{partial}", 0, "norm1"
    products = {
        "d_proj" if behind else "d_resid": ("proj", LAYER, "d_attn", 0, "attn"),
        "d_up": ("ffn_up", LAYER, f"d_norm2{partial}", 0, "norm2"),
        "d_shared_up": ("shared_up", LAYER, shared_norm(v), 0, "norm2"),
        "d_logits": classifier_gradient(call),
    }
    return products.get(base)


def classifier_gradient(call: Call) -> ProductBehind:
    """Return the product of whose result the gradient of the logits is the gradient."""
    tied, partial = call.values.model.tied_embeddings, "~" if call.values.tp > 1 else ""
    return "tokens" if tied else "classifier", EMBED if tied else HEAD, f"d_final{partial}", 0, "final"


def read_by_product(call: Call, given: Value | None, row: int, tokens: int) -> tuple[Value, Product] | None:
    """Return rows in role x as a whole value, and the product that reads it; None after a fault, or without a value."""
    value = None if given is None else whole(call, "x", given, row, tokens)
    found = None if value is None else product_of(call, value)
    if value is not None and found is None:
        call.wrong("x", value, row, "the input of a product")
    return None if value is None or found is None else (value, found)


def made_by_product(call: Call, given: Value | None, row: int, tokens: int) -> tuple[Value, ProductBehind] | None:
    """Return rows in role grad as a whole value, and the product of whose result it is the gradient; else None."""
    value = None if given is None else whole(call, "grad", given, row, tokens)
    found = None if value is None else gradient_of(call, value)
    if value is not None and found is None:
        call.wrong("grad", value, row, "the gradient of a product")
    return None if value is None or found is None else (value, found)
