"""Reads what Hugging Face's trainers are started with: arguments or options, accelerate's YAML, DeepSpeed's JSON.

All three may say the same thing; what a command line says wins, then the arguments, then DeepSpeed, then accelerate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memo_sim.contract.adapters import NONE
from memo_sim.contract.errors import BadInput
from memo_sim.contract.knobs import GradSums, Loss, Pins, Recompute, States
from memo_sim.contract.units import counted, parse_tokens
from memo_sim.interchange.framework import Read, Source
from memo_sim.interchange.hf_words import ATTENTION, OPTIMIZERS, SDPA, TORCH_DTYPES
from memo_sim.interchange.job import Job
from memo_sim.interchange.model_names import CONFIG, model_of
from memo_sim.interchange.peft_words import KEYS, OTHERS, read_adapters
from memo_sim.interchange.settings import DEVICES, LENGTH, Settings, devices_of, flat, overrides
from memo_sim.interchange.shell_script import is_unresolved, read_script, shown
from memo_sim.interchange.yaml_file import read_yaml

LENGTHS = ("max_length", "max_seq_length", "max_seq_len", "seq_length", "seq_len", "model_max_length", "block_size")
_NAMES = ("model_name_or_path", "model_name", "model_id", "model", "pretrained_model_name_or_path")
_QUANTIZED = ("load_in_4bit", "load_in_8bit", "use_bnb_nested_quant", "bnb_4bit_quant_type", "bnb_4bit_quant_storage")
_STARTERS = ("accelerate", "trl", "deepspeed", "torchrun", "python", "python3")
_DEEPSPEED = (
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "zero_allow_untested_optimizer",
)


@dataclass
class Files:
    """The settings of each kind of file; empty where there is none."""

    arguments: dict[str, Any] = field(default_factory=dict)
    accelerate: dict[str, Any] = field(default_factory=dict)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """Name of the file that each of them is from."""
    devices: int = 0
    left_out: list[str] = field(default_factory=list)
    """What a script does that only running it would tell."""
    trl: bool = False
    """Whether TRL is started, whose defaults differ."""
    policy: bool = False
    """Whether it is TRL's GRPO."""


Kind = Literal["accelerate", "deepspeed", "arguments", "model", "script", "none"]


def kind_of(source: Source) -> Kind:
    """Return what a file is: which part of a job it says."""
    if source.name.endswith(".json"):
        if '"model_type"' in source.text:
            return "model"
        if any(f'"{key}"' in source.text for key in _DEEPSPEED):
            return "deepspeed"
        return "accelerate" if '"distributed_type"' in source.text else "none"
    if source.name.endswith((".yaml", ".yml")):
        if "distributed_type:" in source.text or "compute_environment:" in source.text:
            return "accelerate"
        said = any(f"{key}:" in source.text for key in ("per_device_train_batch_size", "model_name_or_path", *LENGTHS))
        return "arguments" if said else "none"
    words = (
        "accelerate launch",
        "trl sft",
        "trl grpo",
        "trl.scripts",
        "--deepspeed",
        "deepspeed ",
        "--per_device_train_batch_size",
    )
    return "script" if any(word in source.text for word in words) else "none"


def files_of(sources: tuple[Source, ...], given: Mapping[str, str]) -> Files:
    """Return the settings of the files.

    Raises:
        BadInput: when one cannot be read.
    """
    files = Files()
    scripts = [source for source in sources if kind_of(source) == "script"]
    for source in sources:
        kind = kind_of(source)
        if kind == "deepspeed" or (kind == "accelerate" and source.name.endswith(".json")):
            _put(files, kind, _json(source), source.name)
        elif kind in ("accelerate", "arguments"):
            _put(files, kind, read_yaml(source), source.name)
    for source in scripts:
        _script(source, given, files)
    files.arguments |= overrides(given)
    return files


def _put(files: Files, kind: str, values: dict[str, Any], name: str) -> None:
    getattr(files, kind).update(values)
    files.names[kind] = name


def _json(source: Source) -> dict[str, Any]:
    try:
        values = json.loads(source.text)
    except (ValueError, RecursionError) as error:
        raise BadInput("not a JSON file", where=source.name, got=str(error), hint="check the line it names") from None
    if not isinstance(values, dict):
        raise BadInput("not a JSON object", where=source.name, got=type(values).__name__)
    return values


