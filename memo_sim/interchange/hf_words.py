"""What Hugging Face's trainers say of a job: transformers' ``TrainingArguments`` (TRL's too), and accelerate's YAML.

Names are those of transformers 5.23, accelerate 1.15 and TRL 1.16; names of earlier versions are read as well.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from memo_sim.contract.attention_kernels import AttentionName
from memo_sim.contract.knobs import Recompute
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.interchange.job import Job

ATTENTION: dict[str, AttentionName] = {
    "flash_attention_2": "flash2",
    "flash_attention_3": "flash3",
    "flash_attention_4": "flash4",
    "eager": "plain",
}
"""``attn_implementation`` of each kernel; ``sdpa`` is left to torch, which takes cuDNN's or its flash attention."""
SDPA = "sdpa"
OPTIMIZERS = {"adamw_torch": "foreach", "adamw_torch_fused": "fused"}
DTYPES = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}
TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
Values = dict[str, Any]


def nearest_layouts(layout: Layout, *, tp: bool, sequence: str) -> tuple[Layout, ...]:
    """Return the layouts that come nearest with the same devices.

    ``sequence`` (cp or ulysses) divides whatever divides a sequence in the plan, and tp's ranks where there is no
    ``tp``; pipeline stages become replicas.
    """
    wide = layout.cp * layout.ulysses * layout.metp * (1 if tp else layout.tp)
    dp = layout.dp * layout.pp
    plain = Layout(
        tp=layout.tp if tp else 1,
        cp=wide if sequence == "cp" else 1,
        cp_exchange="all_gather" if sequence == "cp" and wide > 1 else "ring",
        ulysses=wide if sequence == "ulysses" else 1,
        dp=dp,
    )
    replicas = wide * dp
    if sequence == "ulysses":
        return tuple(msgspec.structs.replace(plain, zero=zero) for zero in dict.fromkeys((layout.zero, 3)))
    if replicas == 1 or (layout.zero == 0 and wide == 1 and plain.tp == 1):
        return (plain,)
    ranks = layout.zero_ranks if layout.zero_ranks % wide == 0 and replicas % (layout.zero_ranks or 1) == 0 else 0
    levels = {0: (3, 2), 1: (2, 3)}.get(layout.zero, (layout.zero,))
    return tuple(
        msgspec.structs.replace(plain, zero=zero, zero_ranks=0 if ranks == replicas else ranks) for zero in levels
    )


def nearest_recomputes(decisions: Decisions) -> tuple[tuple[Recompute, str, bool], ...]:
    """Return recompute, its layers, and whether inputs wait on the host: the plan's, or what may replace them."""
    swapped = decisions.swapped_tokens > 0
    if decisions.recompute == "full":
        choice = decisions.recompute_layers
        kept = choice if choice == "all" or choice.startswith("every-") else "all"
        return (("full", kept, decisions.alpha >= 1),) if decisions.alpha in (0, 1) else _FULL
    if decisions.recompute == "none" and not swapped:
        return (("none", "all", False),)
    return _FULL if swapped or decisions.recompute == "tokenwise" else (*_FULL, ("none", "all", False))


_FULL: tuple[tuple[Recompute, str, bool], ...] = (("full", "all", True), ("full", "all", False))


def attention_of(kernel: str) -> str:
    """Return ``attn_implementation`` for a kernel of a plan."""
    return next((word for word, name in ATTENTION.items() if name == kernel), SDPA)


