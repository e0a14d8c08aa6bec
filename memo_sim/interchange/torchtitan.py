"""torchtitan: Python recipes of 0.3.0 both ways, and the TOML files of earlier versions as they are read.

Sources, in torchtitan 0.3.0: ``config/configs.py``, ``trainer.py``, ``components/loss.py``,
``components/optimizer/optimizer.py``, ``distributed/activation_checkpoint.py``, ``distributed/fsdp.py``,
``distributed/pipeline_parallel.py``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec

from memo_sim.contract.attention_kernels import ATTENTION_KERNELS
from memo_sim.contract.errors import BadInput, UsageError, did_you_mean
from memo_sim.contract.knobs import Pins, Recompute, Schedule, States
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.units import counted
from memo_sim.interchange.framework import Framework, Read, Source
from memo_sim.interchange.job import Job, moments_as_parameters
from memo_sim.interchange.model_names import model_of
from memo_sim.interchange.model_parts import check_written
from memo_sim.interchange.python_recipe import MADE_BY, functions_of, settings_of
from memo_sim.interchange.settings import DEVICES, MODEL, Settings, devices_of, flat, overrides
from memo_sim.interchange.settings import RECIPE as RECIPE_NAME
from memo_sim.interchange.torchtitan_recipe import FLAVORS, NAME, RECIPE, VARLEN, model_of_flavor, recipe, takes_varlen
from memo_sim.interchange.torchtitan_words import (
    RECOMPUTES,
    SAYINGS,
    SCHEDULES,
    STEPPING,
    chunk_of_loss,
)
from memo_sim.program.layout.stage import layers_of_runs

LAUNCH = "train.sh"
LOSS_CHUNKS = 8
"""Chunks of the loss unless a recipe says more (``ChunkedLossWrapper``); tried where a plan cannot be said as it is."""

_TWO_CHUNKS = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "LoopedBFS")
_FLAG = re.compile(r"--([a-z_]+(?:\.[a-z_]+)+)(?:[= ]+|$)([^\s\\]*)")
_NAMED = re.compile(r"--(module|config)[= ]+([\w.]+)")
_CONVERTED = {
    True: "no framework's adapters are known: priced as training of all parameters",
    False: "memo does not read 8-bit products: the job is priced in bf16",
}
_DATA = ("checkpoint", "dataloader", "validator", "metrics", "profiler", "lr_scheduler", "comm", "tokenizer")


def jobs(decisions: Decisions) -> tuple[Job, ...]:
    """Return the jobs that come nearest to a plan.

    Raises:
        UsageError: when torchtitan has no model of this shape, or cannot train it in stages.
    """
    check_written(decisions, "torchtitan", "--to megatron-lm, or memo-exec runs the plan itself")
    model, layout = decisions.model, decisions.layout
    alike = len(model.layer_shapes) == 1
    if model.family != "llama" or model.qkv_bias or model.linear_bias or model.bidirectional or not alike:
        raise UsageError(
            "torchtitan has no model of this shape",
            got=model.name,
            wanted="a Llama or Qwen3 without biases, with layers of one kind",
            hint="--to megatron-lm" if alike else "memo-exec runs the plan itself",
        )
    if model.tied_embeddings and layout.pp > 1:
        raise UsageError(
            "torchtitan has no pipeline stages for tied embeddings",
            where="layout.pp",
            got=str(layout.pp),
            wanted="1",
            hint="search a plan with --pp 1",
        )
    kernels = decisions.kernels
    rowwise = (kernels.rowwise,) if kernels.rowwise in ("eager", "compiled") else ("eager", "compiled")
    recomputes: tuple[Recompute, ...] = (decisions.recompute,)
    if decisions.recompute not in RECOMPUTES:
        recomputes = ("full", "operators")
    elif decisions.recompute == "none" and decisions.swapped_tokens:
        recomputes = ("full", "operators", "none")
    local = decisions.micro_batch * decisions.seq_tokens
    cut = tuple(dict.fromkeys((decisions.loss_chunk_tokens, local // LOSS_CHUNKS)))
    return tuple(
        _job(
            decisions, divided, row, recompute, chunk=min(chunk, local // divided.cp // LOSS_CHUNKS) if again else chunk
        )
        for divided, row, recompute, (again, chunk) in product(_layouts(layout), rowwise, recomputes, enumerate(cut))
    )


def _layouts(layout: Layout) -> tuple[Layout, ...]:
    """Return the layouts that come nearest, with the same devices: what Ulysses and METP divide, cp or tp divides."""
    cp, zero, ranks = layout.cp * layout.ulysses, layout.zero, layout.zero_ranks
    tried = [(layout.tp * layout.metp, cp), (layout.tp, cp * layout.metp)] if layout.metp > 1 else [(layout.tp, cp)]
    schedule, chunks = layout.schedule, layout.virtual_stages
    if schedule not in SCHEDULES.values():
        schedule, chunks = "1f1b", 1
    found = list[Layout]()
    for tp, wide in tried:
        shards = 1
        if wide * layout.dp > 1:
            shards = (ranks if ranks % wide == 0 else 0) or wide * layout.dp
            if zero == 0 and wide == 1:
                shards = 1
        found.append(
            msgspec.structs.replace(
                layout,
                tp=tp,
                sequence_parallel=tp > 1 and (layout.sequence_parallel or layout.tp == 1),
                cp=wide,
                cp_exchange="all_gather" if wide > 1 else "ring",
                ulysses=1,
                uneven_heads=False,
                metp=1,
                zero=_zero(zero, staged=layout.pp > 1) if shards > 1 else 0,
                zero_ranks=shards if 1 < shards < wide * layout.dp else 0,
                schedule=schedule,
                virtual_stages=chunks,
                pp_layers=layout.pp_layers if len(layout.pp_layers) in (0, layout.pp * chunks) else (),
                subsequences=1,
                multiplexed=False,
                partition="flops",
            )
        )
    return tuple(found)


def _zero(zero: int, *, staged: bool) -> int:
    """Return the level of ZeRO that FSDP2 comes nearest to; with stages memo's 1 stands for it."""
    if staged:
        return 1
    return {0: 3, 1: 2}.get(zero, zero)


