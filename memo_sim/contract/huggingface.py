"""Reads a Hugging Face ``config.json`` as a ``Model``, and writes it: Llama, Mistral, Phi-3, Qwen2, Qwen3, Gemma 3's
text models, GPT-2, the mixtures of experts Mixtral, Qwen3-MoE and GPT-OSS, and DeepSeek-V3, also V2-Lite (latent
attention; V2's routers with groups are refused).

Keys that do not concern the shape are ignored. Keys that do must be present, because the class defaults of transformers
belong to no real model: Qwen3's default ``intermediate_size`` is 22016, the real 8B has 12288. Features that change the
arithmetic and are not modelled are refused by name, of other types as well: experts of other model types, rotary
positions on a part of a head, biases on some of the products, soft-capped or scaled logits.
"""

from __future__ import annotations

from math import log, sqrt
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.model import Experts, LatentAttention, LayerShape, Model, RopeScaling
from memo_sim.contract.units import MOST_EXPERTS, MOST_LAYERS, MOST_TOKENS, MOST_WIDTH

SUPPORTED = (
    *("deepseek_v2", "deepseek_v3", "gemma3_text", "gpt2", "gpt_oss", "llama", "mistral", "mixtral", "phi3", "qwen2"),
    *("qwen2_moe", "qwen3", "qwen3_moe"),
)
WITH_EXPERTS = ("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")
QWEN_MOE = ("qwen2_moe", "qwen3_moe")
WITH_LATENT = ("deepseek_v2", "deepseek_v3")
GEMMA3, GPT_OSS = "gemma3_text", "gpt_oss"
ALWAYS_WINDOWED = ("mistral", "mixtral", "phi3")
"""Types whose every layer has the window of ``sliding_window``, which no other field turns off."""
SLIDING, FULL = "sliding_attention", "full_attention"
CLAMPED = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""The limit and the slope of GPT-OSS's activation (``Experts.activation``), which memo knows no others of."""
PATTERNS = {GEMMA3: 6, GPT_OSS: 2}
"""Every how many layers one has no window, where nothing is given."""
GEMMA3_THETA, GEMMA3_LOCAL_THETA = 1_000_000.0, 10_000.0
"""The rotary bases of layers without and with a window, where none is given."""

T = TypeVar("T")

