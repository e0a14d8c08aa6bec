"""accelerate 1.15 with transformers' Trainer: FSDP2 over dp and cp, tensor parallelism of transformers.

Sources: accelerate 1.15 (``commands/config/config_args.py``, ``parallelism_config.py``, ``utils/dataclasses.py``) and
transformers 5.23 (``training_args.py``, ``modeling_utils.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product

from msgspec.structs import replace

from memo_sim.contract.errors import UsageError
from memo_sim.contract.huggingface import config_of, model_from_config, model_type
from memo_sim.contract.knobs import AdamwKernels, States
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.interchange.eager_words import exact, near, sayings
from memo_sim.interchange.framework import Framework, Read, Saying, Source
from memo_sim.interchange.hf_read import Choice, Parallel, Tiles, kind_of, loss_of, pins_of, read_files
from memo_sim.interchange.hf_train import TRAIN, TRAIN_TEXT
from memo_sim.interchange.hf_words import (
    ATTENTION,
    accelerate_yaml,
    arguments_of,
    attention_of,
    flags,
    nearest_layouts,
    nearest_recomputes,
    yaml_text,
)
from memo_sim.interchange.job import Job, moments_as_parameters
from memo_sim.interchange.launch import Launch
from memo_sim.interchange.model_names import CONFIG, hub_name
from memo_sim.interchange.model_parts import gemma_parts
from memo_sim.interchange.plan_paths import NOT_WRITTEN

ACCELERATE, LAUNCH = "accelerate.yaml", "train.sh"
SMALL_TILE = 256
"""Tokens of a tile of the loss that is tried beside the plan's: those of TRL's."""

_NO_STAGES = "it has no pipeline stages; replicas take their place"
_OF_HUGGING_FACE = {
    **{
        f"model.{name}": exact("config.json")
        for name in (
            *("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab", "tied_embeddings"),
            *("max_positions", "norm_eps", "rope_theta", "rope_scaling", "qkv_bias", "linear_bias", "qk_norm"),
            *("activation", "latent", "window", "sinks", "proj_bias", *NOT_WRITTEN),
        )
    },
    "model.experts": exact("config.json", lost="selection biases stay as they are, and there is no loss of z"),
    "model.layer_pattern": exact("config.json", lost="selection biases stay as they are, and there is no loss of z"),
    "layout.ep": Saying("none", lost="every rank has all experts, gathered layer by layer"),
    "decisions.expert_load": Saying("own", lost="the data of the job decide it"),
    "decisions.expert_capacity": Saying("none", lost="a rank has a place for every row"),
    "decisions.expert_overflow": Saying("none", lost="a rank has a place for every row"),
    "decisions.rebuild_qkv": Saying("none", lost="it recomputes whole layers, or nothing"),
    "layout.pp": Saying("none", lost=_NO_STAGES),
    "layout.pp_layers": Saying("none", lost=_NO_STAGES),
    "layout.schedule": Saying("none", lost=_NO_STAGES),
    "layout.virtual_stages": Saying("none", lost=_NO_STAGES),
    "layout.tp_overlap": Saying("none", lost="tensor parallelism in chunks is torchtitan's and Megatron's"),
    "decisions.seq_tokens": exact("max_length"),
    "decisions.micro_batch": exact("per_device_train_batch_size"),
    "decisions.global_batch": exact("gradient_accumulation_steps"),
    "decisions.recompute": exact("gradient_checkpointing", lost="it recomputes whole layers, or nothing"),
    "decisions.recompute_layers": near(
        "gradient_checkpointing_kwargs",
        lost="every_n_layers begins with the first layer, memo's every-N ends with the last; first-K and groups-N have"
        " no words",
    ),
    "decisions.swapped_tokens": exact(
        "gradient_checkpointing_kwargs", lost="it offloads the inputs of recomputed layers, all of them or none"
    ),
    "decisions.kernels.attention": exact(
        "attn_implementation", lost="other kernels, and any with cp, are what torch's sdpa takes"
    ),
    "decisions.kernels.rowwise": exact("torch_compile", lost="modules run eagerly or compiled"),
    "decisions.kernels.adamw": exact("optim", lost="it has torch's AdamW, whose fused one is its default"),
    "decisions.dtype": exact("mixed_precision", "bf16", "fp16", lost="bf16, fp16 or fp32"),
    "decisions.deterministic": exact("full_determinism"),
    "decisions.cuda_graphs": Saying("none", lost="it replays no CUDA graphs"),
}
_OF_ACCELERATE = {
    **_OF_HUGGING_FACE,
    "layout.tp": exact("parallelism_config_tp_size", lost="transformers' tensor parallelism has no token shards"),
    "layout.sequence_parallel": Saying("none", lost="transformers' tensor parallelism has no token shards"),
    "layout.cp": exact("parallelism_config_cp_size", lost="it replaces the other ways to divide a sequence"),
    "layout.cp_exchange": exact("parallelism_config_cp_comm_strategy", lost="keys and values are gathered"),
    "layout.dp": exact("parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size"),
    "layout.zero": exact(
        "fsdp_reshard_after_forward", lost="FSDP2 has ZeRO 3, or 2 where parameters stay gathered; it divides over cp"
    ),
    "layout.zero_ranks": exact("parallelism_config_dp_replicate_size", lost="shards divide over whole cp groups"),
    "decisions.states": exact(
        "dtype",
        "fsdp_offload_params",
        lost="moments are fp32 as the master weights, or all bf16; on the host, parameters and gradients wait there"
        " too, which memo does not price",
    ),
    "decisions.zero_params": Saying("own", lost="FSDP2 keeps fp32 shards and casts them before every gather"),
    "decisions.loss": near(
        "loss_tokens",
        lost="cross_entropy of an fp32 copy of the logits, whole or in tiles whose products run again in backward;"
        " tiles are priced as TRL's earlier chunks",
    ),
    "decisions.loss_chunk_tokens": exact("loss_tokens", lost="with tp the loss is computed whole"),
}


def hugging_face_sayings(own: Mapping[str, Saying]) -> dict[str, Saying]:
    """Return the sayings of a framework on transformers: its own, transformers', and those of all."""
    return sayings({**_OF_HUGGING_FACE, **own})