def _job(decisions: Decisions, layout: Layout, rowwise: str, recompute: Recompute, *, chunk: int) -> Job:
    local = decisions.micro_batch * decisions.seq_tokens // layout.cp
    states, kernels = moments_as_parameters(decisions.states), decisions.kernels
    adamw = kernels.adamw if kernels.rowwise in ("eager", "compiled") else "fused"
    full = recompute == decisions.recompute == "full"
    choice = decisions.recompute_layers if full else "all"
    pins = Pins(
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        tp_overlap=layout.tp_overlap if rowwise == "compiled" and layout.tp > 1 else "none",
        cp=layout.cp,
        pp=layout.pp,
        pp_layers=layout.pp_layers or None,
        schedule=layout.schedule if layout.pp > 1 else None,
        virtual_stages=layout.virtual_stages if layout.pp > 1 else None,
        dp=layout.dp,
        zero=layout.zero,
        zero_ranks=layout.zero_ranks or None,
        recompute=recompute,
        recompute_layers="all" if choice.startswith("groups-") else choice,
        loss_chunk_tokens=chunk_of_loss(local, chunk)[1],
        rowwise="compiled" if rowwise == "compiled" else "eager",
        adamw="fused" if states == "bf16" else adamw,
        cuda_graphs=decisions.cuda_graphs and layout.pp == 1,
        dtype="fp32" if decisions.dtype == "fp32" else "bf16",
    )
    generation = ATTENTION_KERNELS[kernels.attention].generation
    if generation in VARLEN and takes_varlen(pins):
        pins = replace(pins, attention=generation)
    return Job(
        model=decisions.model,
        seq_tokens=decisions.seq_tokens,
        micro_batch=decisions.micro_batch,
        global_batch=decisions.global_batch,
        pins=pins,
        deterministic=decisions.deterministic,
        states=states,
    )