_OF_DEEPSEEK_EXPERTS = (
    *("moe_intermediate_size", "num_experts_per_tok", "n_shared_experts", "n_group", "topk_group", "topk_method"),
    *("moe_layer_freq", "norm_topk_prob", "routed_scaling_factor", "scoring_func"),
)
_ROUTERS = {True: ("noaux_tc", "sigmoid"), False: ("greedy", "softmax")}
"""The routers of a DeepSeek-V3 and of a V2 that memo models: how experts are chosen, and by which scores."""
_GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
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
_BEYOND_FLOATS = 10**300
_OF_NO_STEP = frozenset(
    (
        *("_attn_implementation", "_name_or_path", "architectures", "auto_map", "id2label", "label2id"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "layer_norm_eps"),
        *("model_type", "output_attentions", "output_hidden_states", "pretraining_tp", "return_dict"),
        *("transformers_version", "use_cache", "use_bfloat16", "task_specific_params", "summary_activation"),
        *("summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "n_ctx"),
        *("reorder_and_upcast_attn", "gradient_checkpointing", "chunk_size_feed_forward", "problem_type"),
        *("max_position_embeddings", "max_sequence_length", "predict_special_tokens", "n_special", "is_llama_config"),
        *("transformers.js_config", "unsloth_version", "tokenizer_class"),
    )
)
"""Fields that change neither the shape nor what a training step computes, so that no answer mentions them."""
_DROPOUT_KEYS = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")


def model_from_config(fields: dict[str, Any], *, where: str, name: str) -> Model:
    """Return the model that a ``config.json`` describes; ``name`` is used when the file has no name.

    Raises:
            BadInput: for an unsupported ``model_type``, a shape key that is missing or not a positive whole number, or
            a feature that is not modelled; ``where`` names the file and the key.
    """
    return _read(_Config(fields, where), name)


def not_read(fields: dict[str, Any], *, where: str) -> tuple[str, ...]:
    """Return the fields of a ``config.json`` that are ignored and may change a training step, in alphabetical order.

    Raises:
            BadInput: as ``model_from_config``.
    """
    config = _Config(fields, where)
    _read(config, "model")
    given = {key for key, value in fields.items() if value not in (None, False, {}, [])}
    return tuple(sorted(given - config.read - _OF_NO_STEP))


def _read(config: _Config, name: str) -> Model:
    fields, where = config.fields, config.where
    model_type = config.text("model_type", "")
    if model_type not in SUPPORTED:
        features = _unmodelled(config)
        raise config.refusal(
            "model_type",
            "this type of model is not supported"
            + (f", nor is what it has: {'; '.join(features)}" if features else ""),
            wanted="one of " + ", ".join(SUPPORTED),
            hint=None if features else "write its shape as a memo.model/1 file, if a model of these types has it",
        )
    _refuse_unmodelled(config, model_type)
    dropout = max((config.number(key, 0.0, least=0.0) for key in _DROPOUT_KEYS if key in fields), default=0.0)
    source = f"Hugging Face config.json of model_type {model_type}"
    try:
        model = Model(
            name=config.text("_name_or_path", "").rstrip("/").rpartition("/")[2] or name,
            vocab=config.whole("vocab_size"),
            source=source + (f"; its dropout of {dropout:g} is not applied" if dropout else ""),
            **(_gpt2(config) if model_type == "gpt2" else _rotary(config, model_type)),
        )
    except ValueError as error:
        raise BadInput(str(error), where=where) from None
    if model_type in QWEN_MOE:
        model = _with_dense_layers(config, model)
    if model_type in WITH_LATENT:
        try:
            model = _with_deepseek_experts(config, model)
        except ValueError as error:
            raise BadInput(str(error), where=where) from None
    if model_type != "gpt2":
        model = _with_windows(config, model, model_type)
    try:  # a constructor does not check types and bounds; reading the document again does
        return msgspec.json.decode(msgspec.json.encode(model), type=Model)
    except msgspec.ValidationError as error:
        raise BadInput("the config describes a model beyond all bounds", where=where, got=str(error)) from None


def model_type(model: Model) -> str:
    """Return Hugging Face's model type for a model of this shape.

    Raises:
        UsageError: when no model type has this shape.
    """
    found = _type_of(model)
    if found is not None:
        return found
    raise UsageError(
        "no model type of Hugging Face has this shape",
        got=model.name,
        wanted="a GPT-2 with learned positions and biases, a Llama, a Mistral, a Qwen2, a Qwen3, a Gemma 3, a Mixtral, "
        "a Qwen2-MoE, a Qwen3-MoE or a dense DeepSeek-V3; layers of one kind, windows aside",
        hint="use checkpoints, which can store any model",
    )


def _latent_type(model: Model, latent: LatentAttention) -> str | None:
    """Return the model type of a model with latent attention, or None."""
    scaled = latent.score_scale == 1 or _yarn_of(model) is not None
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


def _type_of(model: Model) -> str | None:
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
        plain = replace(experts, shared=0, shared_gate=False).of_softmax_alone
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


def config_of(model: Model, positions: int) -> dict[str, Any]:
    """Return the ``config.json`` of ``model``; ``positions`` is the longest sequence.

    Raises:
        UsageError: as ``model_type``.
    """
    kind = model_type(model)
    shared = {"model_type": kind, "vocab_size": model.vocab, "tie_word_embeddings": model.tied_embeddings}
    if kind == "gpt2":
        activation = {"gelu": "gelu", "gelu_tanh": "gelu_new"}[model.activation]
        return shared | {
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
    biases = {"attention_bias": model.qkv_bias, "mlp_bias": model.linear_bias} if kind == "llama" else {}
    own = _latent_of(model) | (_experts_of(model, kind) if model.mixture is not None else {})
    own |= _windows_of(model, kind)
    if kind == GPT_OSS:
        own["attention_bias"] = model.qkv_bias
    if kind == GEMMA3:
        own |= _gemma3_of(model)
    return shared | {
        "architectures": ["Gemma3ForCausalLM" if kind == GEMMA3 else f"{kind.title().replace('_', '')}ForCausalLM"],
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn_hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": _positions(model, positions),
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        "rope_theta": model.rope_theta,
        "rope_scaling": _scaling_of(model),
        **biases,
        **own,
    }


def _latent_of(model: Model) -> dict[str, Any]:
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


def _yarn_of(model: Model) -> RopeScaling | None:
    """Return the model's scaling if it is yarn's and stretches positions."""
    scaling = model.rope_scaling
    return scaling if scaling is not None and scaling.kind == "yarn" and scaling.factor > 1 else None


def _windows_of(model: Model, kind: str) -> dict[str, Any]:
    """Return the fields about windows in the ``config.json`` of a model type."""
    window = max(shape.window for shape in model.layer_shapes)
    if kind in ALWAYS_WINDOWED:
        return {"sliding_window": window or None}
    if not window and kind != GPT_OSS:
        return {}
    kinds = [SLIDING if model.layer(number).window else FULL for number in range(model.layers)]
    listed = {"sliding_window": window, "layer_types": kinds}
    if kind == "qwen3_moe":
        return {"sliding_window": window, "use_sliding_window": True}
    return listed if kind in (GEMMA3, GPT_OSS) else listed | {"use_sliding_window": True, "max_window_layers": 0}


def _gemma3_of(model: Model) -> dict[str, Any]:
    """Return the other fields of a Gemma 3's ``config.json``."""
    scalar = model.query_scalar or float(model.head_dim)
    local = next((shape.rope_theta for shape in model.layer_shapes if shape.rope_theta), model.rope_theta)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
        "rope_local_base_freq": local,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "pad_token_id": None,  # the class default, 0, would leave that token's embedding untrained
    }


def _deepseek_experts_of(model: Model, experts: Experts) -> dict[str, Any]:
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


def _experts_of(model: Model, kind: str) -> dict[str, Any]:
    """Return the fields about experts in the ``config.json`` of a model type."""
    experts = model.mixture
    assert experts is not None
    if kind == "deepseek_v3":
        return _deepseek_experts_of(model, experts)
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


def _positions(model: Model, positions: int) -> int:
    """Return the maximum number of positions, from which dynamic frequencies are scaled."""
    scaling = model.rope_scaling
    return scaling.original_max_positions if scaling is not None and scaling.kind == "dynamic" else positions


def _scaling_of(model: Model) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        found |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind in ("llama3", "yarn", "longrope"):
        found["original_max_position_embeddings"] = scaling.original_max_positions
    if scaling.kind in ("yarn", "longrope"):
        found["attention_factor"] = scaling.attention_factor
    if scaling.kind == "yarn":
        found |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
    if model.latent is not None and scaling.kind == "yarn" and scaling.factor > 1:
        found["mscale_all_dim"] = (sqrt(model.latent.score_scale) - 1) / (0.1 * log(scaling.factor))
    if scaling.kind == "longrope":
        found |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    return found


class _Config:
    """The keys of one JSON object of the file; each key is checked when it is read."""

    def __init__(self, fields: dict[str, Any], where: str, path: str = "$") -> None:
        self.fields = fields
        self.where = where
        self.path = path
        self.read: set[str] = set()
        """The keys that were read or checked."""

    def refusal(self, key: str, what: str, *, wanted: str | None = None, hint: str | None = None) -> BadInput:
        """Return the error about one key."""
        got = repr(self.fields[key]) if key in self.fields else "nothing"
        return BadInput(what, where=f"{self.where}: {self.path}.{key}", got=got[:80], wanted=wanted, hint=hint)

    def whole(self, key: str, default: int | None = None, *, most: int = MOST_WIDTH) -> int:
        """Return a whole number from 1 to ``most``; a null or missing key gives ``default``, or else an error."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.refusal(key, "a wrong value", wanted=f"a whole number from 1 to {most:,}")
        return value

    def number(self, key: str, default: float | None = None, *, least: float | None = None) -> float:
        """Return a number above zero, or a number of at least ``least``."""
        value = self._get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            enough = value > 0 if least is None else value >= least
            if enough and value < _BEYOND_FLOATS:
                return float(value)
        wanted = "a positive number" if least is None else f"a number of at least {least:g}"
        raise self.refusal(key, "a wrong value", wanted=wanted)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers above zero."""
        found = self._typed(key, [], list, "a list of positive numbers")
        if not all(isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < _BEYOND_FLOATS for x in found):
            raise self.refusal(key, "a wrong value", wanted="a list of positive numbers")
        return tuple(float(x) for x in found)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        return self._typed(key, default, bool, "true or false")

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        return self._typed(key, default, str, "a string")

    def part(self, key: str) -> _Config:
        """Return the object under ``key``; a null or missing key gives an empty object."""
        return _Config(self._typed(key, {}, dict, "an object"), self.where, f"{self.path}.{key}")

    def _typed(self, key: str, default: T, kind: type[T], wanted: str) -> T:
        value = self._get(key, default)
        if not isinstance(value, kind):
            raise self.refusal(key, "a wrong value", wanted=wanted)
        return value

    def given(self, key: str) -> Any:
        """Return the value of a key, of any type; None where it is missing."""
        self.read.add(key)
        return self.fields.get(key)

    def _get(self, key: str, default: object) -> object:
        value = self.given(key)
        if value is None and default is None:
            raise self.refusal(key, "a field that the model's shape needs is missing")
        return default if value is None else value


def _gpt2(config: _Config) -> dict[str, Any]:
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
        "head_dim": _even_split(config, "n_embd", hidden, heads),
        "ffn_hidden": config.whole("n_inner", 4 * hidden),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "max_positions": config.whole("n_positions", most=MOST_TOKENS),
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "qkv_bias": True,
        "linear_bias": True,
        "activation": _GELU[activation],
    }


