"""DeepSpeed 0.19.8 with transformers' Trainer: ZeRO, Ulysses, states on the host.

Sources, in DeepSpeed 0.19.8: ``runtime/config.py``, ``runtime/zero/config.py``, ``runtime/zero/offload_config.py``,
``runtime/precision_config.py``, ``runtime/activation_checkpointing/config.py``, ``ops/adam``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from math import log2
from typing import Any

from memo_sim.contract.knobs import GradSums, States
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.units import GIB
from memo_sim.interchange.accelerate import (
    LAUNCH,
    adamw_of,
    check_model,
    choices,
    hugging_face_sayings,
    is_program,
    model_files,
    model_variable,
    tiles_of,
)
from memo_sim.interchange.eager_words import exact, near
from memo_sim.interchange.framework import Framework, Read, Saying, Source
from memo_sim.interchange.hf_read import Choice, Parallel, Tiles, kind_of, loss_of, pins_of, read_files
from memo_sim.interchange.hf_train import TRAIN, TRAIN_TEXT
from memo_sim.interchange.hf_words import ATTENTION, arguments_of, attention_of, flags, nearest_layouts
from memo_sim.interchange.job import Job, moments_as_parameters
from memo_sim.interchange.launch import Launch
from memo_sim.interchange.model_parts import check_written
from memo_sim.interchange.plan_paths import NOT_WRITTEN

CONFIGURATION = "ds_config.json"

_NO_CP = "Ulysses takes the ranks of the other ways to divide a sequence"
_UNWRITTEN = {
    "experts": "experts for it",
    "latent": "latent attention for it",
    "layer_pattern": "layers that differ for it",
    **dict.fromkeys(("window", "sinks", "proj_bias", *NOT_WRITTEN), "windows, sinks or Gemma's layers for it"),
}
SAYINGS = hugging_face_sayings(
    {
        **{
            f"model.{name}": Saying("none", lost=f"memo writes no options of {what}")
            for name, what in _UNWRITTEN.items()
        },
        "layout.tp": Saying("none", lost="memo's DeepSpeed has no tensor parallelism; Ulysses takes its ranks"),
        "layout.sequence_parallel": Saying("none", lost="memo's DeepSpeed has no tensor parallelism"),
        "layout.cp": Saying("none", lost=_NO_CP),
        "layout.cp_exchange": Saying("none", lost=_NO_CP),
        "layout.ulysses": exact("sequence_parallel_size", lost=_NO_CP),
        "layout.uneven_heads": Saying("none", lost="the heads have to divide by the ranks of Ulysses"),
        "layout.dp": exact("nproc-per-node"),
        "layout.zero": exact("zero_optimization.stage"),
        "layout.zero_ranks": Saying("none", lost="ZeRO divides over all replicas"),
        "decisions.overlap": near(
            "zero_optimization.overlap_comm", lost="ZeRO 0 and 1 reduce beside backward, and gather after the step"
        ),
        "decisions.states": exact(
            "zero_optimization.offload_optimizer.device",
            "bf16.bf16_master_weights_and_grads",
            "bf16.bf16_optimizer_states",
            lost="moments have the dtype of the master weights, fp32 or bf16; without ZeRO they are fp32",
        ),
        "decisions.grad_sums": exact("data_types.grad_accum_dtype", lost="fp32, or the dtype of the parameters"),
        "decisions.reduce_dtype": Saying("own", lost="gradients are reduced as they are summed"),
        "decisions.sharding": Saying("none", lost="its ZeRO is DeepSpeed's own"),
        "decisions.zero_params": Saying("own", lost="a rank stores its shard of bf16 parameters"),
        "decisions.streams": Saying("own", lost="memory comes back when the device has passed its use"),
        "decisions.loss": exact(
            "loss_tokens", lost="cross_entropy of an fp32 copy of the logits, whole or in DeepSpeed's tiles"
        ),
        "decisions.loss_chunk_tokens": exact("loss_tokens", lost="tiles need another dtype than fp16"),
        "decisions.mlp_chunk_tokens": exact("mlp_tokens", lost="tiles of the MLP go with full recompute of all layers"),
        "decisions.mlp_rebuild": Saying("own", lost="DeepSpeed's tiles run forward again inside a recomputed layer"),
        "decisions.attention_chunk_tokens": Saying("none", lost="FPDT is Megatron-DeepSpeed's"),
        "decisions.kernels.adamw": exact(
            "optimizer.params.torch_adam", lost="it has a fused AdamW of its own, and torch's"
        ),
        "decisions.dtype": exact("bf16.enabled", "fp16.enabled", lost="bf16, fp16 or fp32"),
    }
)


def jobs(decisions: Decisions) -> tuple[Job, ...]:
    """Return the jobs that come nearest to a plan.

    Raises:
        UsageError: when transformers has no model of this shape.
    """
    check_written(decisions, "DeepSpeed", "--to trl, or memo-exec runs the plan itself")
    check_model(decisions)
    layouts = nearest_layouts(decisions.layout, tp=False, sequence="ulysses")
    return tuple(
        _job(decisions, layout, choice, tiles)
        for layout, choice in product(layouts, choices(decisions))
        for tiles in _tiles(decisions, layout, choice)
    )


def _tiles(decisions: Decisions, layout: Layout, choice: Choice) -> tuple[Tiles, ...]:
    """Return the tiles to try: the plan's, then those that DeepSpeed's ALST has."""
    local, hidden = decisions.micro_batch * decisions.seq_tokens // layout.ulysses, decisions.model.hidden
    alst = Tiles(2 ** int(log2(GIB // (4 * decisions.model.vocab))), hidden)
    wanted = (Tiles(decisions.loss_chunk_tokens, decisions.mlp_chunk_tokens), alst)
    return tuple(
        dict.fromkeys(
            Tiles(
                tiles.loss_tokens if tiles.loss_tokens < local and decisions.dtype != "fp16" else 0,
                tiles.mlp_tokens if tiles.mlp_tokens < local and (choice.recompute, choice.layers) == _ALL else 0,
                one_tile=decisions.loss == "blocks" and tiles.loss_tokens == 0 and decisions.dtype != "fp16",
            )
            for tiles in wanted
        )
    )


_ALL = ("full", "all")


def _job(decisions: Decisions, layout: Layout, choice: Choice, tiles: Tiles) -> Job:
    dtype = decisions.dtype if decisions.dtype in ("bf16", "fp16", "fp32") else "bf16"
    states: States = moments_as_parameters(decisions.states) if layout.zero else "fp32"
    if states == "bf16" or (states == "pure-bf16" and dtype != "bf16"):
        states = "fp32"
    sums: GradSums = "params" if decisions.grad_sums == "params" else "auto"
    overlap = decisions.overlap if layout.zero < 2 else "none"
    parallel = Parallel(
        ulysses=layout.ulysses,
        dp=layout.dp,
        zero=layout.zero,
        overlap=None if layout.zero > 1 else "none" if overlap == "none" else "gradients",
        deepspeed=True,
    )
    word = attention_of(decisions.kernels.attention)
    return Job(
        model=decisions.model,
        seq_tokens=decisions.seq_tokens,
        micro_batch=decisions.micro_batch,
        global_batch=decisions.global_batch,
        states=states,
        grad_sums=sums,
        loss=loss_of(parallel, tiles, trl=False),
        deterministic=decisions.deterministic,
        pins=pins_of(
            parallel,
            choice,
            adamw=adamw_of(decisions),
            attention=ATTENTION.get(word, "torch-flash"),
            dtype=dtype,
            tiles=tiles,
        ),
    )


def configuration(job: Job) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a job."""
    pins = job.pins
    zero: dict[str, Any] = {"stage": pins.zero or 0}
    if pins.overlap is not None:
        zero["overlap_comm"] = pins.overlap == "gradients"
    if job.states == "host":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    adam: dict[str, Any] = {"lr": 2e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}
    if pins.adamw == "foreach":
        adam["torch_adam"] = True
    bf16: dict[str, Any] = {"enabled": (pins.dtype or "bf16") == "bf16"}
    if job.states == "pure-bf16":
        bf16 |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    said: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": max(job.global_batch // (job.micro_batch * (pins.dp or 1)), 1),
        **({"sequence_parallel_size": pins.ulysses} if (pins.ulysses or 1) > 1 else {}),
        "zero_optimization": zero,
        "bf16": bf16,
        "fp16": {"enabled": pins.dtype == "fp16"},
        "optimizer": {"type": "AdamW", "params": adam},
        "gradient_clipping": 1.0,
    }
    if pins.dtype != "fp32" and job.states != "pure-bf16":
        narrow = pins.dtype or "bf16"
        said["data_types"] = {"grad_accum_dtype": narrow if job.grad_sums == "params" else "fp32"}
    if pins.recompute == "full":
        said["activation_checkpointing"] = {"cpu_checkpointing": bool(pins.offload_inputs)}
    return said


