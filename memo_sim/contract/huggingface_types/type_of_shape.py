"""Which of Hugging Face's model types has the shape of a model."""

from __future__ import annotations

import msgspec

from memo_sim.contract.experts import Experts
from memo_sim.contract.huggingface_types.kinds import GEMMA3, GPT_OSS
from memo_sim.contract.huggingface_types.rotary_tables import yarn_of
from memo_sim.contract.latent_attention import LatentAttention
from memo_sim.contract.model import Model


def type_of(model: Model) -> str | None:
    """Return the model type, or None.

    BERT is none: its norms come after the residual sums, ours before the matrix products. Models with MLPs that differ
    (OpenELM, Nemotron-NAS) are outside of transformers.
    """
    gemma = (model.post_norms, model.scaled_embeddings, model.norms_from_one)
    if model.bidirectional or model.sinks or not _windows_have_a_type(model):
        return GPT_OSS if _is_gpt_oss(model) else None
    if model.family == "gpt":
        square = model.heads == model.kv_heads and model.q_width == model.hidden
        plain = model.learned_positions and model.qkv_bias and model.linear_bias and not model.qk_norm
        return "gpt2" if plain and square and not _feeds_differ(model) and not any(gemma) else None
    if any(gemma) or model.query_scalar or model.activation == "gelu_tanh":
        whole = all(gemma) and model.activation == "gelu_tanh" and model.qk_norm and not _feeds_differ(model)
        return GEMMA3 if whole and not model.qkv_bias and not model.proj_bias else None
    if model.proj_bias and not model.linear_bias:
        return None
    return _gated_type(model)


def _gated_type(model: Model) -> str | None:
    """Return the type of a model of Llama's kind, with or without experts and latents."""
    if model.latent is not None:
        return _latent_type(model, model.latent)
    if model.mixture is not None:
        return _type_with_experts(model, model.mixture)
    return None if _feeds_differ(model) else _dense_type(model)


def _latent_type(model: Model, latent: LatentAttention) -> str | None:
    """Return the model type of a model with latent attention, or None."""
    scaled = latent.score_scale == 1 or yarn_of(model) is not None
    fits = _has_deepseek_experts(model, model.mixture) if model.mixture else not _feeds_differ(model)
    return "deepseek_v3" if scaled and fits else None


def _has_deepseek_experts(model: Model, experts: Experts) -> bool:
    """Return whether the first layers have MLPs, and all others the experts of a DeepSeek-V3."""
    sizes = ("count", "per_token", "hidden", "renormalize", "scale", "groups", "groups_per_token", "selection_rate")
    named = {name: getattr(experts, name) for name in (*sizes, "shared")}
    own = Experts(**named, scores="sigmoid", selection_bias=True)
    having = [model.layer(number).experts is not None for number in range(model.layers)]
    whole = experts.shared > 0 and experts.shared % experts.hidden == 0
    return experts == own and whole and _is_mixed(model) and having == sorted(having)


def _is_gpt_oss(model: Model) -> bool:
    """Return whether a model has the shape of a GPT-OSS."""
    if (experts := model.mixture) is None or not model.sinks:
        return False
    sizes = {name: getattr(experts, name) for name in ("count", "per_token", "hidden", "balance")}
    own = Experts(**sizes, router_bias=True, bias=True, activation="clamped")
    windows = {shape.window for shape in model.layer_shapes if shape.window}
    alike = all(shape.experts == own and not shape.rope_theta for shape in model.layer_shapes)
    plain = not (model.qk_norm or model.query_scalar or model.scaled_embeddings or model.norms_from_one)
    biased = model.qkv_bias == model.proj_bias and not model.linear_bias
    return alike and plain and biased and len(windows) <= 1 and model.ffn_hidden == experts.hidden


def _type_with_experts(model: Model, experts: Experts) -> str | None:
    if _is_mixed(model) and experts.shared_gate and not model.qk_norm and not model.windowed:
        plain = msgspec.structs.replace(experts, shared=0, shared_gate=False).of_softmax_alone
        return "qwen2_moe" if plain else None
    if not _is_mixed(model) or model.qkv_bias or not experts.of_softmax_alone:
        return None
    if model.qk_norm:
        return "qwen3_moe"
    return "mixtral" if experts.renormalize and not _feeds_differ(model) else None


def _dense_type(model: Model) -> str | None:
    """Return the type of a model of Llama's kind, whose layers differ in windows alone."""
    if model.qk_norm:
        return None if model.qkv_bias or model.linear_bias else "qwen3"
    if model.qkv_bias != model.linear_bias:
        return "qwen2" if model.qkv_bias else None
    if not model.windowed:
        return "llama"
    return "mistral" if len(model.layer_shapes) == 1 and not model.qkv_bias else None


def _windows_have_a_type(model: Model) -> bool:
    """Return whether layers have at most one window, and a rotary base of their own only as in Gemma 3."""
    windows = {shape.window for shape in model.layer_shapes if shape.window}
    own = {(bool(shape.window), shape.rope_theta) for shape in model.layer_shapes}
    based = any(theta for _, theta in own)
    if based:
        return model.post_norms and len(windows) == 1 and all(bool(theta) == window for window, theta in own)
    alike = len({shape.window for shape in model.layer_shapes}) == 1
    return len(windows) <= 1 and not (windows and (model.family == "gpt" or (model.mixture and not alike)))


def _feeds_differ(model: Model) -> bool:
    """Return whether layers differ in their MLPs."""
    return len({(shape.ffn_hidden, shape.experts) for shape in model.layer_shapes}) > 1


def _is_mixed(model: Model) -> bool:
    """Return whether layers differ in nothing else than that some have experts, all the same."""
    return len({shape.ffn_hidden for shape in model.layer_shapes}) == 1 and len(model.layer_shapes) == len(
        {(shape.experts is None, shape.window) for shape in model.layer_shapes}
    )
