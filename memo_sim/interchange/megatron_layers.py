"""Experts, latent attention, windows and sinks in the words of Megatron's configuration, to and from a model.

Sources, in NVIDIA/Megatron-LM@d98e8a6: ``core/transformer/transformer_config.py`` (``TransformerConfig``,
``MLATransformerConfig``), ``core/transformer/moe/moe_utils.py`` (``topk_routing_with_score_function``,
``group_limited_topk``), ``core/transformer/utils.py`` (``is_layer_window_attention``),
``core/transformer/multi_latent_attention.py``, ``training/argument_utils.py``.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log, sqrt
from typing import Any

import msgspec

from memo_sim.contract.errors import UsageError
from memo_sim.contract.experts import Experts
from memo_sim.contract.latent_attention import LatentAttention
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.contract.rope_scaling import RopeScaling
from memo_sim.interchange.megatron_configuration import Configuration
from memo_sim.interchange.model_parts import gemma_parts

Settings = dict[str, Any]
PATTERNS = ("moe_layer_freq", "window_attn_skip_freq")
"""Fields that hold a 1 or a 0 for every layer; the command line takes them as a sum of lists."""
CLAMPED = {"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}
"""GPT-OSS's activation, beside the quick gelu."""
_YARN_ORIGINAL = 4096
"""Positions that YaRN starts from under latent attention; the command line has no option of it there."""
_MOST_LAYERS = 10_000


# -- writing -----------------------------------------------------------------------------------------------------------


def check_layers(decisions: Decisions) -> None:
    """Refuse a model whose layers Megatron's options cannot say.

    Raises:
        UsageError: naming what they cannot say.
    """
    model, of = decisions.model, decisions.model.mixture
    if unwritten := gemma_parts(model):
        raise _unsayable("model", f"{model.name} has {', '.join(unwritten)}", "Llama's or GPT's layers, without them")
    shapes = [model.layer(number) for number in range(model.layers)]
    if len({shape.ffn_hidden for shape in shapes if shape.experts is None}) > 1:
        raise _unsayable(
            "model.layer_pattern", f"{model.name}, whose MLPs differ in width", "a model whose layers are alike there"
        )
    if len({shape.window for shape in shapes if shape.window}) > 1:
        raise _unsayable("model.layer_pattern", f"{model.name}, with windows of several lengths", "windows of one")
    if any(shape.rope_theta not in (0, model.rope_theta) for shape in shapes):
        raise _unsayable("model.layer_pattern", f"{model.name}, whose layers rotate differently", "one rope_theta")
    if of is not None:
        _check_router(decisions, of)
    elif model.proj_bias and not model.linear_bias:
        got = "a bias of the attention projection alone"
        raise _unsayable("model.proj_bias", got, "biases of all products, or of none (--disable-bias-linear)")
    if model.latent is not None:
        _check_latent(model, model.latent)