def _rotary(config: _Config, model_type: str) -> dict[str, Any]:
    """Return the shape of a Llama, Mistral, Phi-3, Qwen or Gemma 3: rotary positions, a gated FFN, grouped-query heads.

    ``_with_windows`` adds windows, and the rotary bases of layers that have one.
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
    latent = _latent(config, model_type) if model_type in WITH_LATENT else None
    if latent is not None:
        head_dim = latent.head_dim
    elif model_type in ("qwen3", "qwen3_moe", GEMMA3, GPT_OSS) or config.given("head_dim") is not None:
        head_dim = config.whole("head_dim")
    else:
        head_dim = _even_split(config, "hidden_size", hidden, heads)
    biased = _all_biased(config, model_type)
    projected = model_type == GPT_OSS and config.flag("attention_bias", True)
    theta, scaling = _rope(config)
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
        "query_scalar": _query_scalar(config, head_dim) if gemma else 0.0,
        "latent": latent,
        **dict.fromkeys(("post_norms", "scaled_embeddings", "norms_from_one"), gemma),
        "experts": _experts(config, model_type) if model_type in WITH_EXPERTS else None,
    }


def _has_qwen_biases(config: _Config, model_type: str) -> bool:
    """Return whether a Qwen2-MoE has biases on Q, K and V; other types have no such field."""
    return model_type == "qwen2_moe" and config.flag("qkv_bias", True)


def _latent(config: _Config, model_type: str) -> LatentAttention:
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


def _score_scale(config: _Config) -> float:
    """Return the factor on scores of yarn with ``mscale_all_dim`` (transformers, ``yarn_apply_mscale``)."""
    table = config.part("rope_scaling" if config.given("rope_scaling") else "rope_parameters")
    kind = table.text("rope_type" if "rope_type" in table.fields else "type", "default")
    weight = table.number("mscale_all_dim", 0.0, least=0.0)
    if kind == "default" or not weight:
        return 1.0
    factor = table.number("factor", least=1.0)
    return (0.1 * weight * log(factor) + 1.0) ** 2


def _query_scalar(config: _Config, head_dim: int) -> float:
    """Return the number by whose root a Gemma 3 divides its scores; 0 where it is the head size."""
    scalar = config.number("query_pre_attn_scalar")
    return 0.0 if scalar == head_dim else scalar


def _with_windows(config: _Config, model: Model, model_type: str) -> Model:
    """Return the model with the windows of its layers, and in Gemma 3 with their rotary base."""
    windowed = _windowed_layers(config, model, model_type)
    if not any(windowed):
        return model
    window = config.whole("sliding_window", most=MOST_TOKENS)
    theta = _local_theta(config) if model_type == GEMMA3 else 0.0
    theta = 0.0 if theta == model.rope_theta and model.rope_scaling is None else theta
    return model.of_layers(
        [
            replace(model.layer(number), window=window, rope_theta=theta) if has else model.layer(number)
            for number, has in enumerate(windowed)
        ]
    )


def _local_theta(config: _Config) -> float:
    """Return the rotary base of a Gemma 3's layers with a window, whose tables have no scaling."""
    table = config.part("rope_parameters").part(SLIDING)
    if table.text("rope_type", "default") != "default":
        raise table.refusal("rope_type", "scaled rotary tables of layers with a window are not modelled")
    return table.number("rope_theta", config.number("rope_local_base_freq", GEMMA3_LOCAL_THETA))


