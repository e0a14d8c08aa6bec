"""Hugging Face configs: parameter counts agree with transformers and a committed table; other models are refused."""

import json
from math import log, sqrt
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memo_sim.contract.catalog import load_model
from memo_sim.contract.errors import BadInput
from memo_sim.contract.experts import Experts
from memo_sim.contract.huggingface import config_of, model_from_config, not_read
from memo_sim.contract.huggingface_types.kinds import SUPPORTED
from memo_sim.contract.latent_attention import LatentAttention
from memo_sim.contract.model import Model
from memo_sim.contract.rope_scaling import RopeScaling
from tests.refusals import check_fields

REAL = json.loads((Path(__file__).parent / "huggingface_configs.json").read_text())
"""Configs of published shapes, each with the number of parameters that transformers counts."""

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
QWEN2 = {**LLAMA, "model_type": "qwen2"}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 32}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": None}
PHI3 = {**LLAMA, "model_type": "phi3", "max_position_embeddings": 128, "sliding_window": 128}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
QWEN3_MOE = {**QWEN3, "model_type": "qwen3_moe", **_QWEN_EXPERTS}
QWEN2_MOE = {**LLAMA, "model_type": "qwen2_moe", **_QWEN_EXPERTS, "shared_expert_intermediate_size": 40}
DEEPSEEK: dict[str, Any] = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "first_k_dense_replace": 3,
}
GEMMA3 = {
    **LLAMA,
    "model_type": "gemma3_text",
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 16,
    "rms_norm_eps": 1e-6,
}
GPT_OSS: dict[str, Any] = {
    **LLAMA,
    "model_type": "gpt_oss",
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 32,
    "swiglu_limit": 7.0,
}
DEEPSEEK_V3 = {
    **DEEPSEEK,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": 100,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def loaded(config: dict[str, Any]) -> Model:
    return model_from_config(config, where="config.json", name="fallback")


def refusal(config: dict[str, Any]) -> BadInput:
    with pytest.raises(BadInput) as error:
        loaded(config)
    assert str(error.value.where).startswith("config.json")
    return error.value


@pytest.mark.parametrize("name", REAL)
def test_real_shapes_have_their_published_size(name: str) -> None:
    model = loaded(REAL[name]["config"])
    assert model.total_params == REAL[name]["params"]
    assert model.name == name


TINY = {
    "llama": LLAMA,
    "llama without grouped heads": {**LLAMA, "num_key_value_heads": None},
    "llama with its own head size": {**LLAMA, "head_dim": 32},
    "llama tied": {**LLAMA, "tie_word_embeddings": True},
    "llama biased": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "qwen2": QWEN2,
    "qwen2 tied": {**QWEN2, "tie_word_embeddings": True},
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "phi3": {**PHI3, "pad_token_id": 0},
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen2_moe without biases": {**QWEN2_MOE, "qkv_bias": False, "mlp_only_layers": [1]},
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe with an MLP": {**QWEN3_MOE, "mlp_only_layers": [1]},
    "gpt2": GPT2,
    "gpt2 with its own inner width": {**GPT2, "n_inner": 80},
    "gpt2 untied": {**GPT2, "tie_word_embeddings": False},
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", TINY)
def test_tiny_configs_count_as_transformers_does(name: str) -> None:
    torch = pytest.importorskip("torch")
    auto = pytest.importorskip("transformers.models.auto")
    fields = {key: value for key, value in TINY[name].items() if key != "model_type"}
    with torch.device("meta"):
        oracle = auto.AutoModelForCausalLM.from_config(auto.AutoConfig.for_model(TINY[name]["model_type"], **fields))
    assert loaded(TINY[name]).total_params == sum(parameter.numel() for parameter in oracle.parameters())


def test_experts() -> None:
    mixtral, qwen = loaded(MIXTRAL), loaded({**QWEN3_MOE, "output_router_logits": True, "router_aux_loss_coef": 0.02})
    assert mixtral.experts == Experts(count=4, per_token=2, hidden=96)
    assert qwen.experts == Experts(count=6, per_token=2, hidden=48, renormalize=False, balance=0.02)
    assert (mixtral.qk_norm, qwen.qk_norm) == (False, True)
    for model in (mixtral, qwen, loaded({**QWEN3_MOE, "norm_topk_prob": True})):
        again = loaded(config_of(model, 128))
        assert msgspec.structs.replace(again, name=model.name, source=model.source) == model
    mixed = loaded({**QWEN3_MOE, "mlp_only_layers": [0]})
    assert [mixed.layer(number).experts for number in range(3)] == [None, *[loaded(QWEN3_MOE).experts] * 2]
    every_second = loaded({**QWEN3_MOE, "decoder_sparse_step": 2})
    assert [every_second.layer(number).experts is None for number in range(3)] == [True, False, True]
    for model in (mixed, every_second):
        again = loaded(config_of(model, 128))
        assert [again.layer(number) for number in range(3)] == [model.layer(number) for number in range(3)]
    assert refusal({**QWEN3_MOE, "mlp_only_layers": [0, 1, 2]}).where == "config.json: $.mlp_only_layers"
    assert refusal({**QWEN3_MOE, "mlp_only_layers": "0"}).where == "config.json: $.mlp_only_layers"
    assert refusal({**MIXTRAL, "router_jitter_noise": 0.1}).where == "config.json: $.router_jitter_noise"
    assert refusal({**DEEPSEEK, "first_k_dense_replace": 2}).where == "config.json: $.moe_intermediate_size"


def test_deepseek_v3() -> None:
    """The first layer has an MLP; the others have experts, and a shared one as wide as two of them."""
    model = loaded(DEEPSEEK_V3)
    own = Experts(
        count=8,
        per_token=3,
        hidden=24,
        scores="sigmoid",
        scale=2.5,
        groups=4,
        groups_per_token=2,
        selection_bias=True,
        shared=48,
    )
    assert [model.layer(number).experts for number in range(3)] == [None, own, own]
    again = loaded(config_of(model, 128))
    assert msgspec.structs.replace(again, name=model.name, source=model.source) == model
    for key, wrong in (("topk_method", "greedy"), ("scoring_func", "softmax"), ("moe_layer_freq", 2)):
        assert refusal({**DEEPSEEK_V3, key: wrong}).where == f"config.json: $.{key}"
    assert refusal({**DEEPSEEK_V3, "first_k_dense_replace": None}).where == "config.json: $.first_k_dense_replace"
    assert "do not divide" in str(refusal({**DEEPSEEK_V3, "n_group": 3}))
    lite = {**DEEPSEEK_V3, "model_type": "deepseek_v2", "topk_method": "greedy", "norm_topk_prob": False}
    v2 = loaded({**lite, "scoring_func": "softmax", "routed_scaling_factor": 1.0})
    assert v2.mixture == Experts(count=8, per_token=3, hidden=24, renormalize=False, shared=48)
    assert refusal({**lite, "topk_method": "group_limited_greedy"}).where == "config.json: $.topk_method"
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    with torch.device("meta"):
        theirs = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**DEEPSEEK_V3))
    assert model.total_params == theirs.num_parameters()


