"""Reads a Hugging Face ``config.json`` as a ``Model``, and writes it: Llama, Mistral, Phi-3, Qwen2, Qwen3, Gemma 3's
text models, GPT-2, the mixtures of experts Mixtral, Qwen3-MoE and GPT-OSS, and DeepSeek-V3, also V2-Lite (latent
attention; V2's routers with groups are refused).

Keys that do not concern the shape are ignored. Keys that do must be present, because the class defaults of transformers
belong to no real model: Qwen3's default ``intermediate_size`` is 22016, the real 8B has 12288. Features that change the
arithmetic and are not modelled are refused by name, of other types as well: experts of other model types, rotary
positions on a part of a head, biases on some of the products, soft-capped or scaled logits.
"""

from __future__ import annotations

from typing import Any

import msgspec

from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.huggingface_types.config import Config
from memo_sim.contract.huggingface_types.deepseek import latent_fields, with_deepseek_experts
from memo_sim.contract.huggingface_types.experts import expert_fields, with_dense_layers
from memo_sim.contract.huggingface_types.gemma3 import gemma3_fields
from memo_sim.contract.huggingface_types.gpt2 import gpt2_fields, gpt2_shape
from memo_sim.contract.huggingface_types.kinds import GEMMA3, GPT_OSS, QWEN_MOE, SUPPORTED, WITH_LATENT
from memo_sim.contract.huggingface_types.llama import rotary_shape
from memo_sim.contract.huggingface_types.rotary_tables import scaling_fields, written_positions
from memo_sim.contract.huggingface_types.type_of_shape import type_of
from memo_sim.contract.huggingface_types.unmodelled import refuse_unmodelled, unmodelled
from memo_sim.contract.huggingface_types.windows import window_fields, with_windows
from memo_sim.contract.model import Model

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
    return _read(Config(fields, where), name)


def not_read(fields: dict[str, Any], *, where: str) -> tuple[str, ...]:
    """Return the fields of a ``config.json`` that are ignored and may change a training step, in alphabetical order.

    Raises:
            BadInput: as ``model_from_config``.
    """
    config = Config(fields, where)
    _read(config, "model")
    given = {key for key, value in fields.items() if value not in (None, False, {}, [])}
    return tuple(sorted(given - config.read - _OF_NO_STEP))


def _read(config: Config, name: str) -> Model:
    fields, where = config.fields, config.where
    model_type = config.text("model_type", "")
    if model_type not in SUPPORTED:
        features = unmodelled(config)
        raise config.refusal(
            "model_type",
            "this type of model is not supported"
            + (f", nor is what it has: {'; '.join(features)}" if features else ""),
            wanted="one of " + ", ".join(SUPPORTED),
            hint=None if features else "write its shape as a memo.model/1 file, if a model of these types has it",
        )
    refuse_unmodelled(config, model_type)
    dropout = max((config.number(key, 0.0, least=0.0) for key in _DROPOUT_KEYS if key in fields), default=0.0)
    source = f"Hugging Face config.json of model_type {model_type}"
    try:
        model = Model(
            name=config.text("_name_or_path", "").rstrip("/").rpartition("/")[2] or name,
            vocab=config.whole("vocab_size"),
            source=source + (f"; its dropout of {dropout:g} is not applied" if dropout else ""),
            **(gpt2_shape(config) if model_type == "gpt2" else rotary_shape(config, model_type)),
        )
    except ValueError as error:
        raise BadInput(str(error), where=where) from None
    if model_type in QWEN_MOE:
        model = with_dense_layers(config, model)
    if model_type in WITH_LATENT:
        try:
            model = with_deepseek_experts(config, model)
        except ValueError as error:
            raise BadInput(str(error), where=where) from None
    if model_type != "gpt2":
        model = with_windows(config, model, model_type)
    try:  # a constructor does not check types and bounds; reading the document again does
        return msgspec.json.decode(msgspec.json.encode(model), type=Model)
    except msgspec.ValidationError as error:
        raise BadInput("the config describes a model beyond all bounds", where=where, got=str(error)) from None


def model_type(model: Model) -> str:
    """Return Hugging Face's model type for a model of this shape.

    Raises:
        UsageError: when no model type has this shape.
    """
    found = type_of(model)
    if found is not None:
        return found
    raise UsageError(
        "no model type of Hugging Face has this shape",
        got=model.name,
        wanted="a GPT-2 with learned positions and biases, a Llama, a Mistral, a Qwen2, a Qwen3, a Gemma 3, a Mixtral, "
        "a Qwen2-MoE, a Qwen3-MoE or a dense DeepSeek-V3; layers of one kind, windows aside",
        hint="use checkpoints, which can store any model",
    )


def config_of(model: Model, positions: int) -> dict[str, Any]:
    """Return the ``config.json`` of ``model``; ``positions`` is the longest sequence.

    Raises:
        UsageError: as ``model_type``.
    """
    kind = model_type(model)
    shared = {"model_type": kind, "vocab_size": model.vocab, "tie_word_embeddings": model.tied_embeddings}
    if kind == "gpt2":
        return shared | gpt2_fields(model)
    biases = {"attention_bias": model.qkv_bias, "mlp_bias": model.linear_bias} if kind == "llama" else {}
    own = latent_fields(model) | (expert_fields(model, kind) if model.mixture is not None else {})
    own |= window_fields(model, kind)
    if kind == GPT_OSS:
        own["attention_bias"] = model.qkv_bias
    if kind == GEMMA3:
        own |= gemma3_fields(model)
    return shared | {
        "architectures": ["Gemma3ForCausalLM" if kind == GEMMA3 else f"{kind.title().replace('_', '')}ForCausalLM"],
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn_hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": written_positions(model, positions),
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling_fields(model),
        **biases,
        **own,
    }