def _script(source: Source, given: Mapping[str, str], files: Files) -> None:
    """Add the options of the command that starts the training: the launcher's, then those of the program."""
    script = read_script(source.text, given, where=source.name)
    files.left_out += script.left_out
    found = next((words for words in script.commands if _starter(words) is not None), None)
    if found is None:
        return
    at = _starter(found) or 0
    starter, words = found[at].rpartition("/")[2].partition(".")[0], found[at + 1 :]
    program = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    if starter == "trl":
        files.trl, files.policy, program = True, words[:1] == ["grpo"], 0
    elif "-m" in words[:program]:
        program = words.index("-m") + 1
        files.trl = words[program].startswith("trl.") if program < len(words) else False
        files.policy = files.trl and words[program] == "trl.scripts.grpo"
    else:
        name = words[program].rpartition("/")[2] if program < len(words) else ""
        files.trl, files.policy = name in ("sft.py", "grpo.py"), name == "grpo.py"
    launcher, options = _options(words[:program]), _options(words[program + 1 :])
    for key in ("config_file", "accelerate_config", "config"):
        launcher.pop(key, None)
        options.pop(key, None)
    if starter == "accelerate":
        files.accelerate |= {key: value for key, value in launcher.items() if not is_unresolved(str(value))}
    elif starter in ("torchrun", "deepspeed"):
        nodes = _number(launcher.get("nnodes", launcher.get("num_nodes", 1)))
        each = _number(launcher.get("nproc_per_node", launcher.get("num_gpus", 0)))
        files.devices = (nodes or 1) * (each or 0)
    files.arguments |= {key: shown(str(value)) if isinstance(value, str) else value for key, value in options.items()}
    files.names.setdefault("arguments", source.name)


def _starter(words: list[str]) -> int | None:
    """Return where the program that starts the processes stands: the last one, as in ``srun python -m torchrun``."""
    module = next((i for i, word in enumerate(words) if word == "accelerate.commands.launch"), None)
    return (
        module
        if module is not None
        else next((i for i, word in enumerate(words) if word.rpartition("/")[2] in _STARTERS), None)
    )


def _number(value: Any) -> int | None:
    text = str(value).partition(":")[2] or str(value)
    return int(text) if text.isascii() and text.isdigit() else None


def _options(words: list[str]) -> dict[str, Any]:
    """Return options with their values: ``--name value``, ``--name=value``, or a flag that is true."""
    found = dict[str, Any]()
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("--") or len(word) < 3:
            continue
        name, sign, value = word[2:].partition("=")
        if not sign:
            values = list[str]()
            while index < len(words) and not words[index].startswith("--"):
                values.append(words[index])
                index += 1
            value = " ".join(values) if values else "true"
        found[name.replace("-", "_")] = value
    return found


@dataclass(frozen=True, slots=True)
class Parallel:
    """How accelerate or DeepSpeed divides a job, with what it says of precision, recompute and states."""

    tp: int = 1
    cp: int = 1
    ulysses: int = 1
    dp: int = 1
    zero: int = 0
    zero_ranks: int | None = None
    overlap: Literal["none", "gradients"] | None = None
    host: bool = False
    full: bool = False
    offload: bool = False
    precision: str | None = None
    pure: bool = False
    sums: GradSums = "auto"
    deepspeed: bool = False
    adamw: Any = None
    attention: str | None = None
    """``attn_implementation`` that the launcher's file names."""
    fsdp1: bool = False
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    devices: int = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """What is recomputed, in which layers, whether the inputs wait on the host, and whether modules are compiled."""

    recompute: Recompute
    layers: str
    offloaded: bool
    compiled: bool


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tokens of a tile of the loss and of the MLP, as the exported program cuts them; 0: all tokens at once."""

    loss_tokens: int = 0
    mlp_tokens: int = 0
    one_tile: bool = False
    """Whether the loss is one tile of all tokens, where ``loss_tokens`` is 0."""


def loss_of(parallel: Parallel, tiles: Tiles, *, trl: bool) -> Loss:
    """Return how a job computes its loss, by memo's name."""
    if trl:
        return "auto"
    if tiles.loss_tokens or tiles.one_tile:
        return "blocks" if parallel.deepspeed else "checkpointed"
    return "eager-fp32" if parallel.tp == 1 else "vocab-parallel"