def _windowed_layers(config: _Config, model: Model, model_type: str) -> list[bool]:
    """Return for each layer whether it has a window.

    Raises:
        BadInput: for kinds of attention other than full and sliding, or another number of layers.
    """
    kinds, window = config.given("layer_types"), config.given("sliding_window")
    first, used = config.given("max_window_layers"), config.flag("use_sliding_window", False)
    if model_type == "qwen2_moe" and used:
        raise config.refusal("use_sliding_window", "windows are not modelled in a model of this type", wanted="false")
    if model_type in ALWAYS_WINDOWED:
        if kinds is not None:
            raise config.refusal("layer_types", "layers of such a model are alike", wanted="no such key")
        return [window is not None] * model.layers
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != model.layers or any(k not in (SLIDING, FULL) for k in kinds):
            raise config.refusal(
                "layer_types", "these layers are not modelled", wanted=f"{model.layers} times {FULL} or {SLIDING}"
            )
        return [kind == SLIDING for kind in kinds]
    if model_type in (GEMMA3, GPT_OSS):
        pattern = config.whole("sliding_window_pattern", PATTERNS[model_type], most=MOST_LAYERS)
        return [(number + 1) % pattern > 0 for number in range(model.layers)]
    if model_type == "llama" or not used or window is None:
        return [False] * model.layers
    if model_type == "qwen3_moe":
        return [True] * model.layers
    first = 0 if first == 0 else config.whole("max_window_layers", most=MOST_WIDTH)
    return [number >= first for number in range(model.layers)]


