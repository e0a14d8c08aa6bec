"""What configs may ask for that memo does not model, and the refusals of it."""

from __future__ import annotations

from typing import Any

from memo_sim.contract.huggingface_types.config import Config
from memo_sim.contract.huggingface_types.kinds import GEMMA3, WITH_EXPERTS, WITH_LATENT

EXPERTS = "mixtures of experts"

LATENT = "latent attention"

_WITH_KEYS = {
    EXPERTS: ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok"),
    "a model inside a model": ("text_config", "vision_config", "audio_config"),
    LATENT: ("kv_lora_rank", "q_lora_rank"),
    "state-space layers": ("state_size", "ssm_cfg", "mamba_d_ssm", "mamba_d_state", "linear_num_value_heads"),
    "soft-capped logits": ("attn_logit_softcapping", "final_logit_softcapping"),
    "layers without positions": ("no_rope_layers",),
    "scaled embeddings, residuals, scores or logits": (
        *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "logit_scale"),
        *("query_pre_attn_scalar", "scale_emb", "scale_depth"),
    ),
    "clipped or normalised queries and keys": ("clip_qkv", "use_qk_norm", "qk_layernorm"),
}
"""What memo does not model, and the fields that ask for it where they are neither null, false, zero nor one."""

_ALLOWED = {GEMMA3: ("query_pre_attn_scalar",)}
"""Fields of ``_WITH_KEYS`` that are modelled in one type."""

_BY_TYPE = {
    "bert": "an encoder",
    "bloom": "positions as slopes (ALiBi)",
    "cohere": "attention and FFN side by side, LayerNorm without bias",
    "cohere2": "attention and FFN side by side, layers without positions",
    "falcon": "attention and FFN side by side",
    "gemma": "scaled embeddings, FFNs gated by GELU",
    "gpt_neox": "attention and FFN side by side, rotary positions on a part of a head",
    "gptj": "attention and FFN side by side",
    "olmo2": "norms behind attention and FFN",
    "olmo3": "norms behind attention and FFN",
    "phi": "attention and FFN side by side, rotary positions on a part of a head",
    "t5": "an encoder-decoder",
}
"""What memo does not model of types whose fields do not show it."""

_NEUTRAL: tuple[Any, ...] = (None, 0, 1, {})


def refuse_unmodelled(config: Config, model_type: str) -> None:
    """Refuse nested models, encoder-decoders, and what ``_WITH_KEYS`` names; experts where the type has none."""
    if config.given("text_config") is not None:
        hint = "save the object under text_config as its own config.json"
        raise config.refusal("text_config", "a model inside a model is not supported", hint=hint)
    if config.flag("is_encoder_decoder", False):
        raise config.refusal("is_encoder_decoder", "only decoders are modelled", wanted="false")
    for what, keys in _WITH_KEYS.items():
        own = {EXPERTS: (*WITH_EXPERTS, *WITH_LATENT), LATENT: WITH_LATENT}.get(what, ())
        for key in keys if model_type not in own else ():
            if key not in _ALLOWED.get(model_type, ()) and _asks_for(config.given(key)):
                text = f"not modelled: {what}" + (" in a model of this type" if what == EXPERTS else "")
                raise config.refusal(key, text, wanted="no such key, or its neutral value")


def _asks_for(value: Any) -> bool:
    """Whether a field asks for what it is about; a list does where one of its values is not 1."""
    if isinstance(value, bool):
        return value
    if isinstance(value, list):
        return any(each not in (1, True) for each in value)
    return value not in _NEUTRAL


def unmodelled(config: Config) -> list[str]:
    """Return what a config of another type has that memo does not model, each with the fields that say so."""
    fields = config.fields
    found = [
        f"{what} ({', '.join(given)})"
        for what, keys in _WITH_KEYS.items()
        if (given := [key for key in keys if _asks_for(fields.get(key))])
    ]
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and (others := sorted({str(kind)[:40] for kind in kinds} - {"full_attention"})):
        found.append(f"layers of {', '.join(others[:4])} (layer_types)")
    elif fields.get("sliding_window") and fields.get("use_sliding_window", True):
        found.append("sliding windows (sliding_window)")
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        found.append("rotary positions on a part of a head (partial_rotary_factor)")
    named = _BY_TYPE.get(str(fields.get("model_type")))
    return [*found, *([named] if named else [])]