def jobs(decisions: Decisions, *, tp: bool = True, own_program: bool = True) -> tuple[Job, ...]:
    """Return the jobs that come nearest to a plan; ``own_program``: the exported one, which may cut the loss.

    Raises:
        UsageError: when transformers has no model of this shape.
    """
    check_model(decisions)
    model = decisions.model
    if model.mixture is not None:
        decisions = replace(decisions, model=_as_said(decisions))
    layouts = nearest_layouts(decisions.layout, tp=tp and model.mixture is None, sequence="cp")
    if (model.windowed or model.sinks) and layouts[0].cp > 1:
        raise UsageError(
            "context parallelism of accelerate has no attention windows and no sinks, and takes the place of tp and"
            " Ulysses there",
            where="layout.cp",
            got=f"cp {layouts[0].cp}",
            wanted="a plan of whole sequences on every rank",
            hint="search a plan with --tp 1 --cp 1, or memo-exec runs the plan itself",
        )
    return tuple(
        fsdp_job(decisions, layout, choice, tiles)
        for layout, choice in product(layouts, choices(decisions))
        for tiles in (_loss_tiles(decisions, layout) if own_program else (None,))
    )


def _as_said(decisions: Decisions) -> Model:
    """Return the model that the written ``config.json`` says: of a router, transformers has not every part."""
    model = decisions.model
    fields = config_of(model, decisions.seq_tokens)
    return replace(model_from_config(fields, where=CONFIG, name=model.name), source=model.source)


def _loss_tiles(decisions: Decisions, layout: Layout) -> tuple[Tiles, ...]:
    """Return the tiles of the loss to try: the plan's, then small ones, where tp does not divide the vocabulary."""
    local = decisions.micro_batch * decisions.seq_tokens // layout.cp
    if layout.tp > 1:
        return (Tiles(),)
    if local <= SMALL_TILE:
        return (Tiles(one_tile=decisions.loss == "checkpointed"),)
    return tuple(Tiles(loss_tokens=tokens) for tokens in dict.fromkeys((decisions.loss_chunk_tokens, SMALL_TILE)))


def check_model(decisions: Decisions) -> None:
    """Refuse a model that transformers does not have.

    Raises:
        UsageError: with the types that there are.
    """
    try:
        model_type(decisions.model)
    except UsageError as error:
        alike = len(decisions.model.layer_shapes) == 1
        hint = "--to megatron-lm" if alike else "memo-exec runs the plan itself"
        raise UsageError(error.what, got=error.got, wanted=error.wanted, hint=hint) from None


def choices(decisions: Decisions) -> list[Choice]:
    """Return what may be chosen beside the layout: recompute, and whose row-wise kernels."""
    own = decisions.kernels.rowwise
    rowwise = (own == "compiled",) if own in ("eager", "compiled") else (False, True)
    return [
        Choice(recompute, layers, offloaded, compiled)
        for (recompute, layers, offloaded), compiled in product(nearest_recomputes(decisions), rowwise)
    ]


def adamw_of(decisions: Decisions) -> AdamwKernels:
    """Return the plan's AdamW where its kernels leave the choice, else the fused one."""
    kernels = decisions.kernels
    return kernels.adamw if kernels.rowwise in ("eager", "compiled") else "fused"