def stage_layers(job: Job) -> tuple[int, ...]:
    """Return the number of layers of each run of layers, in the order of the model."""
    pins = job.pins
    layout = Layout(
        pp=pins.pp or 1,
        virtual_stages=pins.virtual_stages or 1,
        schedule=pins.schedule or "1f1b",
        pp_layers=pins.pp_layers or (),
    )
    return layers_of_runs(Decisions(model=job.model, seq_tokens=job.seq_tokens, layout=layout))


def files(job: Job, launch: Any, header: tuple[str, ...]) -> dict[str, str]:
    """Return the recipe and the script that starts it."""
    command = (
        "-m",
        "torchtitan.train",
        "--module",
        NAME,
        "--config",
        NAME,
        "--hf_assets_path",
        '"${ASSETS}"',
        '"$@"',
    )
    script = launch.script(
        command,
        header=header,
        inside=True,
        environment={"PYTHONPATH": '"${PWD}${PYTHONPATH:+:${PYTHONPATH}}"'},
        before="# The model's tokenizer (and weights), as torchtitan's scripts/download_hf_assets.py fetches them.\n"
        "ASSETS=${ASSETS:-./assets}\n",
    )
    return {RECIPE: recipe(job, stage_layers(job), header), LAUNCH: script}


def reads(source: Source) -> bool:
    """Return whether a file is a recipe or TOML of torchtitan, or a script that starts it."""
    text = source.text
    if source.name.endswith(".toml"):
        return "[parallelism]" in text or ("[training]" in text and "[model]" in text)
    if source.name.endswith(".py"):
        return "torchtitan" in text or ("Trainer.Config" in text and "model_registry" in text)
    return "torchtitan.train" in text or "torchtitan/train.py" in text


def read(sources: tuple[Source, ...], given: Mapping[str, str]) -> Read:
    """Return the job of a recipe or TOML file, with the overrides of a script that starts it.

    Raises:
        BadInput: when a file cannot be read, or leaves open what a job needs.
    """
    scripts = [source for source in sources if not source.name.endswith((".py", ".toml", ".json"))]
    started = {key: value for script in scripts for key, value in _NAMED.findall(script.text)}
    changed = {key: value or "true" for script in scripts for key, value in _FLAG.findall(script.text)}
    main = next((source for source in sources if source.name.endswith((".py", ".toml"))), None)
    if main is None:
        raise BadInput(
            "the script names a recipe that is not among the files",
            where=sources[0].name,
            got=" ".join(started.values()) or "no recipe",
            wanted="the recipe's Python file, or the TOML file",
            hint="name it beside the script",
        )
    if main.name.endswith(".toml"):
        values, flavor, graphs = _of_toml(main), None, False
    else:
        values, flavor = _of_recipe(main, started, given)
        graphs = True
    values |= changed | overrides(given)
    settings = Settings(values, main.name)
    return _read(settings, sources, given, flavor, graphs=graphs)


