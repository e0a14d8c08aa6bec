"""Megatron-LM: a command line of ``pretrain_gpt.py``, its arguments in a file, and the script that starts it.

Options are those of ``megatron/training/arguments.py`` and of the configuration classes that it makes options of; every
name below was parsed by that parser (839 options at the commit that ``VERSION`` names).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from memo_sim.interchange import megatron_words
from memo_sim.interchange.framework import FALLBACK, Framework, Read, Saying, Source
from memo_sim.interchange.job import Job
from memo_sim.interchange.launch import Launch
from memo_sim.interchange.megatron_command import find
from memo_sim.interchange.megatron_configuration import Configuration
from memo_sim.interchange.megatron_layers import OF_THE_COMMAND_LINE, PATTERNS, pattern_text
from memo_sim.interchange.megatron_reading import read_job
from memo_sim.interchange.megatron_words import LAYOUTS, nearest_jobs, settings_of, unknown

NAME, TITLE = "megatron-lm", "Megatron-LM"
VERSION = "Megatron-LM (NVIDIA/Megatron-LM@d98e8a6, 2026-08-22)"

OPTIONS: dict[str, str] = {
    "fp8": "fp8-format",
    "layernorm_epsilon": "norm-epsilon",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "gated_linear_unit": "swiglu",
    "rope_scaling": "use-rope-scaling",
    "seq_len_interpolation_factor": "rotary-seq-len-interpolation-factor",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "num_moe_experts": "num-experts",
}
"""Options whose names are not those of the configuration's fields."""

OFF: dict[str, str] = {
    "add_bias_linear": "disable-bias-linear",
    "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "bias_activation_fusion": "no-bias-gelu-fusion",
    "overlap_p2p_comm": "no-overlap-p2p-communication",
    "check_for_nan_in_loss": "no-check-for-nan-in-loss-and-grad",
    "apply_rope_fusion": "no-rope-fusion",
    "yarn_correction_range_round_to_int": "no-yarn-correction-range-round-to-int",
}
"""Options that turn a field off; each field is on unless given."""

