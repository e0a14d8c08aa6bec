"""The config of a GPT-2, read and written."""

from __future__ import annotations

from typing import Any

from memo_sim.contract.huggingface_types.config import Config, even_split
from memo_sim.contract.model import Model
from memo_sim.contract.units import MOST_LAYERS, MOST_TOKENS

_GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def gpt2_shape(config: Config) -> dict[str, Any]:
    """Return GPT-2's shape: learned positions and biases everywhere; a null ``n_inner`` means four times the width."""
    if not config.flag("scale_attn_weights", True):
        raise config.refusal("scale_attn_weights", "attention without its scale is not modelled", wanted="true")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.flag(key, False):
            raise config.refusal(key, "this attention is not modelled", wanted="false")
    activation = config.text("activation_function", "gelu_new")
    if activation not in _GELU:
        raise config.refusal(
            "activation_function", "this activation is not modelled", wanted="one of " + ", ".join(_GELU)
        )
    hidden, heads = config.whole("n_embd"), config.whole("n_head")
    return {
        "family": "gpt",
        "layers": config.whole("n_layer", most=MOST_LAYERS),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": even_split(config, "n_embd", hidden, heads),
        "ffn_hidden": config.whole("n_inner", 4 * hidden),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "max_positions": config.whole("n_positions", most=MOST_TOKENS),
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "qkv_bias": True,
        "linear_bias": True,
        "activation": _GELU[activation],
    }


def gpt2_fields(model: Model) -> dict[str, Any]:
    """Return the fields of a GPT-2's ``config.json`` that other types do not have."""
    activation = {"gelu": "gelu", "gelu_tanh": "gelu_new"}[model.activation]
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.ffn_hidden,
        "n_layer": model.layers,
        "n_positions": model.max_positions,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": activation,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    }