def _of_toml(source: Source) -> dict[str, Any]:
    try:
        return flat(tomllib.loads(source.text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInput("not a TOML file", where=source.name, got=str(error), hint="check the line it names") from None


def _of_recipe(
    source: Source, started: Mapping[str, str], given: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[str, str] | None]:
    """Return the settings of a recipe, and module and flavor of its model where the recipe's name says them."""
    functions = functions_of(source.text, source.name)
    asked = given.get(RECIPE_NAME) or started.get("config")
    if asked is None and len(functions) == 1:
        asked = next(iter(functions))
    if asked not in functions:
        raise BadInput(
            "no such recipe in the file" if asked else "the file has several recipes",
            where=source.name,
            got=asked or f"{len(functions)} functions without parameters",
            wanted=", ".join(functions) or "a function that returns a Trainer.Config",
            hint=(did_you_mean(asked, functions) if asked else None) or f"--set {RECIPE_NAME}=NAME",
        )
    values = settings_of(asked, functions)
    module = _module(source, [started.get("module", ""), asked, *functions])
    named = next((str(values[key]) for key in ("model_spec.0", "model_spec.flavor") if key in values), None)
    return values, (module, named) if named else None


def _module(source: Source, names: Sequence[str]) -> str:
    """Return the module of torchtitan's models that a recipe takes its own from: as imported, else as it is called."""
    imported = re.findall(r"from torchtitan\.models\.(\w+) import", source.text)
    folder = source.name.replace("\\", "/").rpartition("/")[0].rpartition("/")[2]
    known = {module for module, _ in FLAVORS}
    called = [word for name in (folder, *names) for word in (name.rpartition(".")[2], name.partition("_")[0])]
    return next((word for word in (*imported, *called) if word in known), names[1].partition("_")[0])


def _read(
    settings: Settings,
    sources: tuple[Source, ...],
    given: Mapping[str, str],
    flavor: tuple[str, str] | None,
    *,
    graphs: bool,
) -> Read:
    assumed = list[str]()
    model = _model(settings, sources, given, flavor)
    degree = {
        name: _first(settings, *keys) or 1
        for name, keys in {
            "tp": ("parallelism.tensor_parallel_degree", "training.tensor_parallel_degree"),
            "cp": ("parallelism.context_parallel_degree", "experimental.context_parallel_degree"),
            "pp": ("parallelism.pipeline_parallel_degree", "experimental.pipeline_parallel_degree"),
            "replicate": ("parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree"),
        }.items()
    }
    for name in ("tp", "cp", "pp"):
        _says_degree(settings, name, degree[name])
    shard = _shard(settings, degree, given)
    dp = degree["replicate"] * shard
    staged = degree["pp"] > 1
    zero, zero_ranks = _read_zero(settings, degree, shard, staged=staged)
    seq_tokens = _seq_tokens(settings, assumed)
    micro_batch, global_batch = _batch(settings, dp, seq_tokens, assumed, staged=staged)
    recompute, choice = _recompute(settings, assumed)
    compiled = settings.flag("compile.enable", settings.flag("training.compile"))
    settings.says("compile.enable", f"rowwise {'compiled' if compiled else 'eager'}")
    asynchronous = settings.flag(
        "compile.enable_async_tensor_parallel", settings.flag("parallelism.enable_async_tensor_parallel")
    )
    states, adamw = _optimizer(settings)
    schedule, chunks, pp_layers = _stages(settings, model, degree["pp"], assumed)
    local = micro_batch * seq_tokens // degree["cp"]
    enabled = not settings.flag("training.disable_cuda_graphs", default=not graphs)
    settings.says("training.disable_cuda_graphs", f"cuda_graphs {'on' if enabled else 'off'}")
    narrow = settings.text("training.mixed_precision_param") == "float32"
    settings.says("training.mixed_precision_param", f"dtype {'fp32' if narrow else 'bf16'}")
    pins = Pins(
        tp=degree["tp"],
        sequence_parallel=settings.flag("parallelism.enable_sequence_parallel", default=True) and degree["tp"] > 1,
        tp_overlap="chunked" if asynchronous and compiled and degree["tp"] > 1 else "none",
        cp=degree["cp"],
        pp=degree["pp"],
        pp_layers=pp_layers,
        schedule=schedule,
        virtual_stages=chunks,
        dp=dp,
        zero=zero,
        zero_ranks=zero_ranks,
        recompute=recompute,
        recompute_layers=choice,
        loss_chunk_tokens=_loss(settings, local),
        rowwise="compiled" if compiled else "eager",
        adamw=adamw,
        cuda_graphs=enabled and not staged,
        dtype="fp32" if narrow else "bf16",
    )
    checked = re.search(r"get_cuda_flash_attention_impl\(\) == \"(\w+)\"", sources[0].text)
    if checked and takes_varlen(pins):
        pins = replace(pins, attention=next((kernel for kernel, name in VARLEN.items() if name == checked[1]), None))
    job = Job(
        model=model,
        seq_tokens=seq_tokens,
        micro_batch=micro_batch,
        global_batch=global_batch,
        pins=pins,
        deterministic=settings.flag("debug.deterministic", settings.flag("training.deterministic")),
        states=states,
    )
    settings.says("debug.deterministic", f"deterministic {'on' if job.deterministic else 'off'}")
    settings.says(
        "parallelism.enable_sequence_parallel", f"sequence_parallel {'on' if pins.sequence_parallel else 'off'}"
    )
    balancer = "parallelism.context_parallel_load_balancer"
    if settings.text(balancer) != "headtail" and settings.has(balancer) and degree["cp"] > 1:
        settings.ignore(balancer, "memo has zigzag chunks (headtail) alone")
    if not settings.has("parallelism.data_parallel_shard_degree") and dp > 1:
        assumed.append(f"data_parallel_shard_degree is -1, torchtitan's default: dp {dp}")
    if graphs:
        if "training.disable_cuda_graphs" not in settings.values and pins.cuda_graphs:
            assumed.append("CUDA graphs are on, torchtitan's default")
        if pins.attention is None:
            assumed.append("its attention (FlexAttention, or varlen) is priced as torch's flash attention")
    _explain_ignored(settings)
    return Read(
        framework=FRAMEWORK.name,
        job=job,
        devices=degree["tp"] * degree["cp"] * degree["pp"] * dp,
        read=tuple(settings.read),
        ignored=settings.ignored,
        assumed=tuple(assumed),
    )


def _first(settings: Settings, *keys: str) -> int | None:
    """Return the number under the first of the keys that the file has; later versions renamed sections."""
    return next((settings.whole(key) for key in keys if settings.has(key)), None)


def _says_degree(settings: Settings, name: str, value: int) -> None:
    long = {"tp": "tensor", "cp": "context", "pp": "pipeline"}[name]
    for part in ("parallelism", "training", "experimental"):
        settings.says(f"{part}.{long}_parallel_degree", f"{name} {value}")


def _model(
    settings: Settings, sources: tuple[Source, ...], given: Mapping[str, str], flavor: tuple[str, str] | None
) -> Model:
    """Return the model: the one given, that of a flavor, or the shape that an exported recipe lists."""
    for key in ("model.name", "model.flavor", "model_spec.0", "model_spec.flavor", f"model_spec{MADE_BY}"):
        settings.raw(key)
    name, size = settings.text("model.name"), settings.text("model.flavor")
    if flavor is None and name and size:
        flavor = (name, size)
    if flavor is not None and MODEL not in given:
        found = model_of_flavor(*flavor)
        if found is not None:
            settings.says("model_spec.0", f"the model {found.name}")
            settings.says("model.flavor", f"the model {found.name}")
            return found
    listed = {key.removeprefix("model_spec."): settings.raw(key) for key in settings.values if _is_shape(key)}
    if listed and MODEL not in given:
        return _shape(listed, settings.where)
    return model_of(sources, given, f"{flavor[0]} {flavor[1]}" if flavor else None)


_SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab", "tied_embeddings")
_SHAPE_KEYS = {f"model_spec.{name}" for name in (*_SHAPE, "norm_eps", "rope_theta", "qk_norm")}


def _is_shape(key: str) -> bool:
    return key in _SHAPE_KEYS


def _shape(listed: Mapping[str, Any], where: str) -> Model:
    try:
        fields = {"schema": "memo.model/1", "name": "torchtitan", "family": "llama", "activation": "silu", **listed}
        return msgspec.convert(fields, Model)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise BadInput("the recipe's model has no shape that memo knows", where=where, got=str(error)) from None


def _shard(settings: Settings, degree: Mapping[str, int], given: Mapping[str, str]) -> int:
    """Return ``data_parallel_shard_degree``; -1 is what the other degrees leave of the devices.

    Raises:
        BadInput: when the devices are not known, or are no multiple of the other degrees.
    """
    keys = ("parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree")
    key = next((key for key in keys if settings.has(key)), "training.data_parallel_degree")
    text = settings.text(key)
    if text is not None and text != "-1":
        value = settings.whole(key) or 1
        settings.says(key, f"dp {value * degree['replicate']}")
        return value
    known = devices_of(given, None)
    others = degree["tp"] * degree["cp"] * degree["pp"] * degree["replicate"]
    if known is None or known % others:
        raise BadInput(
            "the recipe runs on whatever devices there are"
            if known is None
            else "the devices are no multiple of the degrees",
            where=f"{settings.where}: {key}",
            got=text or "nothing" if known is None else f"{known} devices, degrees of {others}",
            wanted=f"a number of devices that is a multiple of {others}",
            hint=f"--set {DEVICES}=8",
        )
    settings.says(key, f"dp {known // others * degree['replicate']} of {known} devices")
    return known // others


def _read_zero(settings: Settings, degree: Mapping[str, int], shard: int, *, staged: bool) -> tuple[int, int | None]:
    """Return the level of ZeRO, and the ranks it divides over where copies of the shards are kept (HSDP)."""
    key = "parallelism.fsdp_reshard_after_forward"
    stays = settings.text(key) == "never"
    shards = shard * degree["cp"]
    zero = (1 if staged else 2 if stays else 3) if shards > 1 else 0
    settings.says(key, f"zero {zero}")
    replicate = "parallelism.data_parallel_replicate_degree"
    settings.says(
        replicate, f"each shard on {counted(degree['replicate'], 'rank')}" if shards > 1 else "dp without ZeRO"
    )
    return zero, shards if degree["replicate"] > 1 and shards > 1 else None


def _seq_tokens(settings: Settings, assumed: list[str]) -> int:
    for key in ("training.seq_len", "training.max_context_length"):
        tokens = settings.whole(key)
        if tokens is not None:
            settings.says(key, f"sequences of {tokens} tokens")
            return tokens
    assumed.append("training.seq_len is 2048, torchtitan's default")
    return 2048


def _batch(settings: Settings, dp: int, seq_tokens: int, assumed: list[str], *, staged: bool) -> tuple[int, int]:
    """Return the sequences of a micro-batch and of a step."""
    local = _first(settings, "training.local_batch_size", "training.batch_size")
    budget = settings.whole("training.num_tokens_per_microbatch_per_dp_rank")
    if budget is not None:
        local = max(budget // seq_tokens, 1)
        settings.says(
            "training.num_tokens_per_microbatch_per_dp_rank", f"micro-batches of {counted(local, 'sequence')}"
        )
    if local is None:
        local = 8
        assumed.append("training.local_batch_size is 8, torchtitan's default")
    micro = local
    if staged:
        key = "parallelism.pipeline_parallel_microbatch_size"
        micro = _first(settings, key, "experimental.pipeline_parallel_microbatch_size") or 1
        settings.says(key, f"micro-batches of {counted(micro, 'sequence')}")
    said = (
        f"{counted(local // micro, 'micro-batch', 'es')} of {micro}"
        if staged
        else f"micro-batches of {counted(micro, 'sequence')}"
    )
    settings.says("training.local_batch_size", said)
    settings.says("training.batch_size", said)
    step = settings.text("training.global_batch_size")
    whole = local * dp if step in (None, "-1") else settings.whole("training.global_batch_size") or local * dp
    tokens = settings.whole("training.num_tokens_per_train_step")
    if tokens is not None:
        whole = max(tokens // seq_tokens, 1)
        settings.says("training.num_tokens_per_train_step", f"{counted(whole, 'sequence')} a step")
    settings.says("training.global_batch_size", f"{counted(whole, 'sequence')} a step")
    return micro, whole


def _recompute(settings: Settings, assumed: list[str]) -> tuple[Recompute, str]:
    """Return what is recomputed, and in which layers."""
    made, mode = f"activation_checkpoint{MADE_BY}", "activation_checkpoint.mode"
    kind = settings.text(made)
    if kind is not None:
        name = kind.removesuffix(".Config").rpartition(".")[2]
        every, first = settings.whole("activation_checkpoint.every"), settings.whole("activation_checkpoint.first")
        choice = f"every-{every}" if every else f"first-{first}" if first else "all"
        found: Recompute | None = {"FullAC": "full", "SelectiveAC": "operators", "SomeLayersAC": "full"}.get(name)  # type: ignore[assignment]
        if found is None:
            settings.ignore(made, "memo has no such policy; operators is assumed")
            return "operators", "all"
        settings.says(made, f"recompute {found}" + ("" if choice == "all" else f", layers {choice}"))
        return found, choice
    if mode in settings.values:
        return _mode(settings, mode)
    if "activation_checkpoint" in settings.values:
        settings.raw("activation_checkpoint")
        return "none", "all"
    assumed.append("activation_checkpoint is SelectiveAC, torchtitan's default: recompute operators")
    return "operators", "all"


def _mode(settings: Settings, key: str) -> tuple[Recompute, str]:
    """Return the recompute of a TOML file, whose selective option counts layers or names operators."""
    mode = str(settings.values[key])
    option_key = next(
        (
            k
            for k in ("activation_checkpoint.selective_ac_option", "activation_checkpoint.selective_ac")
            if settings.has(k)
        ),
        "",
    )
    option = settings.text(option_key) if option_key else None
    settings.raw(key)
    if mode == "selective":
        layers = option is not None and option.isdigit() and int(option) > 0
        found: tuple[Recompute, str] = (
            ("full", f"every-{option}" if option != "1" else "all") if layers else ("operators", "all")
        )
        settings.says(key, f"recompute {found[0]}")
        settings.says(option_key, f"layers {found[1]}" if layers else "recompute operators")
        return found
    if mode not in ("full", "none"):
        settings.ignore(key, "memo has no such mode; operators is assumed")
        return "operators", "all"
    settings.says(key, f"recompute {mode}")
    settings.ignore(option_key, f"has no effect with mode {mode}")
    return ("full" if mode == "full" else "none"), "all"


def _optimizer(settings: Settings) -> tuple[States, Any]:
    key = "optimizer.implementation"
    word = settings.text(key) or ("foreach" if settings.flag("optimizer.foreach") else "fused")
    adamw = "fused" if word.startswith("fused") else "foreach"
    states: States = "bf16" if word == "fused_opt_states_bf16" else "fp32"
    if settings.text("training.dtype") == "bfloat16":
        states = "pure-bf16"
    elif settings.flag("training.enable_cpu_offload"):
        states = "host"
    settings.says(key, f"adamw {adamw}" + (", states bf16" if states == "bf16" else ""))
    settings.says("training.dtype", f"states {states}")
    settings.says("training.enable_cpu_offload", f"states {states}")
    return states, adamw


def _stages(
    settings: Settings, model: Model, pp: int, assumed: list[str]
) -> tuple[Schedule | None, int | None, tuple[int, ...] | None]:
    """Return the schedule, the chunks of a stage, and the layers of each chunk where they are not memo's own."""
    key = "parallelism.pipeline_parallel_schedule"
    word = settings.text(key) or settings.text("experimental.pipeline_parallel_schedule") or "1F1B"
    parts = settings.raw("parallelism.module_fqns_per_model_part")
    each = settings.whole("parallelism.pipeline_parallel_layers_per_stage")
    first = settings.whole("parallelism.pipeline_parallel_first_stage_less_layers", least=0)
    last = settings.whole("parallelism.pipeline_parallel_last_stage_less_layers", least=0)
    if pp == 1:
        return None, None, None
    known = {name.lower(): (name, schedule) for name, schedule in SCHEDULES.items()}
    _, schedule = known.get(word.lower(), (word, None))
    if schedule is None:
        schedule = "interleaved" if word in _TWO_CHUNKS else "1f1b"
        settings.ignore(key, f"memo has no such schedule; {schedule} is assumed")
    else:
        settings.says(key, f"schedule {schedule}")
    begin, end = 1 if first is None else first, 1 if last is None else last
    runs = 2 * pp if schedule == "interleaved" else pp
    if isinstance(parts, list):
        counts = tuple(
            sum(str(name).startswith("layers.") for name in part) for part in parts if isinstance(part, list)
        )
        runs = len(counts)
        settings.says("parallelism.module_fqns_per_model_part", f"pp_layers {', '.join(map(str, counts))}")
    else:
        if each is not None:
            runs = -(-(model.layers + begin + end) // each)
        counts = split_of(model.layers, runs, begin, end)
        assumed.append(f"layers of the stages as torchtitan divides them: {', '.join(map(str, counts))}")
    if runs % pp or not runs or any(count < 1 for count in counts):
        raise BadInput(
            "the stages do not divide the layers",
            where=f"{settings.where}: parallelism",
            got=", ".join(map(str, counts)) or "no stages",
            wanted=f"a multiple of {pp} stages, each with layers",
        )
    chunks = runs // pp
    own = stage_layers(Job(model=model, seq_tokens=1, pins=Pins(pp=pp, schedule=schedule, virtual_stages=chunks)))
    return schedule, chunks, None if counts == own else counts


def split_of(layers: int, stages: int, first: int, last: int) -> tuple[int, ...]:
    """Return how torchtitan divides layers over stages: embedding and head count as ``first`` and ``last`` layers."""
    least, extra = divmod(layers + first + last, stages)
    found = [least + (stage < extra) for stage in range(stages)]
    found[0] -= first
    found[-1] -= last
    return tuple(found)


def _loss(settings: Settings, local_tokens: int) -> int:
    made = f"loss{MADE_BY}"
    kind = settings.text(made) or ""
    if "Chunked" not in kind:
        settings.says(made, "all logits at once")
        return 0
    count = settings.whole("loss.num_chunks") or LOSS_CHUNKS
    chunk = local_tokens // count if count > 1 else 0
    settings.says(made, f"loss_chunk_tokens {chunk}")
    settings.says("loss.num_chunks", f"loss_chunk_tokens {chunk}")
    for key in [key for key in settings.values if key.startswith("loss.loss_fn")]:
        settings.raw(key)
    return chunk


def _explain_ignored(settings: Settings) -> None:
    for key in [key for key in settings.values if key.startswith(("model_spec.", "loss.global_vocab_size"))]:
        settings.raw(key)
    for key in settings.values:
        part = key.partition(".")[0].removesuffix(MADE_BY)
        if part in _DATA:
            settings.ignore(key, STEPPING if part in ("checkpoint", "validator") else "says nothing about a step")
        elif key.endswith(MADE_BY) and not settings.values[key].startswith("quantiz"):
            settings.raw(key)
    converters = str(settings.values.get("model_spec.converters", ""))
    settings.ignore("model_spec.converters", _CONVERTED.get("LoRA" in converters, ""))
    quantized = [key for key in settings.values if "float8" in key.lower() or "mx" in key.lower() or "quantize" in key]
    settings.ignore(quantized, "memo does not read 8-bit products: the job is priced in bf16")
    settings.ignore(
        ("parallelism.expert_parallel_degree", "parallelism.expert_tensor_parallel_degree"),
        "of experts, which the model does not have",
    )


FRAMEWORK = Framework(
    name="torchtitan",
    title="torchtitan",
    version="torchtitan 0.3.0",
    system="torchtitan",
    sayings=SAYINGS,
    jobs=jobs,
    files=files,
    reads=reads,
    read=read,
)
__all__ = ["FLAVORS", "FRAMEWORK", "files", "jobs", "read", "reads", "split_of", "stage_layers"]
