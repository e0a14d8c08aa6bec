"""The configs of Llama and its relatives, read: Mistral, Phi-3, Qwen, Gemma 3, and those with experts or latents."""

from __future__ import annotations

from typing import Any

from memo_sim.contract.huggingface_types.config import Config, even_split
from memo_sim.contract.huggingface_types.deepseek import latent_attention
from memo_sim.contract.huggingface_types.experts import routed_experts
from memo_sim.contract.huggingface_types.gemma3 import query_scalar
from memo_sim.contract.huggingface_types.kinds import GEMMA3, GPT_OSS, WITH_EXPERTS, WITH_LATENT
from memo_sim.contract.huggingface_types.rotary_tables import rotary_tables
from memo_sim.contract.units import MOST_LAYERS


def rotary_shape(config: Config, model_type: str) -> dict[str, Any]:
    """Return the shape of a Llama, Mistral, Phi-3, Qwen or Gemma 3: rotary positions, a gated FFN, grouped-query heads.

    ``with_windows`` adds windows, and the rotary bases of layers that have one.
    """
    gemma = model_type == GEMMA3
    key, wanted = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    if config.text(key, wanted) != wanted:
        raise config.refusal(key, f"only FFNs gated by {wanted} are modelled in a model of this type", wanted=wanted)
    if gemma and config.flag("use_bidirectional_attention", False):
        raise config.refusal("use_bidirectional_attention", "only causal attention is modelled here", wanted="false")
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    if model_type != "llama" and "num_key_value_heads" not in config.fields:  # the first Llama configs lack this key
        raise config.refusal("num_key_value_heads", "a field that the model's shape needs is missing")
    latent = latent_attention(config, model_type) if model_type in WITH_LATENT else None
    if latent is not None:
        head_dim = latent.head_dim
    elif model_type in ("qwen3", "qwen3_moe", GEMMA3, GPT_OSS) or config.given("head_dim") is not None:
        head_dim = config.whole("head_dim")
    else:
        head_dim = even_split(config, "hidden_size", hidden, heads)
    biased = _all_biased(config, model_type)
    projected = model_type == GPT_OSS and config.flag("attention_bias", True)
    theta, scaling = rotary_tables(config)
    return {
        "family": "llama",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.whole("num_key_value_heads", heads),
        "head_dim": head_dim,
        "ffn_hidden": config.whole("intermediate_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", gemma),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qkv_bias": biased or projected or model_type == "qwen2" or _has_qwen_biases(config, model_type),
        "proj_bias": projected,
        "sinks": model_type == GPT_OSS,
        "linear_bias": biased,
        "qk_norm": model_type in ("qwen3", "qwen3_moe", GEMMA3),
        "activation": "gelu_tanh" if gemma else "silu",
        "query_scalar": query_scalar(config, head_dim) if gemma else 0.0,
        "latent": latent,
        **dict.fromkeys(("post_norms", "scaled_embeddings", "norms_from_one"), gemma),
        "experts": routed_experts(config, model_type) if model_type in WITH_EXPERTS else None,
    }


def _has_qwen_biases(config: Config, model_type: str) -> bool:
    """Return whether a Qwen2-MoE has biases on Q, K and V; other types have no such field."""
    return model_type == "qwen2_moe" and config.flag("qkv_bias", True)


def _all_biased(config: Config, model_type: str) -> bool:
    """Return whether every product has a bias. Allowed: all biases, none, those of Q, K and V (Qwen2), of attention."""
    if model_type in ("qwen2", "qwen2_moe", GPT_OSS):
        return False
    attention, ffn = config.flag("attention_bias", False), model_type == "llama" and config.flag("mlp_bias", False)
    if attention != ffn:
        key = "attention_bias" if attention else "mlp_bias"
        raise config.refusal(key, "biases on only some of the products are not modelled", wanted="false")
    return attention