_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "MODEL_ARGS",
        (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "normalization",
            "layernorm_epsilon",
            "gated_linear_unit",
            "bias_activation_fusion",
            "openai_gelu",
            "add_bias_linear",
            "add_qkv_bias",
            "qk_layernorm",
            "share_embeddings_and_output_weights",
            "position_embedding_type",
            "max_position_embeddings",
            "rotary_base",
            "rope_scaling",
            "rope_scaling_factor",
            "seq_len_interpolation_factor",
            "vocab_size",
            "hidden_dropout",
            "attention_dropout",
            "attention_backend",
            "flash_attention_version",
            *("window_size", "window_attn_skip_freq", "softmax_type"),
            *("rotary_scaling_factor", "mscale", "mscale_all_dim", "rope_type", "apply_rope_fusion"),
            *("yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
            "yarn_correction_range_round_to_int",
        ),
    ),
    (
        "LATENT_ARGS",
        ("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    ),
    (
        "MOE_ARGS",
        (
            *("num_moe_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
            *("moe_shared_expert_gate", "quick_geglu", "glu_linear_offset", "activation_func_clamp_value"),
            *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups"),
            *("moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias"),
            *("moe_router_bias_update_rate", "moe_router_dtype", "moe_router_load_balancing_type"),
            *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_grouped_gemm", "moe_token_dispatcher_type"),
            *("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"),
        ),
    ),
    (
        "PARALLEL_ARGS",
        (
            "tensor_model_parallel_size",
            "sequence_parallel",
            "tp_comm_overlap",
            *("expert_model_parallel_size", "expert_tensor_parallel_size"),
            "context_parallel_size",
            "cp_comm_type",
            "hierarchical_context_parallel_sizes",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "pipeline_model_parallel_layout",
            "use_distributed_optimizer",
            "use_megatron_fsdp",
            "data_parallel_sharding_strategy",
            "num_distributed_optimizer_instances",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "ckpt_format",
        ),
    ),
)
"""Groups of the script, and the fields of each; what is left goes with training."""

_DATA = """\
# Training data: mock data unless DATA_ARGS says otherwise, for example
# DATA_ARGS=(--data-path PREFIX --split 949,50,1 --tokenizer-type HuggingFaceTokenizer --tokenizer-model MODEL)
DATA_ARGS=(
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size {vocab}
)
"""
_SCHEDULE = """\
# Not part of a plan: how long, and how fast, to learn.
SCHEDULE_ARGS=(
    --train-iters ${TRAIN_ITERS:-20}
    --lr ${LR:-1.0e-4}
    --min-lr ${MIN_LR:-1.0e-5}
    --lr-decay-style cosine
    --weight-decay 0.1
    --clip-grad 1.0
    --eval-iters 0
    --log-interval 1
    --log-throughput
)
"""


def option_of(name: str, value: Any) -> list[str]:
    """Return a field as words of the command line; none where the value is the default of a switch."""
    if name in OFF:
        return [] if value else [f"--{OFF[name]}"]
    option = f"--{OPTIONS.get(name, name.replace('_', '-'))}"
    if isinstance(value, bool):
        return [option] if value else []
    if name in PATTERNS:
        return [option, pattern_text(value)]
    if isinstance(value, tuple):
        return [option, ",".join(map(str, value))]
    values = value if isinstance(value, list) else [value]
    return [option, *map(str, values)]


def arguments(job: Job) -> dict[str, list[list[str]]]:
    """Return the options of a job, each with its values, by the group of the script that they stand in."""
    said = settings_of(job)
    groups: dict[str, list[list[str]]] = {title: [] for title in (*dict(_GROUPS), "TRAINING_ARGS")}
    for name, value in said.items():
        group = next((title for title, fields in _GROUPS if name in fields), "TRAINING_ARGS")
        words = _vocab(value) if name == "vocab_size" else option_of(name, value)
        if name == "num_query_groups":
            groups[group].append(["--group-query-attention"])
        if words:
            groups[group].append(words)
    return {title: options for title, options in groups.items() if options}


def _vocab(rows: int) -> list[str]:
    """Return the option that fixes the rows of the embedding, whatever the tokenizer's vocabulary and the padding."""
    return ["--padded-vocab-size", str(rows)]


def _files(job: Job, launch: Launch, header: tuple[str, ...]) -> dict[str, str]:
    groups = arguments(job)
    before = [
        "# From the root of a checkout of Megatron-LM, or name its script.",
        "PRETRAIN=${PRETRAIN:-pretrain_gpt.py}",
        "",
    ]
    for title, options in groups.items():
        before += [f"{title}=(", *(f"    {' '.join(_quoted(word) for word in words)}" for words in options), ")"]
    before += ["", *_DATA.format(vocab=job.model.vocab).splitlines(), *_SCHEDULE.splitlines()]
    command = ['"${PRETRAIN}"', *(f'"${{{title}[@]}}"' for title in (*groups, "DATA_ARGS", "SCHEDULE_ARGS")), '"$@"']
    environment = {} if (job.pins.zero or 0) >= 2 else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {"train.sh": launch.script(command, header=header, environment=environment, before="\n".join(before))}


def _quoted(word: str) -> str:
    return shlex.quote(word)


def _reads(source: Source) -> bool:
    return _PROGRAM.search(source.text) is not None


_PROGRAM = re.compile(
    r"pretrain_(gpt|hybrid|mamba)\b|--(tensor|pipeline)-model-parallel-size|--num-attention-heads|language_model:"
)


def _read(sources: tuple[Source, ...], given: Mapping[str, str]) -> Read:
    """Return the job of scripts and argument files."""
    found = find(sources, given)
    where = ", ".join(source.name for source in sources)
    config = Configuration(found.values, found.spelled, where)
    config.assumed += found.notes
    config.undecided += found.undecided
    fallback = int(given[FALLBACK]) if given.get(FALLBACK, "").isdigit() else 0
    name = PurePath(sources[0].name).stem
    return read_job(
        config,
        framework=NAME,
        name=name,
        defaults=OF_THE_COMMAND_LINE,
        devices=found.devices,
        fallback_devices=fallback,
    )


def _sayings() -> dict[str, Saying]:
    """Return Megatron's table with the names of the command line."""
    named = {**OPTIONS, **OFF, "vocab_size": "padded-vocab-size"}

    def option(name: str) -> str:
        return f"--{named.get(name, name.replace('_', '-'))}"

    return {
        path: Saying(said.how, tuple(map(option, said.keys)), said.lost)
        for path, said in megatron_words.SAYINGS.items()
    }


FRAMEWORK = Framework(
    name=NAME,
    title=TITLE,
    version=VERSION,
    system="megatron-core",
    layouts=LAYOUTS,
    unknown=unknown,
    sayings=_sayings(),
    jobs=nearest_jobs,
    files=_files,
    reads=_reads,
    read=_read,
)