def test_latent_attention() -> None:
    """The widths of a DeepSeek-V3 whose layers are all dense; ``head_dim`` there is that of the rotary part."""
    model = loaded(DEEPSEEK)
    wanted = LatentAttention(q_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=12)
    assert (model.latent, model.head_dim, model.value_dim) == (wanted, 24, 12)
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}
    v2 = {**DEEPSEEK, "model_type": "deepseek_v2", "q_lora_rank": None, "rope_scaling": yarn}
    scaled = loaded(v2).latent
    assert scaled is not None
    assert scaled.q_rank == 0
    assert scaled.score_scale == pytest.approx((0.1 * log(40) + 1) ** 2)
    for config in (DEEPSEEK, v2, {**DEEPSEEK, "rope_interleave": False}):
        model = loaded(config)
        again = loaded(config_of(model, 128))
        scale = pytest.approx(model.latent.score_scale)
        assert again.latent is not None
        assert again.latent.score_scale == scale
        same = msgspec.structs.replace(again.latent, score_scale=model.latent.score_scale)
        assert msgspec.structs.replace(again, name=model.name, source=model.source, latent=same) == model
    for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        assert (
            refusal({name: value for name, value in DEEPSEEK.items() if name != key}).where == f"config.json: $.{key}"
        )
    assert refusal({**DEEPSEEK, "attention_bias": True}).where == "config.json: $.attention_bias"
    assert refusal({**DEEPSEEK, "num_key_value_heads": 2}).where == "config.json"
    assert refusal({**LLAMA, "kv_lora_rank": 16}).where == "config.json: $.kv_lora_rank"