def _with_deepseek_experts(config: _Config, model: Model) -> Model:
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


def _deepseek_experts(config: _Config) -> Experts:
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


def _with_dense_layers(config: _Config, model: Model) -> Model:
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


def _experts(config: _Config, model_type: str) -> Experts:
    """Return the experts of a Mixtral, Qwen2-MoE, Qwen3-MoE or GPT-OSS, which every layer has."""
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


def _even_split(config: _Config, key: str, hidden: int, heads: int) -> int:
    """Return the head size: the width divided by the number of heads."""
    if hidden % heads:
        raise config.refusal(key, "the width does not divide into heads", wanted=f"a multiple of {heads} heads")
    return hidden // heads


def _all_biased(config: _Config, model_type: str) -> bool:
    """Return whether every product has a bias. Allowed: all biases, none, those of Q, K and V (Qwen2), of attention."""
    if model_type in ("qwen2", "qwen2_moe", GPT_OSS):
        return False
    attention, ffn = config.flag("attention_bias", False), model_type == "llama" and config.flag("mlp_bias", False)
    if attention != ffn:
        key = "attention_bias" if attention else "mlp_bias"
        raise config.refusal(key, "biases on only some of the products are not modelled", wanted="false")
    return attention


def _rope(config: _Config) -> tuple[float, RopeScaling | None]:
    """Return base and scaling of the rotary tables; keys of transformers 4 take precedence over those of version 5."""
    table = config.part("rope_scaling" if config.given("rope_scaling") else "rope_parameters")
    base = 10000.0
    if config.fields.get("model_type") == GEMMA3:
        base = GEMMA3_THETA
        if config.given("rope_parameters") and not config.given("rope_scaling"):
            table = table.part(FULL)
    for part in (config, table):
        if part.number("partial_rotary_factor", 1.0) != 1.0:
            raise part.refusal(
                "partial_rotary_factor", "rotary positions on a part of a head are not modelled", wanted="1"
            )
    for key, value in table.fields.items():
        if isinstance(value, dict):
            raise table.refusal(key, "rotary tables that differ by layer are not modelled")
    theta = table.number("rope_theta", config.number("rope_theta", base))
    kind_key = "rope_type" if "rope_type" in table.fields else "type"
    kind = table.text(kind_key, "default")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=table.number("factor", least=1.0))
    if kind == "llama3":
        scaling = RopeScaling(
            kind="llama3",
            factor=table.number("factor", least=1.0),
            low_freq_factor=table.number("low_freq_factor"),
            high_freq_factor=table.number("high_freq_factor"),
            original_max_positions=table.whole("original_max_position_embeddings", most=MOST_TOKENS),
        )
        return theta, scaling
    if kind in ("dynamic", "ntk"):
        most = config.whole("max_position_embeddings", most=MOST_TOKENS)
        factor = table.number("factor", least=1.0)
        return theta, RopeScaling(kind="dynamic", factor=factor, original_max_positions=most)
    if kind == "yarn":
        return theta, _yarn(config, table)
    if kind in ("longrope", "su"):
        return theta, _longrope(config, table)
    raise table.refusal(
        kind_key, "this rotary scaling is not modelled", wanted="default, linear, llama3, yarn, dynamic or longrope"
    )


