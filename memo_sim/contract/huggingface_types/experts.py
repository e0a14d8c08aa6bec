"""The fields about the experts of a Mixtral, Qwen-MoE or GPT-OSS, read and written."""

from __future__ import annotations

from typing import Any

from memo_sim.contract.experts import Experts
from memo_sim.contract.huggingface_types.config import Config
from memo_sim.contract.huggingface_types.deepseek import deepseek_expert_fields
from memo_sim.contract.huggingface_types.kinds import GPT_OSS, QWEN_MOE
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.units import MOST_EXPERTS, MOST_LAYERS

CLAMPED = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""The limit and the slope of GPT-OSS's activation (``Experts.activation``), which memo knows no others of."""


def routed_experts(config: Config, model_type: str) -> Experts:
    """Return the experts of a Mixtral, Qwen-MoE or GPT-OSS, which every layer has."""
    balanced = config.flag("output_router_logits", False)
    balance = config.number("router_aux_loss_coef", 0.001, least=0.0)
    if config.number("router_jitter_noise", 0.0, least=0.0):
        raise config.refusal("router_jitter_noise", "noise on the router's input is not modelled", wanted="0")
    qwen, oss = model_type in QWEN_MOE, model_type == GPT_OSS
    gated = model_type == "qwen2_moe"
    for key, value in CLAMPED.items() if oss else ():
        if config.number(key, value) != value:
            raise config.refusal(key, "this activation of experts is not modelled", wanted=f"{value:g}")
    count = "num_experts" if qwen and "num_experts" in config.fields else "num_local_experts"
    return Experts(
        count=config.whole(count, most=MOST_EXPERTS),
        per_token=config.whole("num_experts_per_tok", most=MOST_EXPERTS),
        hidden=config.whole("moe_intermediate_size" if qwen else "intermediate_size"),
        renormalize=config.flag("norm_topk_prob", False) if qwen else True,
        balance=balance if balanced else 0.0,
        router_bias=oss,
        bias=oss,
        activation="clamped" if oss else "silu",
        shared=config.whole("shared_expert_intermediate_size") if gated else 0,
        shared_gate=gated,
    )


def with_dense_layers(config: Config, model: Model) -> Model:
    """Return a Qwen-MoE with an MLP in place of experts in ``mlp_only_layers`` and between every N-th layer."""
    step, dense = config.whole("decoder_sparse_step", 1, most=MOST_LAYERS), config.given("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(each, int) or isinstance(each, bool) for each in dense):
        raise config.refusal("mlp_only_layers", "a wrong value", wanted="a list of numbers of layers")
    shapes = [
        LayerShape(
            ffn_hidden=model.ffn_hidden,
            experts=model.experts if number not in dense and (number + 1) % step == 0 else None,
        )
        for number in range(model.layers)
    ]
    if not any(shape.experts for shape in shapes):
        raise config.refusal("mlp_only_layers", "no layer has experts", wanted="fewer layers, or a Qwen3")
    return model.of_layers(shapes)


def expert_fields(model: Model, kind: str) -> dict[str, Any]:
    """Return the fields about experts in the ``config.json`` of a model type."""
    experts = model.mixture
    assert experts is not None
    if kind == "deepseek_v3":
        return deepseek_expert_fields(model, experts)
    shared = {
        "num_experts_per_tok": experts.per_token,
        "output_router_logits": experts.balance > 0,
        "router_aux_loss_coef": experts.balance,
    }
    if kind == GPT_OSS:
        limits = {"swiglu_limit": CLAMPED["swiglu_limit"], "swiglu_alpha": CLAMPED["swiglu_alpha"]}
        return shared | limits | {"num_local_experts": experts.count, "intermediate_size": experts.hidden}
    if kind == "mixtral":
        own = {"num_local_experts": experts.count, "intermediate_size": experts.hidden}
        return shared | own
    if kind == "qwen2_moe":
        shared |= {"shared_expert_intermediate_size": experts.shared, "qkv_bias": model.qkv_bias}
    return shared | {
        "num_experts": experts.count,
        "moe_intermediate_size": experts.hidden,
        "norm_topk_prob": experts.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [number for number in range(model.layers) if model.layer(number).experts is None],
    }