def test_deepseek_v3_without_experts_has_the_parameters_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        theirs = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**DEEPSEEK))
    assert loaded(DEEPSEEK).total_params == theirs.num_parameters()


def test_gpt_oss() -> None:
    """Every second layer, the first included, has a window unless the file lists the layers."""
    model = loaded(GPT_OSS)
    own = Experts(count=4, per_token=2, hidden=96, router_bias=True, bias=True, activation="clamped")
    assert [(shape.window, shape.experts) for shape in map(model.layer, range(3))] == [(32, own), (0, own), (32, own)]
    assert (model.qkv_bias, model.proj_bias, model.linear_bias, model.sinks) == (True, True, False, True)
    assert refusal({**GPT_OSS, "swiglu_limit": 5.0}).where == "config.json: $.swiglu_limit"
    assert refusal({**GPT_OSS, "swiglu_alpha": 1.0}).where == "config.json: $.swiglu_alpha"
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    with torch.device("meta"):
        theirs = transformers.GptOssForCausalLM(transformers.GptOssConfig(**GPT_OSS))
    assert model.total_params == theirs.num_parameters()


def test_configs_of_published_experts_are_the_presets() -> None:
    """Mixtral's are the defaults of transformers; Qwen3-30B-A3B's are its defaults but for layers and probabilities."""
    transformers = pytest.importorskip("transformers")
    mixtral = transformers.MixtralConfig(rope_theta=1e6, sliding_window=None).to_dict()
    qwen = {"num_hidden_layers": 48, "norm_topk_prob": True, "head_dim": 128, "rope_theta": 1e6}
    for name, config in {
        "mixtral-8x7b": mixtral,
        "qwen3-30b-a3b": transformers.Qwen3MoeConfig(**qwen).to_dict(),
    }.items():
        preset = load_model(name)
        assert msgspec.structs.replace(loaded(config), name=name, source=preset.source) == preset


def test_families() -> None:
    llama, qwen2, qwen3, gpt2 = (loaded(config) for config in (LLAMA, QWEN2, QWEN3, GPT2))
    assert [m.family for m in (llama, qwen2, qwen3, gpt2)] == ["llama", "llama", "llama", "gpt"]
    assert [m.qkv_bias for m in (llama, qwen2, qwen3, gpt2)] == [False, True, False, True]
    assert [m.linear_bias for m in (llama, qwen2, qwen3, gpt2)] == [False, False, False, True]
    assert [m.qk_norm for m in (llama, qwen2, qwen3, gpt2)] == [False, False, True, False]
    assert [m.head_dim for m in (llama, qwen2, qwen3, gpt2)] == [16, 16, 32, 16]
    assert [m.tied_embeddings for m in (llama, qwen2, qwen3, gpt2)] == [False, False, False, True]
    assert [m.norm_eps for m in (llama, qwen2, qwen3, gpt2)] == [1e-6, 1e-6, 1e-6, 1e-5]
    assert [m.activation for m in (llama, qwen2, qwen3, gpt2)] == ["silu", "silu", "silu", "gelu_tanh"]
    assert (gpt2.ffn_hidden, gpt2.max_positions, llama.max_positions) == (256, 32, 0)