def _stretch(config: _Config, table: _Config) -> tuple[float, int]:
    """Return by how much yarn or longrope make the context longer, and the length before."""
    of = table if table.given("original_max_position_embeddings") is not None else config
    original = of.whole("original_max_position_embeddings", most=MOST_TOKENS)
    if table.given("factor") is not None:
        return table.number("factor", least=1.0), original
    return max(1.0, config.whole("max_position_embeddings", most=MOST_TOKENS) / original), original


def _yarn(config: _Config, table: _Config) -> RopeScaling:
    """Return YaRN's scaling; without ``attention_factor`` it follows from the factor, as the paper suggests."""
    factor, original = _stretch(config, table)

    def scale(weight: float) -> float:
        return 0.1 * weight * log(factor) + 1.0

    own = scale(1.0)
    if table.given("mscale") and table.given("mscale_all_dim"):
        own = scale(table.number("mscale")) / scale(table.number("mscale_all_dim"))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        attention_factor=table.number("attention_factor", own),
        beta_fast=table.number("beta_fast", 32.0),
        beta_slow=table.number("beta_slow", 1.0),
        truncate=table.flag("truncate", True),
    )


def _longrope(config: _Config, table: _Config) -> RopeScaling:
    """Return LongRoPE's scaling (Phi-3)."""
    factor, original = _stretch(config, table)
    own = sqrt(1 + log(factor) / log(original)) if factor > 1 and original > 1 else 1.0
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_positions=original,
        attention_factor=table.number("attention_factor", own),
        short_factors=table.numbers("short_factor"),
        long_factors=table.numbers("long_factor"),
    )


def _refuse_unmodelled(config: _Config, model_type: str) -> None:
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


def _unmodelled(config: _Config) -> list[str]:
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
