"""The fields about latent attention and experts of DeepSeek-V2 and V3, read and written."""

from __future__ import annotations

from math import log
from typing import Any

from msgspec.structs import replace

from memo_sim.contract.experts import Experts
from memo_sim.contract.huggingface_types.config import Config
from memo_sim.contract.latent_attention import LatentAttention
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.units import MOST_EXPERTS

_OF_DEEPSEEK_EXPERTS = (
    *("moe_intermediate_size", "num_experts_per_tok", "n_shared_experts", "n_group", "topk_group", "topk_method"),
    *("moe_layer_freq", "norm_topk_prob", "routed_scaling_factor", "scoring_func"),
)

_ROUTERS = {True: ("noaux_tc", "sigmoid"), False: ("greedy", "softmax")}
"""The routers of a DeepSeek-V3 and of a V2 that memo models: how experts are chosen, and by which scores."""


def latent_attention(config: Config, model_type: str) -> LatentAttention:
    """Return the latent attention of a DeepSeek-V2 or V3.

    Raises:
        BadInput: when a field is missing or wrong.
    """
    config.given("head_dim")  # transformers writes that of the rotary part
    return LatentAttention(
        q_rank=config.whole("q_lora_rank") if config.given("q_lora_rank") is not None else 0,
        kv_rank=config.whole("kv_lora_rank"),
        nope_dim=config.whole("qk_nope_head_dim"),
        rope_dim=config.whole("qk_rope_head_dim"),
        value_dim=config.whole("v_head_dim"),
        interleaved=model_type == "deepseek_v2" or config.flag("rope_interleave", True),
        score_scale=_score_scale(config),
    )


def _score_scale(config: Config) -> float:
    """Return the factor on scores of yarn with ``mscale_all_dim`` (transformers, ``yarn_apply_mscale``)."""
    table = config.part("rope_scaling" if config.given("rope_scaling") else "rope_parameters")
    kind = table.text("rope_type" if "rope_type" in table.fields else "type", "default")
    weight = table.number("mscale_all_dim", 0.0, least=0.0)
    if kind == "default" or not weight:
        return 1.0
    factor = table.number("factor", least=1.0)
    return (0.1 * weight * log(factor) + 1.0) ** 2


def with_deepseek_experts(config: Config, model: Model) -> Model:
    """Return a DeepSeek-V2 or V3 with experts in every layer behind the first ``first_k_dense_replace``."""
    dense = config.given("first_k_dense_replace")
    if config.given("n_routed_experts") is None or (isinstance(dense, int) and dense >= model.layers):
        for key in _OF_DEEPSEEK_EXPERTS:
            config.given(key)  # no layer has experts
        return model
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
        raise config.refusal("first_k_dense_replace", "a wrong value", wanted="a number of layers")
    if config.whole("moe_layer_freq", 1) != 1:
        raise config.refusal("moe_layer_freq", "layers without experts behind the first are not modelled", wanted="1")
    shape = LayerShape(ffn_hidden=model.ffn_hidden)
    routed = replace(shape, experts=_deepseek_experts(config))
    return model.of_layers([shape] * dense + [routed] * (model.layers - dense))


def _deepseek_experts(config: Config) -> Experts:
    """Return the experts of a DeepSeek-V3, or of a DeepSeek-V2 whose router has no groups (V2-Lite).

    No field says at which rate the selection bias moves; 0 leaves it as it is.
    """
    third = config.text("model_type", "") == "deepseek_v3"
    for key, wanted in zip(("topk_method", "scoring_func"), _ROUTERS[third], strict=True):
        if config.text(key, wanted) != wanted:
            raise config.refusal(key, "this router is not modelled in a model of this type", wanted=wanted)
    hidden = config.whole("moe_intermediate_size")
    return Experts(
        count=config.whole("n_routed_experts", most=MOST_EXPERTS),
        per_token=config.whole("num_experts_per_tok", most=MOST_EXPERTS),
        hidden=hidden,
        renormalize=config.flag("norm_topk_prob", third),
        scores="sigmoid" if third else "softmax",
        scale=config.number("routed_scaling_factor", 2.5 if third else 1.0),
        groups=config.whole("n_group", 1, most=MOST_EXPERTS) if third else 1,
        groups_per_token=config.whole("topk_group", 1, most=MOST_EXPERTS) if third else 1,
        selection_bias=third,
        shared=hidden * config.whole("n_shared_experts", most=MOST_EXPERTS),
    )


def latent_fields(model: Model) -> dict[str, Any]:
    """Return the fields about latent attention in a DeepSeek-V3's ``config.json``; nothing without a latent."""
    if (latent := model.latent) is None:
        return {}
    return {
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "head_dim": latent.rope_dim,
        "rope_interleave": latent.interleaved,
        "attention_bias": False,
        "first_k_dense_replace": model.layers,
    }


def deepseek_expert_fields(model: Model, experts: Experts) -> dict[str, Any]:
    """Return the fields about experts in a DeepSeek-V3's ``config.json``."""
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.hidden,
        "n_shared_experts": experts.shared // experts.hidden,
        "first_k_dense_replace": sum(model.layer(number).experts is None for number in range(model.layers)),
        "moe_layer_freq": 1,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": experts.renormalize,
        "routed_scaling_factor": experts.scale,
    }