@pytest.mark.parametrize(
    ("keys", "theta", "scaling"),
    [
        ({}, 1e4, None),
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}}, 1e6, None),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, 1e4, RopeScaling(kind="linear", factor=4.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
            5e5,
            RopeScaling(kind="llama3", factor=8.0),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32}},
            1e4,
            RopeScaling(kind="yarn", factor=4.0, original_max_positions=32, attention_factor=0.1 * log(4) + 1),
        ),
        (
            {"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 2}},
            1e4,
            RopeScaling(kind="dynamic", factor=2.0, original_max_positions=64),
        ),
        (
            {"max_position_embeddings": 128, "original_max_position_embeddings": 32, "rope_scaling": LONGROPE},
            1e4,
            RopeScaling(
                kind="longrope",
                factor=4.0,
                original_max_positions=32,
                attention_factor=sqrt(1 + log(4) / log(32)),
                short_factors=(1.0,) * 8,
                long_factors=(2.0,) * 8,
            ),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}},
            5e5,
            RopeScaling(kind="llama3", factor=8.0),
        ),
    ],
)
def test_rotary_keys_of_both_generations(keys: dict[str, Any], theta: float, scaling: RopeScaling | None) -> None:
    model = loaded({**LLAMA, **keys})
    assert (model.rope_theta, model.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({}, "model_type"),
        ({"model_type": "lama"}, "model_type"),
        ({"model_type": 3}, "model_type"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size"),
        ({**LLAMA, "hidden_size": 64.0}, "hidden_size"),
        ({**LLAMA, "hidden_size": True}, "hidden_size"),
        ({**LLAMA, "hidden_size": 0}, "hidden_size"),
        ({**LLAMA, "hidden_size": 62}, "hidden_size"),
        ({**LLAMA, "rms_norm_eps": 0}, "rms_norm_eps"),
        ({**LLAMA, "rope_theta": 10**400}, "rope_theta"),
        ({**LLAMA, "rope_theta": -1.0}, "rope_theta"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act"),
        ({**LLAMA, "attention_bias": True}, "attention_bias"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias"),
        ({**QWEN3, "attention_bias": True}, "attention_bias"),
        ({**LLAMA, "tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({**LLAMA, "num_local_experts": 8}, "num_local_experts"),
        ({**QWEN3, "num_experts": 128}, "num_experts"),
        ({**QWEN3, "moe_intermediate_size": 768}, "moe_intermediate_size"),
        ({**LLAMA, "text_config": dict(LLAMA)}, "text_config"),
        ({**LLAMA, "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({**LLAMA, "embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({**LLAMA, "logit_scale": 0.0625}, "logit_scale"),
        ({**QWEN3, "use_qk_norm": True}, "use_qk_norm"),
        ({**LLAMA, "no_rope_layers": [1, 1, 0]}, "no_rope_layers"),
        ({**QWEN2, "kv_lora_rank": 512}, "kv_lora_rank"),
        ({**LLAMA, "rope_scaling": {"rope_type": "proportional"}}, "rope_scaling.rope_type"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, "max_position_embeddings"),
        ({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        ({**MISTRAL, "sliding_window": -1}, "sliding_window"),
        ({**MISTRAL, "sliding_window": 32, "layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA3, "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({**GEMMA3, "hidden_activation": "silu"}, "hidden_activation"),
        ({**LLAMA, "query_pre_attn_scalar": 16}, "query_pre_attn_scalar"),
        (
            {**PHI3, "original_max_position_embeddings": 32, "rope_scaling": {**LONGROPE, "long_factor": ["a"]}},
            "rope_scaling.long_factor",
        ),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor"),
        ({**LLAMA, "rope_scaling": "linear"}, "rope_scaling"),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention"),
        ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 32}, "max_window_layers"),
        ({**QWEN3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_window"),
        ({**QWEN3, "layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types"),
        ({**QWEN3, "sliding_window": 32, "layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({**QWEN3, "layer_types": "full_attention"}, "layer_types"),
        ({**GPT2, "activation_function": "relu"}, "activation_function"),
        ({**GPT2, "scale_attn_weights": False}, "scale_attn_weights"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention"),
        ({**GPT2, "n_embd": 66}, "n_embd"),
        ({**GPT2, "attn_pdrop": -1}, "attn_pdrop"),
    ],
)
def test_unmodelled_features_are_refused(config: dict[str, Any], key: str) -> None:
    assert refusal(config).where == f"config.json: $.{key}"


@pytest.mark.parametrize(
    ("config", "optional"),
    [(LLAMA, {"num_key_value_heads"}), (QWEN2, set()), (QWEN3, set()), (GPT2, set())],
    ids=["llama", "qwen2", "qwen3", "gpt2"],
)
def test_shape_keys_have_no_defaults(config: dict[str, Any], optional: set[str]) -> None:
    for key in set(config) - optional:
        rest = {name: value for name, value in config.items() if name != key}
        assert refusal(rest).where == f"config.json: $.{key}"


def test_shapes_that_contradict_themselves() -> None:
    check_fields(refusal({**LLAMA, "num_key_value_heads": 3}), BadInput, what=("heads (4)", "kv_heads (3)"))
    check_fields(refusal({**LLAMA, "head_dim": 15}), BadInput, what="head_dim (15)")
    rope = {"rope_type": "llama3", **LLAMA3_ROPE, "high_freq_factor": 1.0}
    check_fields(refusal({**LLAMA, "rope_scaling": rope}), BadInput, what=("high_freq_factor", "low_freq_factor"))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LLAMA | {"num_hidden_layers": 10**9}, ("$.num_hidden_layers", "1 to 1,024")),
        (LLAMA | {"vocab_size": 10**12}, ("$.vocab_size", "1 to 16,777,216")),
        (GPT2 | {"n_layer": 1_025}, ("$.n_layer", "1 to 1,024")),
        (GPT2 | {"n_positions": 2**31}, ("$.n_positions", "1 to 1,073,741,824")),
        (LLAMA | {"rms_norm_eps": 1e200}, ("beyond all bounds", "$.norm_eps")),
        (LLAMA | {"rope_theta": 5e-324}, ("beyond all bounds", "$.rope_theta")),
    ],
)
def test_the_bounds_are_those_of_our_own_models(config: dict[str, Any], says: tuple[str, ...]) -> None:
    """Without them a billion layers end in a MemoryError, and a vocabulary of 10^12 in a negative shift."""
    with pytest.raises(BadInput) as caught:
        model_from_config(config, where="config.json", name="x")
    assert all(text in str(caught.value) for text in says)


def test_unknown_types_list_the_supported_ones() -> None:
    error = refusal({**LLAMA, "model_type": "qwen4"})
    check_fields(error, BadInput, where="$.model_type", got="'qwen4'", wanted=tuple(SUPPORTED))
    check_fields(refusal({"model_type": "mamba"}), BadInput, hint="memo.model/1")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, ("a model inside a model",)),
        ({"model_type": "olmoe", "num_local_experts": 8}, ("mixtures of experts (num_local_experts)",)),
        (
            {"model_type": "minicpm3", "n_routed_experts": 256, "kv_lora_rank": 512},
            ("mixtures of experts", "latent attention (kv_lora_rank)"),
        ),
        (
            {"model_type": "llama4_text", "num_local_experts": 32, "layer_types": ["chunked_attention"]},
            ("mixtures of experts", "layers of chunked_attention (layer_types)"),
        ),
        ({"model_type": "mamba", "state_size": 16}, ("state-space layers",)),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention"], "partial_rotary_factor": 0.25},
            ("layers of linear_attention", "partial_rotary_factor"),
        ),
        ({"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}}, ("vision_config",)),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0, "sliding_window": 4096}, ("soft-capped", "sliding")),
        ({"model_type": "granite", "residual_multiplier": 0.22}, ("residual_multiplier",)),
        ({"model_type": "olmo2"}, ("norms behind attention and FFN",)),
    ],
)
def test_other_types_are_refused_with_what_they_have(config: dict[str, Any], says: tuple[str, ...]) -> None:
    """A hint would be wrong: no memo.model/1 file can have it either."""
    check_fields(refusal(config), BadInput, where="$.model_type", what=says, hint=None)


def windows(config: dict[str, Any]) -> list[int]:
    model = loaded(config)
    return [model.layer(number).window for number in range(model.layers)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**MISTRAL, "sliding_window": 32}, [32, 32, 32]),
        ({**PHI3, "sliding_window": 256}, [256, 256, 256]),
        ({**MIXTRAL, "sliding_window": 32}, [32, 32, 32]),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}, [0, 0, 32]),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}, [32, 32, 32]),
        ({**QWEN3, "layer_types": ["full_attention", *["sliding_attention"] * 2], "sliding_window": 8}, [0, 8, 8]),
        ({**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 32}, [32, 32, 32]),
        ({**GEMMA3, "sliding_window_pattern": 2}, [16, 0, 16]),
        (GEMMA3, [16, 16, 16]),
    ],
)
def test_windows_are_read(config: dict[str, Any], expected: list[int]) -> None:
    assert windows(config) == expected
    assert not_read(config, where="config.json") == ()


def test_gemma_3_is_read_as_transformers_makes_it() -> None:
    """Six layers: the sixth has no window and the scaled tables, the others a base of their own."""
    transformers = pytest.importorskip("transformers")
    made = transformers.Gemma3TextConfig(
        **{**GEMMA3, "num_hidden_layers": 6}, rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0}}
    ).to_dict()
    model = loaded(made)
    assert [model.layer(number).window for number in range(6)] == [16] * 5 + [0]
    assert [model.layer(number).rope_theta for number in range(6)] == [10_000.0] * 5 + [0.0]
    assert (model.rope_theta, model.rope_scaling) == (1_000_000.0, RopeScaling(kind="linear", factor=8.0))
    assert (model.query_scalar, model.activation, model.tied_embeddings) == (24.0, "gelu_tanh", True)
    assert model.post_norms
    assert model.scaled_embeddings
    assert model.norms_from_one
    published = {**GEMMA3, "num_hidden_layers": 6, "rope_theta": 1e6, "rope_local_base_freq": 10000.0}
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert msgspec.structs.replace(loaded({**published, **scaled}), name=model.name) == model


