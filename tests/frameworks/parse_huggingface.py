"""Run by a Python with accelerate, TRL and transformers: reads exported files by their own parsers, prints JSON.

Usage: python parse_huggingface.py accelerate|trl|deepspeed FOLDER, with train.sh's command in the environment as
COMMAND (JSON).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any


def accelerate_of(folder: Path, command: list[str]) -> dict[str, Any]:
    """Return what ``accelerate launch`` makes of its configuration: arguments, environment, plugin and mesh."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    loaded = load_config_from_file(str(folder / "accelerate.yaml"))
    words = command[command.index("launch") + 1 :]
    words[words.index("--config_file") + 1] = str(folder / "accelerate.yaml")
    args = launch_command_parser().parse_args(words)
    args, _, _ = _validate_launch_command(args)
    environment = prepare_multi_gpu_env(args)
    found: dict[str, Any] = {
        "distributed_type": str(loaded.distributed_type.value),
        "num_processes": args.num_processes,
        "mixed_precision": args.mixed_precision,
        "use_fsdp": args.use_fsdp,
        "use_parallelism_config": args.use_parallelism_config,
    }
    wanted = {name: value for name, value in environment.items() if name.startswith(("FSDP_", "PARALLELISM_"))}
    os.environ.update(wanted)
    if args.use_fsdp:
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin()
        found["fsdp"] = {
            "version": plugin.fsdp_version,
            "reshard_after_forward": plugin.reshard_after_forward,
            "offload": type(plugin.cpu_offload).__name__,
            "activation_checkpointing": plugin.activation_checkpointing,
        }
    if args.use_parallelism_config:
        from accelerate import ParallelismConfig

        mesh = ParallelismConfig()
        found["mesh"] = {
            "dp_replicate": mesh.dp_replicate_size,
            "dp_shard": mesh.dp_shard_size,
            "tp": mesh.tp_size,
            "cp": mesh.cp_size,
            "total": mesh.total_size,
            "strategy": mesh.cp_handler.cp_comm_strategy if mesh.cp_handler else None,
        }
    return found


def trl_of(folder: Path, command: list[str]) -> dict[str, Any]:
    """Return what ``trl sft`` makes of its YAML."""
    from trl.scripts.sft import make_parser

    words = command[command.index("trl.scripts.sft") + 1 :]
    words[words.index("--config") + 1] = str(folder / "sft.yaml")
    script, training, model, _ = make_parser().parse_args_and_config([*words, "--use_cpu", "True"])
    return {
        "dataset_name": script.dataset_name,
        "arguments": _training(training),
        "max_length": training.max_length,
        "packing": training.packing,
        "activation_offloading": training.activation_offloading,
        "loss_type": training.loss_type,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
    }


def program_of(folder: Path, command: list[str]) -> dict[str, Any]:
    """Return what the exported program makes of its options."""
    from transformers import HfArgumentParser, TrainingArguments

    spec = importlib.util.spec_from_file_location("train", folder / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train"] = module
    spec.loader.exec_module(module)
    words = command[command.index("train.py") + 1 :]
    if "--deepspeed" in words:
        at = words.index("--deepspeed")
        del words[at : at + 2]  # its file is parsed by DeepSpeed below; transformers would ask for a GPU
    job, training = HfArgumentParser((module.Job, TrainingArguments)).parse_args_into_dataclasses(
        [*words, "--use_cpu", "True"]
    )
    return {"job": vars(job), "arguments": _training(training)}


def _training(training: Any) -> dict[str, Any]:
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "torch_compile", "optim")
    names += ("gradient_checkpointing", "gradient_checkpointing_kwargs", "full_determinism")
    return {name: getattr(training, name) for name in names}


def deepspeed_of(folder: Path, world: int) -> dict[str, Any]:
    """Return what ``DeepSpeedConfig`` makes of the JSON, on a pretended number of processes."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime import config

    config.dist.get_rank = lambda: 0
    config.dist.get_world_size = lambda *_: world
    fields = json.loads((folder / "ds_config.json").read_text())
    read = config.DeepSpeedConfig(fields)
    zero = read.zero_config
    checkpointing = read.activation_checkpointing_config
    return {
        "train_batch_size": read.train_batch_size,
        "micro_batch": read.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": read.gradient_accumulation_steps,
        "stage": int(zero.stage),
        "offload": None
        if zero.offload_optimizer is None
        else str(getattr(zero.offload_optimizer.device, "value", zero.offload_optimizer.device)),
        "overlap_comm": zero.overlap_comm,
        "bf16": read.bfloat16_config.enabled,
        "fp16": read.float16_config.enabled,
        "pure": read.bfloat16_config.bf16_optimizer_states,
        "grad_accum_dtype": read.grad_accum_dtype,
        "cpu_checkpointing": checkpointing.cpu_checkpointing,
        "optimizer": [read.optimizer_name, read.optimizer_params.get("torch_adam", False)],
    }


def main(framework: str, folder: Path) -> None:
    """Print everything that the parsers of a framework say."""
    command = json.loads(os.environ["COMMAND"])
    found = dict[str, Any]()
    if framework == "deepspeed":
        found["deepspeed"] = deepspeed_of(folder, int(os.environ["WORLD"]))
    else:
        found["accelerate"] = accelerate_of(folder, command)
    found["program"] = trl_of(folder, command) if framework == "trl" else program_of(folder, command)
    print("\n" + json.dumps(found, default=str))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