def fsdp_job(decisions: Decisions, layout: Layout, choice: Choice, tiles: Tiles | None) -> Job:
    """Return a job whose states FSDP2 divides, or that DDP copies; without ``tiles`` its loss is TRL's."""
    dtype = decisions.dtype if decisions.dtype in ("bf16", "fp16", "fp32") else "bf16"
    states: States = "fp32" if decisions.states == "bf16" else moments_as_parameters(decisions.states)
    if states == "pure-bf16" and dtype != "bf16":
        states = "fp32"
    if states == "host" and not layout.zero:
        states = "fp32"
    word = attention_of(decisions.kernels.attention) if layout.cp == 1 else ""
    if decisions.model.sinks:
        word = "flash_attention_3"
    elif decisions.model.windowed and word not in ATTENTION:
        word = "flash_attention_2"  # windows of torch's attention are masks of all pairs, which memo does not price
    parallel = Parallel(
        tp=layout.tp, cp=layout.cp, dp=layout.dp, zero=layout.zero, zero_ranks=layout.zero_ranks or None
    )
    copied = layout.zero == 0 and states == "fp32" and dtype != "fp32"
    return Job(
        model=decisions.model,
        seq_tokens=decisions.seq_tokens,
        micro_batch=decisions.micro_batch,
        global_batch=decisions.global_batch,
        states=states,
        grad_sums="autocast" if copied else "auto",
        loss=loss_of(parallel, tiles or Tiles(), trl=tiles is None),
        adapters=decisions.adapters,
        expert_load=decisions.expert_load,
        deterministic=decisions.deterministic,
        pins=pins_of(
            parallel,
            choice,
            adamw=adamw_of(decisions),
            attention=ATTENTION.get(word),
            dtype=dtype,
            tiles=tiles,
        ),
    )


LAYOUTS = "trl-layouts"
"""The system that predicts jobs of which something is ``unknown``."""


def unknown(job: Job) -> str:
    """Return what of a job memo knows neither transformers' kernels nor kept tensors of; "" where it is nothing."""
    model, of = job.model, job.model.mixture
    plain = of is None or not (of.shared or of.bias or of.activation != "silu")
    known = of is None or (plain and job.pins.recompute == "full" and (job.pins.tp or 1) == 1)
    parts = {
        "adapters": job.adapters != "none",
        "experts": not known,
        "latent attention": model.latent is not None,
        "attention sinks": model.sinks,
        "layers that differ": len(model.layer_shapes) > 1,
        **dict.fromkeys(gemma_parts(model), True),
    }
    return ", ".join(what for what, has in parts.items() if has)


def model_files(job: Job) -> dict[str, str]:
    """Return the model's shape as ``config.json``, which an import reads."""
    return {CONFIG: json.dumps(config_of(job.model, job.seq_tokens), indent=2, sort_keys=True) + "\n"}


def model_variable(job: Job) -> str:
    """Return the lines of a script that say which weights a job starts from."""
    name = hub_name(job.model)
    return f"# Weights: a folder or a name on the hub, of the shape in {CONFIG}.\nMODEL=${{MODEL:-{name or '.'}}}\n"


def tiles_of(job: Job) -> dict[str, int]:
    """Return the options of the exported program that cut loss and MLP into tiles."""
    pins = job.pins
    local = job.micro_batch * job.seq_tokens // ((pins.cp or 1) * (pins.ulysses or 1))
    one = local if job.loss in ("blocks", "checkpointed") else 0
    said = {"loss_tokens": pins.loss_chunk_tokens or one, "mlp_tokens": pins.mlp_chunk_tokens}
    return {name: tokens for name, tokens in said.items() if tokens}


def files(job: Job, launch: Launch, header: tuple[str, ...]) -> dict[str, str]:
    """Return accelerate's configuration, the program, and the script that starts it."""
    values = arguments_of(job)
    if (job.pins.tp or 1) > 1:
        values["tp_size"] = job.pins.tp
    values |= tiles_of(job)
    start = [TRAIN, "--model_name_or_path", '"${MODEL}"', *flags(values), "--output_dir", "output", '"$@"']
    return {
        ACCELERATE: yaml_text(accelerate_yaml(job, launch.devices, launch.nodes), header),
        TRAIN: TRAIN_TEXT,
        LAUNCH: launch.script(start, header=header, before=model_variable(job), accelerate=ACCELERATE, inside=True),
        **model_files(job),
    }


def reads(source: Source) -> bool:
    """Return whether a file is accelerate's configuration, or part of a job that it starts."""
    return kind_of(source) in ("accelerate", "deepspeed", "model", "script") or is_program(source)


def is_program(source: Source) -> bool:
    """Return whether a file is a training program of Hugging Face's trainers; what it does is not read."""
    return source.name.endswith(".py") and ("TrainingArguments" in source.text or "accelerate" in source.text)


def read(sources: tuple[Source, ...], given: Mapping[str, str]) -> Read:
    """Return the job of accelerate's configuration and the command that it starts."""
    return read_files(sources, given, "accelerate")


FRAMEWORK = Framework(
    name="accelerate",
    title="accelerate",
    version="accelerate 1.15 with transformers 5.23",
    system="trl-fsdp2",
    layouts=LAYOUTS,
    unknown=unknown,
    sayings=sayings(_OF_ACCELERATE),
    jobs=jobs,
    files=files,
    reads=reads,
    read=read,
)