@pytest.mark.parametrize(
    "config",
    [
        {**MISTRAL, "sliding_window": 32},
        {**QWEN2, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2},
        {**QWEN3, "layer_types": ["full_attention", *["sliding_attention"] * 2], "sliding_window": 8},
        {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 32},
        {**GEMMA3, "sliding_window_pattern": 2},
        {**QWEN2_MOE, "qkv_bias": False, "mlp_only_layers": [0], "tie_word_embeddings": True},
        GPT_OSS,
        {**GPT_OSS, "layer_types": ["full_attention"] * 3, "attention_bias": False, "output_router_logits": True},
        {**GEMMA3, "num_hidden_layers": 6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
)
def test_a_config_that_is_written_is_of_the_same_model(config: dict[str, Any]) -> None:
    model = loaded(config)
    again = loaded(config_of(model, 128))
    assert msgspec.structs.replace(again, name=model.name, source=model.source) == model


@pytest.mark.parametrize(
    "keys",
    [
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 3},
        {"layer_types": ["full_attention"] * 3},
    ],
)
def test_a_window_that_no_layer_uses_is_accepted(keys: dict[str, Any]) -> None:
    assert loaded({**QWEN2, **keys}) == loaded(QWEN2)


def test_keys_that_do_not_concern_the_shape_are_ignored() -> None:
    other = {"torch_dtype": "bfloat16", "use_cache": True, "eos_token_id": [1, 2], "max_position_embeddings": 131072}
    assert loaded({**LLAMA, **other, "quantization_config": {"bits": 4}, "num_experts": None}) == loaded(LLAMA)


def test_the_source_says_that_dropout_is_not_applied() -> None:
    assert "dropout" not in loaded({**GPT2, "resid_pdrop": 0.0}).source
    assert "its dropout of 0.1 is not applied" in loaded({**GPT2, "resid_pdrop": 0.1, "attn_pdrop": 0.05}).source


@pytest.mark.parametrize(
    ("given_name", "name"),
    [
        ("org/some-model", "some-model"),
        ("some-model", "some-model"),
        ("", "fallback"),
        (None, "fallback"),
        ("/", "fallback"),
    ],
)
def test_names(given_name: str | None, name: str) -> None:
    assert loaded({**LLAMA, "_name_or_path": given_name}).name == name


VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just({})
    | st.just([])
    | st.just({"type": 1})
)