def arguments_of(job: Job, *, length: str = "max_length") -> Values:
    """Return ``TrainingArguments`` of a job, and the model's, by their names."""
    pins = job.pins
    said: Values = {
        "dtype": model_dtype(job),
        "attn_implementation": SINKS if job.model.sinks else _implementation(pins.attention),
        length: job.seq_tokens,
        "per_device_train_batch_size": job.micro_batch,
        "gradient_accumulation_steps": max(job.global_batch // (job.micro_batch * (pins.dp or 1)), 1),
        "gradient_checkpointing": pins.recompute == "full",
    }
    if pins.recompute == "full":
        kwargs: Values = {"use_reentrant": False}
        if pins.offload_inputs:
            kwargs["offload"] = True
        choice = pins.recompute_layers or "all"
        if choice.startswith("every-"):
            kwargs["every_n_layers"] = int(choice.removeprefix("every-"))
        said["gradient_checkpointing_kwargs"] = kwargs
    mixed = mixed_precision(job)
    return {
        **said,
        "bf16": mixed == "bf16",
        "fp16": mixed == "fp16",
        "optim": next(name for name, kernels in OPTIMIZERS.items() if kernels == (pins.adamw or "fused")),
        "torch_compile": pins.rowwise == "compiled",
        "full_determinism": job.deterministic,
    }


SINKS = "kernels-community/vllm-flash-attn3"
"""The attention of transformers that has GPT-OSS's sinks."""


def _implementation(attention: AttentionName | None) -> str:
    return next((word for word, name in ATTENTION.items() if name == attention), SDPA)


def model_dtype(job: Job) -> str:
    """Return the dtype in which the model is loaded: that of its master weights, unless there are none."""
    pure = job.states == "pure-bf16" or (job.adapters != "none" and job.pins.dtype != "fp32")  # frozen weights
    return TORCH_DTYPES["bf16"] if pure else TORCH_DTYPES["fp32"]


def mixed_precision(job: Job) -> str:
    """Return accelerate's ``mixed_precision``; a model in bf16 without master weights has none."""
    if job.states == "pure-bf16":
        return "no"
    return next((word for word, dtype in DTYPES.items() if dtype == (job.pins.dtype or "bf16")), "bf16")


def accelerate_yaml(job: Job, devices: int, nodes: int) -> Values:
    """Return accelerate's configuration of a job whose states FSDP2 divides, or that DDP copies."""
    pins = job.pins
    cp, dp, tp = pins.cp or 1, pins.dp or 1, pins.tp or 1
    shared: Values = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "mixed_precision": mixed_precision(job),
        "num_machines": nodes,
        "num_processes": devices,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "main_training_function": "main",
        "use_cpu": False,
    }
    if not pins.zero:
        copied: Values = {**shared, "distributed_type": "MULTI_GPU" if devices > 1 else "NO"}
        return copied if tp == 1 else {**copied, "parallelism_config": {"parallelism_config_tp_size": tp}}
    shards = pins.zero_ranks or cp * dp
    shard = max(shards // cp, 1)
    parallelism: Values = {
        "parallelism_config_dp_replicate_size": dp // shard,
        "parallelism_config_dp_shard_size": shard,
        "parallelism_config_tp_size": tp,
        "parallelism_config_cp_size": cp,
    }
    if cp > 1:
        parallelism["parallelism_config_cp_backend"] = "torch"
        parallelism["parallelism_config_cp_comm_strategy"] = "allgather"
    return {
        **shared,
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": pins.zero == 3,
            "fsdp_offload_params": job.states == "host",
            "fsdp_activation_checkpointing": False,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
        "parallelism_config": parallelism,
    }


def flags(values: Values) -> list[str]:
    """Return values as options of transformers' ``HfArgumentParser``, quoted for a shell."""
    words = list[str]()
    for name, value in values.items():
        if isinstance(value, dict):
            words += [f"--{name}", f"'{json.dumps(value)}'"]
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


def yaml_text(values: Values, header: tuple[str, ...] = ()) -> str:
    """Return a YAML file of mappings, numbers and plain words, which needs no package to write."""
    lines = [f"# {line}" for line in header]
    for key, value in values.items():
        if isinstance(value, dict):
            lines.append(f"{key}:")
            lines += [f"  {name}: {_scalar(inner)}" for name, inner in value.items()]
        else:
            lines.append(f"{key}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    """Return a value as YAML reads it back: ``no`` and its like are quoted."""
    if isinstance(value, str):
        plain = value.replace("_", "").replace("/", "").replace("-", "").replace(".", "").replace("$", "")
        return value if plain.isalnum() and value.lower() not in _WORDS and not plain.isdigit() else json.dumps(value)
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text else text.replace("e", ".0e")  # PyYAML reads 2e-05 as a word
    return json.dumps(value)


_WORDS = ("no", "yes", "on", "off", "true", "false", "null", "y", "n")