def read_files(sources: tuple[Source, ...], given: Mapping[str, str], framework: str) -> Read:
    """Return the job of a set of files.

    Raises:
        BadInput: when one cannot be read, or they leave open what a job needs.
    """
    files = files_of(sources, given)
    where = ", ".join(dict.fromkeys(files.names.values())) or (sources[0].name if sources else "the files")
    accelerate = Settings(_lifted(files.accelerate), files.names.get("accelerate", where))
    deepspeed = Settings(flat(files.deepspeed), files.names.get("deepspeed", where))
    arguments = Settings(files.arguments, files.names.get("arguments", where))
    assumed = list[str]()
    trl = files.trl or framework == "trl"
    named = next((arguments.text(key) for key in _NAMES if arguments.has(key)), None)
    model = model_of(sources, given, named)
    for key in _NAMES:
        arguments.says(key, f"the model {model.name}")
    policy = files.policy or any(arguments.has(key) for key in _OF_GRPO)
    seq_tokens = _policy_length(arguments, given) if policy else _length(arguments, given, assumed, trl=trl)
    parallel = _parallel(accelerate, deepspeed, arguments, given, files)
    steps = _whole(arguments, "gradient_accumulation_steps") or parallel.accumulation
    micro_batch = _whole(arguments, "per_device_train_batch_size") or parallel.micro_batch
    if micro_batch is None and parallel.global_batch:
        micro_batch = max(parallel.global_batch // ((steps or 1) * parallel.dp), 1)
    elif micro_batch is None and arguments.has("batch_size"):
        micro_batch = _whole(arguments, "batch_size")
        arguments.says("batch_size", f"micro-batches of {counted(micro_batch or 1, 'sequence')}")
    if micro_batch is None:
        micro_batch = 8 if "arguments" in files.names else 1
        default = ", the default" if "arguments" in files.names else ""
        assumed.append(f"per_device_train_batch_size is {micro_batch}{default}")
    arguments.says("per_device_train_batch_size", f"micro-batches of {counted(micro_batch, 'sequence')}")
    whole = micro_batch * (steps or 1) * parallel.dp
    if steps is None and parallel.global_batch:
        whole = parallel.global_batch
    arguments.says("gradient_accumulation_steps", f"{counted(whole, 'sequence')} a step")
    if "arguments" in files.names and steps is None and not parallel.global_batch:
        assumed.append("gradient_accumulation_steps is 1, the default")
    recompute, layers, offloaded = _recompute(arguments, parallel, assumed, trl=trl)
    adapters = read_adapters(arguments, model, assumed) if trl and not parallel.deepspeed else NONE
    dtype, states, sums = _precision(arguments, parallel, assumed, trl=trl, adapted=adapters != NONE)
    adamw = _adamw(arguments, parallel)
    compiled = arguments.flag("torch_compile")
    arguments.says("torch_compile", f"rowwise {'compiled' if compiled else 'eager'}")
    attention = _attention(arguments, parallel)
    tiles = _tiles(arguments, micro_batch * seq_tokens // (parallel.cp * parallel.ulysses))
    job = Job(
        model=model,
        seq_tokens=seq_tokens,
        micro_batch=micro_batch,
        global_batch=whole,
        states=states,
        grad_sums=sums,
        objective="grpo" if policy else "next-token",
        adapters=adapters,
        loss=_policy_loss(arguments, parallel) if policy else loss_of(parallel, tiles, trl=trl),
        deterministic=arguments.flag("full_determinism"),
        pins=pins_of(
            parallel,
            Choice(recompute, layers, offloaded, compiled),
            adamw=adamw,
            attention=attention,
            dtype=dtype,
            tiles=_policy_tiles(arguments, seq_tokens) if policy else None if trl else tiles,
        ),
    )
    arguments.says("full_determinism", f"deterministic {'on' if job.deterministic else 'off'}")
    for key in ("sequence_parallel_size", "tp_size"):  # the other files say so too
        arguments.raw(key)
    if policy:
        _explain_policy(arguments, assumed)
    _explain(arguments, accelerate, deepspeed, policy=policy, adapted=adapters != NONE)
    every = (arguments, deepspeed, accelerate)
    return Read(
        framework="deepspeed" if parallel.deepspeed else framework,
        job=job,
        devices=parallel.devices,
        read=tuple(option for settings in every for option in settings.read),
        ignored=tuple(option for settings in every for option in settings.ignored),
        assumed=(*assumed, *files.left_out),
    )


def pins_of(
    parallel: Parallel,
    choice: Choice,
    *,
    adamw: Any,
    attention: Any,
    dtype: Any,
    tiles: Tiles | None,
) -> Pins:
    """Return the pins of a job, made of a plan or read; without ``tiles`` the trainer has its own."""
    full = choice.recompute == "full"
    divided = parallel.zero == 0 or not parallel.deepspeed
    return Pins(
        tp=parallel.tp,
        sequence_parallel=False if parallel.tp > 1 else None,
        cp=parallel.cp,
        ulysses=parallel.ulysses if parallel.deepspeed else None,
        dp=parallel.dp,
        zero=parallel.zero,
        zero_ranks=parallel.zero_ranks,
        overlap=None if divided and parallel.zero else parallel.overlap,
        recompute=choice.recompute,
        recompute_layers=choice.layers if full else None,
        offload_inputs=choice.offloaded if full else None,
        mlp_chunk_tokens=(tiles.mlp_tokens if tiles else 0) if full else None,
        loss_chunk_tokens=tiles.loss_tokens if tiles else None,
        sharding="fsdp1" if parallel.fsdp1 else None,
        rowwise="compiled" if choice.compiled else "eager",
        adamw=adamw,
        attention=attention,
        dtype=dtype,
    )


def _tiles(arguments: Settings, local: int) -> Tiles:
    """Return the tiles that options of the exported program name; ``local`` are the tokens of a rank's micro-batch."""
    loss, mlp = (arguments.whole(key, least=0) or 0 for key in ("loss_tokens", "mlp_tokens"))
    arguments.says("loss_tokens", f"the loss in tiles of {loss} tokens")
    arguments.says("mlp_tokens", f"the MLP in tiles of {mlp} tokens")
    return Tiles(loss if loss < local else 0, mlp if mlp < local else 0, one_tile=loss >= local)


def _lifted(values: dict[str, Any]) -> dict[str, Any]:
    """Return accelerate's settings without its sections, whose keys say theirs anyway."""
    found = dict[str, Any]()
    for key, value in values.items():
        if isinstance(value, dict):
            section = key.removesuffix("_config")
            for name, inner in value.items():
                prefixed = section in ("fsdp", "parallelism") and not str(name).startswith(section)
                full = f"{key if section == 'parallelism' else section}_{name}" if prefixed else str(name)
                found[full] = inner
        else:
            found[key] = value
    return found


def _whole(settings: Settings, key: str) -> int | None:
    """Return a whole number, or None for ``auto``."""
    return None if settings.text(key) in (None, "auto") else settings.whole(key)


def _length(arguments: Settings, given: Mapping[str, str], assumed: list[str], *, trl: bool) -> int:
    if asked := given.get(LENGTH):
        return parse_tokens(asked, option=f"--set {LENGTH}")
    for key in LENGTHS:
        tokens = arguments.whole(key) if arguments.has(key) else None
        if tokens is not None:
            arguments.says(key, f"sequences of {tokens} tokens")
            return tokens
    if trl and arguments.values:
        assumed.append("max_length is 1024, TRL's default")
        return 1024
    raise BadInput(
        "the files do not say how long a sequence is",
        where=arguments.where,
        wanted="one of " + ", ".join(LENGTHS[:3]),
        hint=f"--set {LENGTH}=64k",
    )


_OF_GRPO = ("num_generations", "max_completion_length", "epsilon", "epsilon_high", "reward_funcs", "num_iterations")
"""Arguments that TRL's GRPO alone has (``trainer/grpo_config.py``)."""
_GENERATION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "use_vllm", "vllm_mode")


def _policy_length(arguments: Settings, given: Mapping[str, str]) -> int:
    """Return the tokens of a prompt and its completion; TRL of today has no limit for prompts."""
    if asked := given.get(LENGTH):
        return parse_tokens(asked, option=f"--set {LENGTH}")
    prompt, completion = (arguments.whole(f"max_{name}_length") for name in ("prompt", "completion"))
    if prompt is not None and completion is not None:
        for name, tokens in (("prompt", prompt), ("completion", completion)):
            arguments.says(f"max_{name}_length", f"{tokens} tokens of a sequence of {prompt + completion}")
        return prompt + completion
    raise BadInput(
        "the files do not say how long a prompt and its completion are together",
        where=arguments.where,
        got=f"max_completion_length {completion or 'not given (256, the default)'}",
        wanted="max_prompt_length and max_completion_length",
        hint=f"--set {LENGTH}=8k",
    )


def _policy_loss(arguments: Settings, parallel: Parallel) -> Loss:
    """Return the form of GRPO's log-probabilities: of whole logits in fp32, or Liger's, one sequence at a time."""
    if arguments.flag("use_liger_kernel"):
        return "fused"
    return "eager-fp32" if parallel.tp == 1 else "vocab-parallel"


def _policy_tiles(arguments: Settings, seq_tokens: int) -> Tiles:
    return Tiles(loss_tokens=seq_tokens if arguments.flag("use_liger_kernel") else 0)


def _explain_policy(arguments: Settings, assumed: list[str]) -> None:
    """Say what a step of GRPO is priced with, and what it leaves out."""
    liger = arguments.flag("use_liger_kernel")
    arguments.says("use_liger_kernel", f"loss {'fused, one sequence at a time' if liger else 'eager-fp32'}")
    arguments.ignore(
        [key for key in (*_GENERATION, "num_generations", *arguments.values) if key in _GENERATION or "vllm" in key],
        "memo prices the training step: generation is not part of it",
    )
    arguments.says("num_generations", "objective grpo")
    arguments.says("max_completion_length", "objective grpo")
    for key in ("epsilon", "epsilon_high", "beta", "scale_rewards", "reward_funcs", "reward_weights"):
        arguments.says(key, "objective grpo, whose constants change no time")
    arguments.ignore("num_iterations", "memo prices one update of a batch of rollouts")
    arguments.ignore("top_entropy_quantile", "memo has no entropies of tokens")
    arguments.ignore("importance_sampling_level", "memo has ratios of tokens; those of sequences take the same time")
    loss = arguments.text("loss_type")
    if loss in (None, "dapo"):
        arguments.says("loss_type", "the mean over all tokens of the global batch")
    else:
        arguments.ignore("loss_type", "memo's mean is over all tokens (dapo); others take the same time and memory")
    assumed.append("logits of prompts are priced too; TRL computes those of completions alone")
    reference = " (the KL term needs one of the reference model)" if (arguments.text("beta") or "").strip("0.") else ""
    assumed.append(f"generation, rewards and forwards without a backward{reference} are not included")


def _parallel(
    accelerate: Settings, deepspeed: Settings, arguments: Settings, given: Mapping[str, str], files: Files
) -> Parallel:
    kind = (accelerate.text("distributed_type") or "").upper()
    config = (
        accelerate.text("deepspeed_config_file") or arguments.text("deepspeed") or arguments.text("deepspeed_config")
    )
    said = ((accelerate, "deepspeed_config_file"), (arguments, "deepspeed"), (arguments, "deepspeed_config"))
    for settings, key in said:
        settings.says(key, "DeepSpeed's file")
    if config is not None and not deepspeed.values:
        raise BadInput(
            "the files name a DeepSpeed configuration that is not among them",
            got=config,
            wanted="that JSON file",
            hint="name it beside the others",
        )
    devices = _devices(accelerate, given, files)
    if deepspeed.values or kind == "DEEPSPEED" or accelerate.flag("use_deepspeed"):
        return _deepspeed(deepspeed, accelerate, devices)
    return _fsdp(accelerate, arguments, devices, kind)


def _devices(accelerate: Settings, given: Mapping[str, str], files: Files) -> int:
    said = accelerate.whole("num_processes") if accelerate.text("num_processes") != "-1" else None
    if accelerate.values.get("distributed_type") == "NO":
        said = 1  # accelerate starts one process then, whatever num_processes is
    accelerate.says("num_processes", f"{said} devices")
    accelerate.raw("num_machines")
    if found := devices_of(given, files.devices or said):
        return found
    raise BadInput(
        "the files do not say on how many devices the job runs",
        where=accelerate.where,
        wanted="num_processes of accelerate, or processes that a script starts",
        hint=f"--set {DEVICES}=8",
    )


def _rest(devices: int, others: int, where: str) -> int:
    """Return the data parallelism that other degrees leave.

    Raises:
        BadInput: when they do not divide the devices.
    """
    if devices % others:
        raise BadInput(
            "the devices are no multiple of the degrees",
            where=where,
            got=f"{devices} devices, degrees of {others}",
            wanted=f"a multiple of {others}",
            hint=f"--set {DEVICES}=N",
        )
    return devices // others


def _fsdp(accelerate: Settings, arguments: Settings, devices: int, kind: str) -> Parallel:
    size = {
        name: accelerate.whole(f"parallelism_config_{name}_size") or 1
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    for name in ("tp", "cp", "sp"):
        accelerate.says(f"parallelism_config_{name}_size", f"{name} {size[name]}")
    tp, cp = size["tp"], size["cp"]
    dp = _rest(devices, tp * cp, accelerate.where)
    words = (arguments.text("fsdp") or "").replace(",", " ").split()
    arguments.says("fsdp", "zero " + ("2" if "shard_grad_op" in words else "3"))
    fsdp = kind == "FSDP" or accelerate.flag("use_fsdp") or bool(words) or cp > 1
    zero, ranks = 0, None
    if fsdp:
        zero, hybrid = _level(accelerate, words)
        divided = any(key.startswith("parallelism_config_") for key in accelerate.values)
        shard = size["dp_shard"] if divided else dp
        accelerate.says("parallelism_config_dp_shard_size", f"shards over {shard * cp} ranks")
        accelerate.says(
            "parallelism_config_dp_replicate_size", f"each shard on {counted(size['dp_replicate'], 'rank')}"
        )
        if hybrid:
            shard = max(devices // (accelerate.whole("num_machines") or 1), 1)
        if shard * cp == 1:
            zero = 0
        ranks = shard * cp if zero and shard * cp < dp * cp else None
    strategy = accelerate.text("parallelism_config_cp_comm_strategy")
    if strategy not in (None, "allgather") and cp > 1:
        accelerate.ignore("parallelism_config_cp_comm_strategy", "memo prices the all-gather of keys and values")
    else:
        accelerate.says("parallelism_config_cp_comm_strategy", "cp_exchange all_gather")
    accelerate.raw("parallelism_config_cp_backend")
    full = accelerate.flag("fsdp_activation_checkpointing")
    offload = accelerate.flag("fsdp_activation_checkpointing_offload")
    accelerate.says("fsdp_activation_checkpointing", f"recompute {'full' if full else 'as the arguments say'}")
    accelerate.says("fsdp_activation_checkpointing_offload", "offload_inputs" if offload else "inputs on the device")
    host = accelerate.flag("fsdp_offload_params") or "offload" in words
    accelerate.says("fsdp_offload_params", "states host" if host else "states on the device")
    accelerate.says("distributed_type", f"zero {zero}")
    first = fsdp and zero > 0 and accelerate.has("distributed_type") and accelerate.text("fsdp_version") != "2"
    accelerate.says("fsdp_version", f"sharding fsdp{'1' if first else '2'}")
    for key in ("fsdp_auto_wrap_policy", "compute_environment"):
        accelerate.raw(key)
    return Parallel(
        tp=tp,
        cp=cp,
        dp=dp,
        zero=zero,
        zero_ranks=ranks,
        host=host,
        full=full,
        offload=offload,
        precision=_accelerate_precision(accelerate),
        fsdp1=first,
        devices=devices,
    )


def _level(accelerate: Settings, words: list[str]) -> tuple[int, bool]:
    """Return the level of ZeRO, and whether shards stay inside a node (FSDP1's hybrid strategies)."""
    keys = ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
    named = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
    word = next((str(accelerate.values[key]).upper() for key in keys if accelerate.has(key)), "")
    word = named.get(word, word) or " ".join(words).upper() or "FULL_SHARD"
    two = word in ("FALSE", "SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2") or "SHARD_GRAD_OP" in words
    zero = 0 if word == "NO_SHARD" else 2 if two else 3
    for key in keys:
        accelerate.raw(key)
        accelerate.says(key, f"zero {zero}")
    return zero, "HYBRID" in word


def _accelerate_precision(accelerate: Settings) -> str | None:
    word = accelerate.text("mixed_precision")
    if word is None:
        return None
    word = {"false": "no"}.get(word.lower(), word.lower())
    accelerate.says("mixed_precision", f"mixed precision {word}")
    return word


def _deepspeed(deepspeed: Settings, accelerate: Settings, devices: int) -> Parallel:
    zero = deepspeed.whole("zero_optimization.stage", least=0)
    if zero is None:
        zero = accelerate.whole("zero_stage", least=0)
        accelerate.says("zero_stage", f"zero {zero}")
    deepspeed.says("zero_optimization.stage", f"zero {zero}")
    zero = (0 if deepspeed.values else 2) if zero is None else zero
    ulysses = deepspeed.whole("sequence_parallel_size") or accelerate.whole("parallelism_config_sp_size") or 1
    deepspeed.says("sequence_parallel_size", f"ulysses {ulysses}")
    accelerate.says("parallelism_config_sp_size", f"ulysses {ulysses}")
    for key in ("sp_backend", "dp_shard_size", "dp_replicate_size", "sp_seq_length", "sp_seq_length_is_variable"):
        accelerate.raw(f"parallelism_config_{key}")
    kernel = accelerate.text("parallelism_config_sp_attn_implementation")
    accelerate.says("parallelism_config_sp_attn_implementation", f"attention {ATTENTION.get(kernel or '', 'of torch')}")
    dp = _rest(devices, ulysses, deepspeed.where)
    device = deepspeed.text("zero_optimization.offload_optimizer.device") or accelerate.text("offload_optimizer_device")
    old = deepspeed.flag("zero_optimization.cpu_offload")
    host = device in ("cpu", "nvme") or old
    for settings, key in (
        (deepspeed, "zero_optimization.offload_optimizer.device"),
        (deepspeed, "zero_optimization.cpu_offload"),
        (accelerate, "offload_optimizer_device"),
    ):
        settings.says(key, "states host" if host else "states on the device")
    if device == "nvme":
        deepspeed.ignore("zero_optimization.offload_optimizer.device", "memo has no NVMe: priced as the host's memory")
    ratio = deepspeed.text("zero_optimization.offload_optimizer.ratio")
    if ratio not in (None, "1", "1.0"):
        deepspeed.ignore("zero_optimization.offload_optimizer.ratio", "memo has all states on the host, or none")
    section = [key for key in deepspeed.values if key.startswith("activation_checkpointing")]
    offload = deepspeed.flag("activation_checkpointing.cpu_checkpointing")
    for key in section:
        deepspeed.raw(key)
        deepspeed.says(key, "recompute full" + (", inputs on the host" if offload else ""))
    precision, pure = _deepspeed_precision(deepspeed, accelerate)
    overlap: Literal["none", "gradients"] | None = None
    if zero < 2:
        overlap = "gradients" if deepspeed.flag("zero_optimization.overlap_comm") else "none"
        deepspeed.says("zero_optimization.overlap_comm", f"overlap {overlap}")
    accelerate.says("distributed_type", f"zero {zero} of DeepSpeed")
    sums: GradSums = "params" if deepspeed.text("data_types.grad_accum_dtype") in ("bf16", "fp16") else "auto"
    deepspeed.says("data_types.grad_accum_dtype", f"grad_sums {sums}")
    return Parallel(
        ulysses=ulysses,
        dp=dp,
        zero=zero,
        overlap=overlap,
        host=host,
        full=bool(section),
        offload=offload,
        precision=precision,
        pure=pure,
        sums=sums,
        deepspeed=True,
        attention=kernel,
        adamw=_deepspeed_adamw(deepspeed),
        micro_batch=_whole(deepspeed, "train_micro_batch_size_per_gpu"),
        accumulation=_accumulation(deepspeed, accelerate),
        global_batch=_whole(deepspeed, "train_batch_size"),
        devices=devices,
    )


def _accumulation(deepspeed: Settings, accelerate: Settings) -> int | None:
    steps = _whole(deepspeed, "gradient_accumulation_steps") or _whole(accelerate, "gradient_accumulation_steps")
    micro, whole = _whole(deepspeed, "train_micro_batch_size_per_gpu"), _whole(deepspeed, "train_batch_size")
    said = {
        "train_micro_batch_size_per_gpu": micro and f"micro-batches of {counted(micro, 'sequence')}",
        "gradient_accumulation_steps": steps and f"{counted(steps, 'micro-batch', 'es')} a step",
        "train_batch_size": whole and f"{counted(whole, 'sequence')} a step",
    }
    for key, text in said.items():
        deepspeed.says(key, text or "as the arguments say")
    return steps


def _deepspeed_precision(deepspeed: Settings, accelerate: Settings) -> tuple[str | None, bool]:
    auto = deepspeed.text("bf16.enabled") == "auto" or deepspeed.text("fp16.enabled") == "auto"
    part = next((key for key in ("bf16", "bfloat16") if f"{key}.enabled" in deepspeed.values), "bf16")
    bf16 = not auto and deepspeed.flag(f"{part}.enabled")
    fp16 = not auto and deepspeed.flag("fp16.enabled")
    pure = deepspeed.flag(f"{part}.bf16_master_weights_and_grads") and deepspeed.flag(f"{part}.bf16_optimizer_states")
    deepspeed.says(f"{part}.enabled", "dtype bf16" if bf16 else "as the arguments say")
    deepspeed.says("fp16.enabled", "dtype fp16" if fp16 else "as the arguments say")
    deepspeed.says(f"{part}.bf16_master_weights_and_grads", "states pure-bf16" if pure else "states fp32")
    deepspeed.says(f"{part}.bf16_optimizer_states", "states pure-bf16" if pure else "states fp32")
    said = _accelerate_precision(accelerate)
    if bf16 or fp16:
        return "bf16" if bf16 else "fp16", pure
    return (said, pure) if auto or not deepspeed.values or said else ("no", pure)


def _deepspeed_adamw(deepspeed: Settings) -> Any:
    kind = deepspeed.text("optimizer.type")
    if kind is None:
        return None
    if kind.lower() not in ("adamw", "adam"):
        deepspeed.ignore("optimizer.type", "memo has AdamW alone")
        return None
    word = "foreach" if deepspeed.flag("optimizer.params.torch_adam") else "fused"
    deepspeed.says("optimizer.type", f"adamw {word}")
    deepspeed.says("optimizer.params.torch_adam", f"adamw {word}")
    return word


def _recompute(
    arguments: Settings, parallel: Parallel, assumed: list[str], *, trl: bool
) -> tuple[Recompute, str, bool]:
    """Return what is recomputed, in which layers, and whether the inputs wait on the host."""
    keys = ("gradient_checkpointing", "activation_checkpointing")
    said = next((key for key in keys if arguments.has(key)), None)
    asked = arguments.flag(said) if said else trl and bool(arguments.values)
    if said is None and asked:
        assumed.append("gradient_checkpointing is on, TRL's default")
    full = asked or parallel.full
    kwargs = _mapping(arguments, "gradient_checkpointing_kwargs") or _mapping(
        arguments, "activation_checkpointing_kwargs"
    )
    every = kwargs.get("every_n_layers", 1)
    offloaded = bool(kwargs.get("offload")) or parallel.offload
    choice = f"every-{every}" if isinstance(every, int) and every > 1 else "all"
    recompute: Recompute = "full" if full else "none"
    for key in keys:
        arguments.says(key, f"recompute {recompute}")
        arguments.says(f"{key}_kwargs", f"layers {choice}, inputs on the {'host' if offloaded else 'device'}")
    if kwargs.get("selective"):
        arguments.ignore("gradient_checkpointing_kwargs", "memo keeps no attention output beside full recompute")
    if arguments.flag("activation_offloading"):
        arguments.ignore(
            "activation_offloading", "memo prices it as kept: it plans swapping by token under --system trl-tokenwise"
        )
    else:
        arguments.says("activation_offloading", "nothing is swapped")
    return recompute, choice, offloaded and full


def _mapping(arguments: Settings, key: str) -> dict[str, Any]:
    value = arguments.raw(key)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = {}
    return value if isinstance(value, dict) else {}


def _precision(
    arguments: Settings, parallel: Parallel, assumed: list[str], *, trl: bool, adapted: bool
) -> tuple[Any, States, GradSums]:
    """Return the dtype, the states, and the dtype that gradients are summed in."""
    loaded = next((arguments.text(key) for key in ("dtype", "torch_dtype") if arguments.has(key)), None)
    mixed = arguments.text("mixed_precision") or parallel.precision
    arguments.says("mixed_precision", f"mixed precision {mixed}")
    if arguments.flag("bf16"):
        mixed = "bf16"
    elif arguments.flag("fp16"):
        mixed = "fp16"
    elif mixed is None and trl and not arguments.has("bf16"):
        mixed = "bf16"
        assumed.append("bf16 is on, TRL's default")
    mixed = mixed or "no"
    narrow = loaded in ("bfloat16", "bf16")
    if loaded == "auto":
        assumed.append("dtype auto: the model's weights are taken as bf16")
        narrow = True
    dtype = mixed if mixed in ("bf16", "fp16") else "bf16" if narrow else "fp32"
    # FSDP and DeepSpeed keep fp32 master weights of a model in bf16 where precision is mixed; DDP does not.
    pure = parallel.pure or (narrow and mixed == "no" and not parallel.deepspeed)
    pure = pure or (narrow and parallel.zero == 0 and not parallel.deepspeed and not adapted)
    states: States = "pure-bf16" if pure else "host" if parallel.host else "fp32"
    sums = parallel.sums
    if parallel.zero == 0 and not parallel.deepspeed and states == "fp32" and dtype != "fp32":
        sums = "autocast"
    for key in ("dtype", "torch_dtype"):
        arguments.says(key, f"states {states}")
    for key in ("bf16", "fp16"):
        arguments.says(key, f"dtype {dtype}")
    return dtype, states, sums


def _adamw(arguments: Settings, parallel: Parallel) -> Any:
    word = arguments.text("optim")
    if parallel.adamw is not None:
        if word is not None:
            arguments.ignore("optim", "DeepSpeed's file has an optimizer of its own")
        return parallel.adamw
    if word is None:
        return "fused"
    if word not in OPTIMIZERS:
        arguments.ignore("optim", "memo has torch's AdamW alone: priced as its fused one, with states in fp32")
        return "fused"
    arguments.says("optim", f"adamw {OPTIMIZERS[word]}")
    return OPTIMIZERS[word]


def _attention(arguments: Settings, parallel: Parallel) -> Any:
    key = "attn_implementation"
    word = (
        arguments.text(key)
        or parallel.attention
        or ("flash_attention_2" if arguments.flag("use_flash_attention_2") else SDPA)
    )
    hub = {"kernels-community/flash-attn2": "flash_attention_2", "kernels-community/flash-attn3": "flash_attention_3"}
    hub |= {
        "kernels-community/flash-attn": "flash_attention_2",
        "kernels-community/vllm-flash-attn3": "flash_attention_3",
    }
    word = hub.get(word.partition("@")[0], word)
    arguments.says("use_flash_attention_2", "attention flash2")
    if word in ATTENTION:
        arguments.says(key, f"attention {ATTENTION[word]}")
        return ATTENTION[word]
    if word != SDPA:
        arguments.ignore(key, "memo has no such attention kernel: priced as torch's")
    arguments.says(key, "torch's attention")
    return "torch-flash" if parallel.deepspeed else None


def _explain(arguments: Settings, accelerate: Settings, deepspeed: Settings, *, policy: bool, adapted: bool) -> None:
    """Say why options that would change time or memory are left out."""
    on = [key for key in (*KEYS, *OTHERS) if arguments.has(key)]
    if not adapted and arguments.unused.keys().isdisjoint(KEYS):
        if arguments.flag("use_peft"):
            arguments.ignore(on, "memo knows adapters under FSDP2 alone: priced as training of all parameters")
        else:
            arguments.ignore([key for key in on if key != "use_peft"], "nothing, without use_peft")
    on = [key for key in _QUANTIZED if arguments.has(key)]
    arguments.ignore(on, "memo has no quantized weights: the job is priced in its dtype")
    if not arguments.flag("packing"):
        arguments.says("packing", "no packing")
    else:
        arguments.ignore("packing", "priced as sequences of one document: --documents says what packed ones attend")
    if not policy:
        arguments.ignore(("use_liger_kernel", "use_liger"), "memo has no Liger kernels: priced with eager modules")
    arguments.ignore(("padding_free", "pad_to_multiple_of"), "memo's sequences all have the full length")
    if not policy and arguments.text("loss_type") not in (None, "nll", "chunked_nll"):
        arguments.ignore("loss_type", "memo prices the likelihood of the next token")
    elif not policy:
        arguments.says("loss_type", "the likelihood of the next token, in chunks")
    deepspeed.ignore(
        [key for key in deepspeed.values if key.startswith("zero_optimization.offload_param.")],
        "memo keeps parameters on the device: it prices the optimizer's states on the host alone",
    )
    deepspeed.ignore(
        [key for key in deepspeed.values if key.startswith("zero_optimization.zenflow.")],
        "memo has no ZenFlow: the update of the states on the host waits for all gradients",
    )
    deepspeed.ignore(
        ("zero_optimization.offload_optimizer.super_offload",), "memo has DeepSpeed's CPU Adam, not SuperOffload"
    )
    deepspeed.ignore(("zero_optimization.zero_hpz_partition_size",), "memo has no second copy of shards in a node")
    deepspeed.ignore(
        [key for key in deepspeed.values if key.startswith("tensor_parallel")], "memo's DeepSpeed has no tp"
    )
    deepspeed.ignore([key for key in deepspeed.values if key.startswith("compile.")], "memo has no DeepCompile")
    accelerate.ignore(("offload_param_device",), "memo keeps parameters on the device")
    for key in ("offload_param_device",):
        if str(accelerate.values.get(key, "none")) == "none":
            accelerate.raw(key)
    if str(accelerate.values.get("dynamo_backend", "NO")).upper() != "NO":
        accelerate.ignore("dynamo_backend", "set torch_compile in the arguments: memo reads it there")


__all__ = [
    "CONFIG",
    "TORCH_DTYPES",
    "Files",
    "Parallel",
    "Tiles",
    "files_of",
    "kind_of",
    "loss_of",
    "pins_of",
    "read_files",
]