@given(data=st.data())
def test_mutated_configs_never_escape(data: st.DataObject) -> None:
    config = dict(data.draw(st.sampled_from([LLAMA, QWEN2, QWEN3, GPT2])))
    extra = [
        "rope_scaling",
        "rope_parameters",
        "layer_types",
        "_name_or_path",
        "attn_pdrop",
        "num_experts",
        "text_config",
    ]
    for _ in range(data.draw(st.integers(1, 3))):
        config[data.draw(st.sampled_from([*config, *extra]))] = data.draw(VALUES)
    try:
        model = loaded(config)
    except BadInput:
        return
    assert model.total_params > 0


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3, GPT2], ids=lambda config: config["model_type"])
def test_fields_that_are_ignored_are_listed(config: dict[str, Any]) -> None:
    unused = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 3} if config is QWEN2 else {}
    harmless = {"architectures": ["X"], "bos_token_id": 1, "use_cache": True, "transformers_version": "5.0"}
    ignored = {"quantization_config": {"bits": 4}, "torch_dtype": "float16", "chunk_attention": 2.0, "odd": None}
    assert not_read({**config, **unused, **harmless}, where="config.json") == ()
    found = not_read({**config, **unused, **harmless, **ignored}, where="config.json")
    assert found == ("chunk_attention", "quantization_config", "torch_dtype")