def files(job: Job, launch: Launch, header: tuple[str, ...]) -> dict[str, str]:
    """Return DeepSpeed's configuration, the program, and the script that starts it."""
    values = arguments_of(job)
    values["dtype"] = "bfloat16" if job.pins.dtype == "bf16" else "float32"
    values["bf16"], values["fp16"] = job.pins.dtype == "bf16", job.pins.dtype == "fp16"
    del values["optim"]
    values |= tiles_of(job)
    ulysses = job.pins.ulysses or 1
    command = [
        *(TRAIN, "--deepspeed", CONFIGURATION, "--model_name_or_path", '"${MODEL}"', *flags(values)),
        *(("--sequence_parallel_size", str(ulysses)) if ulysses > 1 else ()),
        *("--output_dir", "output", '"$@"'),
    ]
    return {
        CONFIGURATION: json.dumps(configuration(job), indent=2) + "\n",
        TRAIN: TRAIN_TEXT,
        LAUNCH: launch.script(command, header=header, before=model_variable(job), inside=True),
        **model_files(job),
    }


def reads(source: Source) -> bool:
    """Return whether a file is DeepSpeed's configuration, or part of a job that it runs."""
    if kind_of(source) in ("deepspeed", "model"):
        return True
    return is_program(source) or (kind_of(source) == "script" and "deepspeed" in source.text)


def read(sources: tuple[Source, ...], given: Mapping[str, str]) -> Read:
    """Return the job of DeepSpeed's configuration, with the options of a command that uses it."""
    return read_files(sources, given, "deepspeed")


FRAMEWORK = Framework(
    name="deepspeed",
    title="DeepSpeed",
    version="DeepSpeed 0.19.8 with transformers 5.23",
    system="deepspeed-alst",
    sayings=SAYINGS,
    jobs=jobs,
    files=files,
    reads=reads,
    read=read,
)