def _check_router(decisions: Decisions, of: Experts) -> None:
    model = decisions.model
    softmax = of.scores == "softmax"
    if of.groups > 1 and (of.per_token // of.groups_per_token != 2 or (softmax and of.renormalize)):
        got = f"{of.groups_per_token} of {of.groups} groups for {of.per_token} experts of a token, {of.scores} scores"
        wanted = "a group's score of two experts: twice as many experts of a token as groups, from sigmoid scores"
        raise _unsayable("model.experts.groups", got, wanted)
    if of.selection_bias and softmax:
        raise _unsayable("model.experts.selection_bias", "a selection bias on softmax scores", "sigmoid scores")
    if not softmax and of.renormalize != (of.per_token > 1):
        got = f"sigmoid scores {'' if of.renormalize else 'not '}divided by their sum, {of.per_token} of a token"
        raise _unsayable("model.experts.renormalize", got, "scores divided by their sum, of several experts of a token")
    if softmax and of.renormalize and of.per_token == 1:
        wanted = "renormalize false (--moe-router-pre-softmax), or several experts of a token"
        raise _unsayable("model.experts.renormalize", "probabilities of one expert divided by their sum", wanted)
    biases = {of.bias, of.router_bias, model.proj_bias}
    if len(biases) > 1 or (of.bias and not (model.qkv_bias and all(shape.experts for shape in model.layer_shapes))):
        wanted = "biases of all products of every layer, or of none (--disable-bias-linear)"
        raise _unsayable("model.experts.bias", "biases of some products, or beside layers without experts", wanted)
    if of.bias and decisions.layout.tp > 1 and decisions.layout.expert_tp != 1:
        got = f"tp {decisions.layout.tp} of experts with biases"
        raise _unsayable("layout.tp", got, "tp 1, or --expert-tp 1: it has no biases of divided experts")


def _check_latent(model: Model, latent: LatentAttention) -> None:
    if not latent.interleaved:
        raise _unsayable("model.latent.interleaved", "false", "neighbouring rotary pairs, as in DeepSeek's weights")
    scaling = model.rope_scaling
    if scaling is None:
        known = latent.score_scale == 1
    else:
        yarn = RopeScaling(kind="yarn", original_max_positions=_YARN_ORIGINAL)
        varied = msgspec.structs.replace(yarn, factor=scaling.factor, attention_factor=scaling.attention_factor)
        known = scaling == varied and scaling.factor > 1
    if not known:
        raise _unsayable(
            "model.rope_scaling",
            f"{scaling.kind if scaling else 'no'} scaling, score_scale {latent.score_scale:g}",
            f"none and 1, or yarn over {_YARN_ORIGINAL} positions with betas 32 and 1",
        )


def _unsayable(where: str, got: str, wanted: str) -> UsageError:
    return UsageError(
        "Megatron's options cannot say these layers",
        where=where,
        got=got,
        wanted=wanted,
        hint="memo-exec runs the plan itself",
    )


def plain_layers(model: Model) -> Model:
    """Return a model with its layers in the shortest pattern, as ``read_layers`` finds them again."""
    if not model.layer_pattern:
        return model
    shapes = [model.layer(number) for number in range(model.layers)]
    dense = next((shape.ffn_hidden for shape in shapes if shape.experts is None), model.ffn_hidden)
    return model.of_layers([msgspec.structs.replace(shape, ffn_hidden=dense, rope_theta=0.0) for shape in shapes])


def settings_of_layers(model: Model) -> Settings:
    """Return what the configuration says about experts, latents, windows, sinks and YaRN."""
    shapes, said = [model.layer(number) for number in range(model.layers)], Settings()
    if model.mixture is not None:
        said |= _of_experts(model.mixture)
        spread = [int(shape.experts is not None) for shape in shapes]
        if not all(spread):
            said["moe_layer_freq"] = spread
    if window := max(shape.window for shape in shapes):
        said["window_size"] = (window - 1, 0)
        skipped = [int(shape.window > 0) for shape in shapes]
        if not all(skipped):
            said["window_attn_skip_freq"] = skipped
    if model.sinks:
        said["softmax_type"] = "learnable"
    if model.latent is not None:
        said |= _of_latent(model, model.latent)
    elif model.rope_scaling is not None and model.rope_scaling.kind == "yarn":
        said |= _of_yarn(model.rope_scaling)
    return said


def _of_experts(of: Experts) -> Settings:
    said: Settings = {
        "num_moe_experts": of.count,
        "moe_router_topk": of.per_token,
        "moe_ffn_hidden_size": of.hidden,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if of.balance else "none",
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }
    if of.balance:
        said["moe_aux_loss_coeff"] = of.balance
    if of.z_loss:
        said["moe_z_loss_coeff"] = of.z_loss
    if of.scores == "sigmoid":
        said["moe_router_score_function"] = "sigmoid"
    elif not of.renormalize:
        said["moe_router_pre_softmax"] = True
    if of.scale != 1:
        said["moe_router_topk_scaling_factor"] = of.scale
    if of.groups > 1:
        said |= {"moe_router_num_groups": of.groups, "moe_router_group_topk": of.groups_per_token}
    if of.selection_bias:
        said |= {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": of.selection_rate}
    if of.shared:
        said["moe_shared_expert_intermediate_size"] = of.shared
    if of.shared_gate:
        said["moe_shared_expert_gate"] = True
    if of.activation == "clamped":
        said |= {"quick_geglu": True, **CLAMPED}
    return said


def _of_latent(model: Model, latent: LatentAttention) -> Settings:
    said: Settings = {
        "multi_latent_attention": True,
        **({"q_lora_rank": latent.q_rank} if latent.q_rank else {}),
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "qk_layernorm": True,  # there the norms of latents
        "rope_type": "rope",
        "apply_rope_fusion": False,  # has YaRN alone
    }
    if (scaling := model.rope_scaling) is not None:
        said |= {"rope_type": "yarn", "apply_rope_fusion": True, "rotary_scaling_factor": scaling.factor}
        growth, root = 0.1 * log(scaling.factor), sqrt(latent.score_scale)
        said["mscale"] = _rounded((scaling.attention_factor * root - 1) / growth)
        said["mscale_all_dim"] = _rounded((root - 1) / growth)
    return said


def _of_yarn(scaling: RopeScaling) -> Settings:
    return {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": scaling.factor,
        "yarn_original_max_position_embeddings": scaling.original_max_positions,
        "yarn_beta_fast": scaling.beta_fast,
        "yarn_beta_slow": scaling.beta_slow,
        "yarn_correction_range_round_to_int": scaling.truncate,
        "mscale": _rounded((scaling.attention_factor - 1) / (0.1 * log(scaling.factor))) if scaling.factor > 1 else 1.0,
        "mscale_all_dim": 0.0,
    }


def _rounded(value: float) -> float:
    return round(value, 9) + 0.0  # no negative zero


def pattern_text(spread: Sequence[int]) -> str:
    """Return a 1 or a 0 for every layer as the command line takes it: ``([0]*3+[1]*58)``."""
    period = next(n for n in range(1, len(spread) + 1) if not len(spread) % n and list(spread[n:]) == list(spread[:-n]))
    runs = "+".join(f"[{bit}]*{len(list(run))}" for bit, run in groupby(spread[:period]))
    times = len(spread) // period
    return f"({runs})*{times}" if times > 1 else f"({runs})"


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values of latent attention that a file does not say: those of the command line, or of the configuration."""

    q_rank: int
    kv_rank: int
    factor: float


OF_THE_COMMAND_LINE = Defaults(q_rank=0, kv_rank=32, factor=1.0)
"""Those of Megatron-LM's options."""
OF_THE_CLASS = Defaults(q_rank=512, kv_rank=512, factor=40.0)
"""Those of ``MLATransformerConfig``, which Megatron-Bridge's provider has."""


def read_experts(config: Configuration, ffn_hidden: int, *, biased: bool) -> Experts | None:
    """Return the experts of the layers that have them; None without any.

    ``ffn_hidden``: the width of a dense MLP, which experts have by default. ``biased``: whether products have biases.

    Raises:
        BadInput: when a value is none that memo has.
    """
    count = config.whole("num_moe_experts", 0, least=0)
    if not count:
        return None
    names = [name for name in config.values if name.startswith(("moe_", "num_moe_experts"))]
    scores = config.text("moe_router_score_function", "softmax")
    if scores not in ("softmax", "sigmoid"):
        raise config.bad("moe_router_score_function", "softmax or sigmoid")
    topk, groups = config.whole("moe_router_topk", 2) or 2, config.whole("moe_router_group_topk", 0, least=0) or 0
    most = config.whole("moe_router_num_groups", 1) or 1
    before = config.flag("moe_router_pre_softmax")
    if groups and (topk // groups != 2 or scores == "softmax"):
        config.assumed.append("a group's score is the sum of its two best experts': memo has no other, at equal cost")
    balance, z_loss = _balance(config), config.number("moe_z_loss_coeff", 0.0)
    if scores == "sigmoid" and (balance or z_loss):
        config.assumed.append("losses of the router are left out: memo has them for softmax scores, and they are short")
        balance = z_loss = 0.0
    if config.text("moe_router_dtype") not in ("fp32", "torch.float32"):
        config.assumed.append("the router's product is priced in fp32")
    if not config.flag("moe_grouped_gemm"):
        config.assumed.append("the products of all experts of a rank are priced as one grouped product")
    picked = config.flag("moe_router_enable_expert_bias")
    rate = config.number("moe_router_bias_update_rate", 1e-3)
    shared = config.whole("moe_shared_expert_intermediate_size", 0, least=0) or 0
    found = Experts(
        count=count,
        per_token=topk,
        hidden=config.whole("moe_ffn_hidden_size", ffn_hidden) or ffn_hidden,
        renormalize=topk > 1 if scores == "sigmoid" else not before,
        balance=balance,
        z_loss=z_loss,
        scores="sigmoid" if scores == "sigmoid" else "softmax",
        scale=config.number("moe_router_topk_scaling_factor", 1.0) or 1.0,
        groups=most if groups else 1,
        groups_per_token=groups or 1,
        selection_bias=picked,
        selection_rate=rate if picked else 0.0,
        router_bias=biased,
        bias=biased,
        activation="clamped" if _is_clamped(config) else "silu",
        shared=shared,
        shared_gate=bool(shared) and config.flag("moe_shared_expert_gate"),
    )
    config.say(tuple(name for name in names if name in config.taken), "the model's experts")
    return found


def _is_clamped(config: Configuration) -> bool:
    if not config.flag("quick_geglu"):
        return False
    own = {name: config.number(name, 0.0) for name in CLAMPED}
    config.say(("quick_geglu", *CLAMPED), "the activation of experts")
    if own != CLAMPED:
        config.assumed.append("the experts' activation is priced as GPT-OSS's, clamped at 7 with an offset of 1")
    return True


def _balance(config: Configuration) -> float:
    """Return the coefficient of the loss that evens out loads, of whatever kind."""
    kinds = config.texts("moe_router_load_balancing_type") or ["aux_loss"]
    given = [_float(text) for text in config.texts("moe_aux_loss_coeff")] or [0.0]
    weights = dict(zip(kinds, given * (len(kinds) if len(given) == 1 else 1), strict=False))
    balance = sum(weight for kind, weight in weights.items() if kind.endswith("aux_loss"))
    if balance and any(kind != "aux_loss" for kind, weight in weights.items() if weight):
        config.assumed.append("the loss that evens out loads is priced as that of each micro-batch (aux_loss)")
    if {"sinkhorn", "quantile_balancing"}.intersection(kinds):
        config.assumed.append(f"the router's {kinds[0]} is not priced: experts are the best by score")
    return balance


def _float(text: str) -> float:
    try:
        return max(float(text), 0.0)
    except ValueError:
        return 0.0


def read_latent(config: Configuration, defaults: Defaults) -> tuple[LatentAttention | None, RopeScaling | None]:
    """Return the latent attention that every layer has, with its scaling of positions; None without it."""
    if not config.flag("multi_latent_attention"):
        return None, None
    names = (
        *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        *("rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow"),
    )
    if not config.flag("qk_layernorm"):
        config.assumed.append("latents are priced with their norms (--qk-layernorm)")
    factor = config.number("rotary_scaling_factor", defaults.factor)
    weight, over_all = config.number("mscale", 1.0), config.number("mscale_all_dim", 0.0)
    stretched = config.text("rope_type", "yarn") == "yarn" and factor > 1
    scaling = RopeScaling(
        kind="yarn",
        factor=max(factor, 1.0),
        original_max_positions=config.whole("original_max_position_embeddings", _YARN_ORIGINAL) or _YARN_ORIGINAL,
        beta_fast=config.number("beta_fast", 32.0),
        beta_slow=config.number("beta_slow", 1.0),
        attention_factor=_growth(factor, weight) / _growth(factor, over_all),
    )
    latent = LatentAttention(
        q_rank=config.whole("q_lora_rank", defaults.q_rank, least=0) or 0,
        kv_rank=config.whole("kv_lora_rank", defaults.kv_rank) or defaults.kv_rank,
        nope_dim=config.whole("qk_head_dim", 128) or 128,
        rope_dim=config.whole("qk_pos_emb_head_dim", 64) or 64,
        value_dim=config.whole("v_head_dim", 128) or 128,
        score_scale=_growth(factor, over_all) ** 2,
    )
    config.taken |= {"kv_channels", "mla_down_proj_fusion"}
    config.say((*names, "kv_channels"), "the model's latent attention")
    return latent, scaling if stretched else None


def read_yarn(config: Configuration) -> RopeScaling:
    """Return the scaling of ``position_embedding_type`` yarn outside of latent attention."""
    factor = config.number("rotary_scaling_factor", 1.0)
    names = ("rotary_scaling_factor", "mscale", "mscale_all_dim", *_YARN)
    config.say(tuple(dict.fromkeys(names)), "the model's rotary tables")
    ratio = _growth(factor, config.number("mscale", 1.0)) / _growth(factor, config.number("mscale_all_dim", 0.0))
    return RopeScaling(
        kind="yarn",
        factor=max(factor, 1.0),
        original_max_positions=config.whole("yarn_original_max_position_embeddings", 4096) or 4096,
        beta_fast=config.number("yarn_beta_fast", 32.0),
        beta_slow=config.number("yarn_beta_slow", 1.0),
        truncate=config.flag("yarn_correction_range_round_to_int", default=True),
        attention_factor=ratio,
    )


_YARN = (
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_correction_range_round_to_int",
)


def _growth(factor: float, weight: float) -> float:
    """Return YaRN's factor on scores (``_yarn_get_mscale``)."""
    return 0.1 * weight * log(factor) + 1 if factor > 1 else 1.0


def read_layers(config: Configuration, model: Model, experts: Experts | None) -> Model:
    """Return the model with the layers that have experts, and those that have a window.

    Raises:
        BadInput: when a pattern is not as long as the model.
    """
    left, right = _window(config)
    if experts is None and not left:
        return model
    dense = _layers(config, "moe_layer_freq", model.layers) if experts else None
    skipped = _layers(config, "window_attn_skip_freq", model.layers) if left else None
    if left:
        if right > 0:
            config.assumed.append("windows are priced as causal, without later tokens")
        config.say(("window_size", "window_attn_skip_freq"), f"windows of {left} tokens")
    config.say(("moe_layer_freq",), "which layers have experts")
    shapes = [
        LayerShape(
            ffn_hidden=model.ffn_hidden,
            experts=experts if dense is None or dense[number] else None,
            window=left if left and (skipped is None or skipped[number]) else 0,
        )
        for number in range(model.layers)
    ]
    return model.of_layers(shapes)


def _window(config: Configuration) -> tuple[int, int]:
    """Return the keys that a token of a window sees, its own among them, and those behind it; 0: no window."""
    texts = config.texts("window_size")
    if not texts or texts[0].lower() in ("none", "null"):
        return 0, 0
    try:
        left, right = (int(text) for text in texts)
    except ValueError:
        raise config.bad("window_size", "two numbers, as (127,0)") from None
    return left + 1 if left >= 0 else 0, right


def _layers(config: Configuration, name: str, layers: int) -> list[int] | None:
    """Return a 1 or a 0 for every layer; None where all are alike."""
    if not config.has(name):
        config.taken.add(name)
        return None
    value = config.raw(name)
    every = value if isinstance(value, int) else None
    if isinstance(value, list | tuple):
        spread: list[int] = [int(bit) for bit in value]
    else:
        text = str(value).strip("'\" ")
        every = int(text) if text.isdigit() else every
        spread = [] if every else _evaluated(text)
    if every is not None:
        first = name == "moe_layer_freq"  # 1:N begins with experts, and (N-1):1 ends without a window
        spread = [int((n % every == 0) if first else (n + 1) % every != 0) for n in range(layers if every else 0)]
    if len(spread) != layers:
        raise config.bad(name, f"a number, or a 1 or 0 for each of the {layers} layers, as ([0]*3+[1]*58)")
    return spread if not all(spread) else None


def _evaluated(text: str) -> list[int]:
    """Return the list that a sum and products of lists are; [] where the text is something else."""
    try:
        found = _value(ast.parse(text[:2000], mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return found if isinstance(found, list) else []


def _value(node: ast.expr) -> list[int] | int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        bits = [_value(each) for each in node.elts]
        return [bit for bit in bits if isinstance(bit, int)]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return (left + right)[:_MOST_LAYERS]
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            return left * min(right, _MOST_LAYERS // max(len(left), 1))
    raise ValueError(ast.dump(node))
