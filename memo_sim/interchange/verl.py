"""verl 0.8: the actor's step of a job of reinforcement learning, from its Hydra overrides or its configuration.

Jobs are read, not written. Sources, in verl 0.8.0.dev (volcengine/verl@b178a3c): ``trainer/config``,
``workers/fsdp_workers.py``, ``workers/actor/dp_actor.py``, ``workers/config/actor.py``, ``trainer/ppo/utils.py``,
``utils/torch_functional.py``, ``utils/seqlen_balancing.py``, ``utils/experimental/torch_functional.py``,
``models/transformers/tiled_mlp.py``.

What that says of the actor's update: parameters and optimizer states that ``param_offload`` and ``optimizer_offload``
keep on the host come back for it, whole. The logits of all tokens exist in the parameters' dtype, and flash-attn's
cross entropy writes their gradient over them, unless entropies are computed too. ``use_fused_kernels`` computes chunks
of 512 tokens, whose products run again in backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.knobs import Loss, Pins, ReduceDtype, States
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import counted, parse_tokens
from memo_sim.interchange.accelerate import hugging_face_sayings
from memo_sim.interchange.eager_words import exact, near
from memo_sim.interchange.framework import Framework, Read, Saying, Source
from memo_sim.interchange.hf_words import ATTENTION, SDPA
from memo_sim.interchange.job import Job
from memo_sim.interchange.launch import Launch
from memo_sim.interchange.model_names import model_of
from memo_sim.interchange.settings import DEVICES, LENGTH, Settings, flat, overrides
from memo_sim.interchange.shell_script import read_script, shown
from memo_sim.interchange.yaml_file import read_yaml

ACTOR, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
FSDP = f"{ACTOR}fsdp_config."
FUSED_CHUNK = 512
"""Tokens of a chunk of ``FusedLinearForPPO``."""
_ULYSSES = f"{ACTOR}ulysses_sequence_parallel_size"
_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.-]*)(?:=(.*))?", re.ASCII | re.DOTALL)
_REFERENCE = re.compile(r"\$\{(?:oc\.select:\s*)?([\w.]+)\s*(?:,\s*([^${}]*))?\}", re.ASCII)
_NARROW = ("bf16", "bfloat16")
_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp32": "fp32", "float32": "fp32"}
_ALONE = "memo-sim what-if MODEL --objective grpo --seq-len TOKENS (of prompt and response) prices the actor's step"

SAYINGS = hugging_face_sayings(
    {
        "layout.tp": Saying("none", lost="FSDP actors have no tensor parallelism"),
        "layout.sequence_parallel": Saying("none", lost="FSDP actors have no tensor parallelism"),
        "layout.cp": Saying("none", lost="its sequences are divided by Ulysses"),
        "layout.ulysses": exact(_ULYSSES),
        "layout.dp": exact("trainer.nnodes", "trainer.n_gpus_per_node"),
        "layout.zero": exact(
            f"{FSDP}reshard_after_forward", lost="FSDP has ZeRO 3, or 2 where parameters stay gathered"
        ),
        "layout.zero_ranks": exact(f"{FSDP}fsdp_size"),
        "decisions.seq_tokens": exact("data.max_prompt_length", "data.max_response_length"),
        "decisions.micro_batch": exact(f"{ACTOR}ppo_micro_batch_size_per_gpu"),
        "decisions.global_batch": exact(f"{ACTOR}ppo_mini_batch_size", "actor_rollout_ref.rollout.n"),
        "decisions.recompute": exact(
            f"{MODEL}enable_gradient_checkpointing", lost="it recomputes whole layers, or nothing"
        ),
        "decisions.recompute_layers": Saying("none", lost="it recomputes all layers, or none"),
        "decisions.swapped_tokens": near(
            f"{MODEL}enable_activation_offload", lost="inputs of recomputed layers wait on the host, but for the last"
        ),
        "decisions.states": exact(f"{FSDP}model_dtype", f"{FSDP}offload_policy", lost="AdamW's moments have its dtype"),
        "decisions.kernels.attention": exact(f"{MODEL}override_config.attn_implementation"),
        "decisions.kernels.rowwise": Saying("own", lost="transformers' modules run eagerly"),
        "decisions.kernels.adamw": Saying("own", lost="torch's AdamW with its default kernels, which are foreach"),
        "decisions.dtype": exact(f"{FSDP}dtype", f"{FSDP}mixed_precision.param_dtype"),
        "decisions.deterministic": exact(f"{FSDP}full_determinism"),
        "decisions.sharding": exact(f"{ACTOR}strategy"),
        "decisions.reduce_dtype": exact(f"{FSDP}mixed_precision.reduce_dtype"),
        "decisions.objective": exact("algorithm.adv_estimator"),
        "decisions.loss": near(f"{MODEL}use_fused_kernels", lost="whole logits, or chunks of 512 tokens"),
        "decisions.loss_chunk_tokens": Saying("own", lost="its fused kernels fix the chunks"),
        "decisions.mlp_chunk_tokens": exact(f"{MODEL}tiled_mlp.enabled", f"{MODEL}tiled_mlp.num_shards"),
        "decisions.mlp_rebuild": Saying("own", lost="a tile is rebuilt inside a layer that is recomputed"),
    }
)


def reads(source: Source) -> bool:
    """Return whether a file starts or configures verl, or recipes that are built on it."""
    return any(word in source.text for word in ("verl.trainer", "actor_rollout_ref"))


def jobs(decisions: Decisions) -> tuple[Job, ...]:
    """Refuse: memo writes no jobs of verl.

    Raises:
        UsageError: always.
    """
    del decisions
    raise UsageError("memo reads verl's jobs and writes none", got="verl", hint="change the values of your own job")


def _files(job: Job, launch: Launch, header: tuple[str, ...]) -> dict[str, str]:
    del job, launch, header
    return {}


@dataclass
class _Said:
    """What the files say: values by their dotted names, where they stand, and what was left out."""

    values: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    configs: list[str] = field(default_factory=list)
    """Names of configurations that commands start from."""
    yaml: bool = False
    left_out: list[str] = field(default_factory=list)
    started: str = ""
    """The module that a command starts."""


def read(sources: tuple[Source, ...], given: Mapping[str, str]) -> Read:
    """Return the job of verl's configuration and of the overrides of the command that starts it.

    Raises:
        BadInput: when a file cannot be read, the job is one that memo does not price, or verl itself would refuse it.
    """
    said = _said(sources, given)
    settings = Settings(said.values, ", ".join(said.names) or ", ".join(source.name for source in sources))
    assumed = list[str]()
    _refuse_others(settings, said)
    named = settings.text(f"{MODEL}path")
    model = model_of(sources, given, named)
    settings.says(f"{MODEL}path", f"the model {model.name}")
    seq_tokens = _length(settings, given, assumed)
    ulysses = _number(settings, _ULYSSES, 1, lambda n: f"ulysses {n}")
    devices = _devices(settings, given, assumed)
    dp = _replicas(settings, devices, ulysses)
    micro_batch, global_batch = _batches(settings, seq_tokens, ulysses, dp, assumed)
    recompute, offloaded = _recompute(settings, assumed)
    dtype, states = _precision(settings, assumed)
    loss, chunk = _loss(settings, assumed)
    sharding, zero, ranks = _sharding(settings, devices, assumed)
    job = Job(
        model=model,
        seq_tokens=seq_tokens,
        micro_batch=micro_batch,
        global_batch=global_batch,
        states=states,
        streams="recorded" if zero and sharding == "fsdp1" else "auto",
        objective="grpo",
        loss=loss,
        deterministic=settings.flag(f"{FSDP}full_determinism"),
        pins=Pins(
            ulysses=ulysses,
            dp=dp,
            zero=zero,
            zero_ranks=ranks,
            sharding=sharding if zero else None,
            reduce_dtype=_reduced(settings, states) if zero else "auto",
            recompute="full" if recompute else "none",
            recompute_layers="all" if recompute else None,
            offload_inputs=offloaded if recompute else None,
            mlp_chunk_tokens=_tile(settings, micro_batch * seq_tokens // ulysses, recompute=recompute)
            if recompute
            else None,
            loss_chunk_tokens=chunk,
            rowwise="eager",
            adamw="foreach",
            attention=_attention(settings, assumed),
            dtype=dtype,
        ),
    )
    settings.says(f"{FSDP}full_determinism", f"deterministic {'on' if job.deterministic else 'off'}")
    _explain(settings, said, assumed)
    return Read(
        framework="verl",
        job=job,
        devices=devices,
        read=tuple(settings.read),
        ignored=settings.ignored,
        assumed=(*assumed, *said.left_out),
    )


# -- files ------------------------------------------------------------------------------------------------------------


def _said(sources: tuple[Source, ...], given: Mapping[str, str]) -> _Said:
    said = _Said()
    for source in sources:
        if source.name.endswith((".yaml", ".yml")):
            said.values |= flat(read_yaml(source))
            said.names.append(source.name)
            said.yaml = True
    for source in sources:
        if not source.name.endswith((".yaml", ".yml", ".json")):
            _script(source, given, said)
    said.values |= overrides(given)
    _refer(said.values)
    return said


def _script(source: Source, given: Mapping[str, str], said: _Said) -> None:
    """Add the overrides of the command that starts verl, or a recipe built on it."""
    script = read_script(source.text, given, where=source.name)
    said.left_out += script.left_out
    starts = [words for words in script.commands if any("verl.trainer" in word for word in words)]
    configures = [words for words in script.commands if any("actor_rollout_ref." in word for word in words)]
    found = next(iter(starts or configures), None)
    if found is None:
        return
    said.names.append(source.name)
    said.started = next((word for word in found if "verl.trainer" in word), "")
    for index, word in enumerate(found):
        name, sign, value = word.partition("=")
        if name in ("--config-name", "-cn"):
            said.configs.append(value if sign else next(iter(found[index + 1 :]), ""))
        match = None if word.startswith("-") else _OVERRIDE.fullmatch(word)
        if match and match[1] == "~":
            said.values.pop(match[2], None)
        elif match and match[3] is not None and ("." in match[2] or match[1]):
            said.values[match[2]] = _unquoted(shown(match[3]))


def _unquoted(value: str) -> str:
    """Return a value of Hydra without the quotes around it."""
    text = value.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _refer(values: dict[str, Any]) -> None:
    """Replace values that are one reference to another value, ``${a.b}`` or ``${oc.select:a.b,default}``, by that."""
    for key, value in values.items():
        found = value
        for _ in range(4):
            match = _REFERENCE.fullmatch(found.strip()) if isinstance(found, str) else None
            if match is None or (match[1] not in values and match[2] is None):
                break
            found = values.get(match[1], match[2])
        values[key] = found


def _refuse_others(settings: Settings, said: _Said) -> None:
    """Refuse jobs of verl whose step is not that of an FSDP actor alone.

    Raises:
        BadInput: naming what the job is instead.
    """
    if said.started and not said.started.endswith(("main_ppo", "main_ppo.py")):
        raise BadInput(
            "memo reads verl's reinforcement learning alone",
            where=settings.where,
            got=said.started,
            wanted="a job of verl.trainer.main_ppo",
            hint="memo-sim what-if MODEL --seq-len TOKENS --system verl-fsdp prices a step of fine-tuning",
        )
    strategy = settings.text(f"{ACTOR}strategy") or "fsdp"
    megatron = next((name for name in said.configs if "megatron" in name), "")
    if strategy not in ("fsdp", "fsdp2") or megatron:
        raise BadInput(
            "memo reads verl's jobs whose actor is an FSDP one",
            where=f"{settings.where}: {ACTOR}strategy",
            got=repr("megatron" if megatron else strategy),
            wanted="fsdp or fsdp2",
            hint=_ALONE
            + ("; with --system megatron-core as Megatron runs it" if megatron or "mega" in strategy else ""),
        )
    estimator = settings.text("algorithm.adv_estimator") or "gae"
    trained = settings.flag("critic.enable", default=estimator == "gae")
    if trained:
        raise BadInput(
            "memo prices no critic, which this job trains on the actor's devices",
            where=f"{settings.where}: algorithm.adv_estimator",
            got="critic.enable" if settings.has("critic.enable") else f"{estimator!r}, verl's default",
            wanted="an estimator without a critic: grpo, rloo, reinforce_plus_plus, remax",
            hint="--set algorithm.adv_estimator=grpo --set critic.enable=false prices the actor alone",
        )
    settings.says("algorithm.adv_estimator", "objective grpo: advantages are computed before the step")
    settings.says("critic.enable", "no critic")


# -- decisions --------------------------------------------------------------------------------------------------------


def _number(settings: Settings, key: str, default: int, says: Callable[[int], str]) -> int:
    found = settings.whole(key) or default
    settings.says(key, says(found))
    return found


def _length(settings: Settings, given: Mapping[str, str], assumed: list[str]) -> int:
    """Return the tokens of a prompt and its response, each at its longest."""
    if asked := given.get(LENGTH):
        return parse_tokens(asked, option=f"--set {LENGTH}")
    tokens = {name: settings.whole(f"data.max_{name}_length") for name in ("prompt", "response")}
    for name, found in tokens.items():
        if found is None:
            assumed.append(f"data.max_{name}_length is 512, verl's default")
    whole = sum(found or 512 for found in tokens.values())
    for name, found in tokens.items():
        settings.says(f"data.max_{name}_length", f"{found} tokens of a sequence of {whole}")
    return whole


def _devices(settings: Settings, given: Mapping[str, str], assumed: list[str]) -> int:
    if asked := Settings(given, "--set").whole(DEVICES):
        for key in ("trainer.nnodes", "trainer.n_gpus_per_node"):
            settings.raw(key)
        return asked
    defaults = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 8}
    found = {key: settings.whole(key) for key in defaults}
    assumed += [f"{key} is {defaults[key]}, verl's default" for key, value in found.items() if value is None]
    nodes, each = (value or defaults[key] for key, value in found.items())
    for key in defaults:
        settings.says(key, f"{nodes * each} devices")
    return nodes * each


def _replicas(settings: Settings, devices: int, ulysses: int) -> int:
    if devices % ulysses:
        raise BadInput(
            "the devices are no multiple of Ulysses' ranks",
            where=f"{settings.where}: {_ULYSSES}",
            got=f"{devices} devices, ulysses {ulysses}",
            wanted=f"a multiple of {ulysses}",
        )
    padded = [key for key in (f"{ACTOR}use_remove_padding", f"{MODEL}use_remove_padding") if settings.has(key)]
    if ulysses > 1 and padded and not settings.flag(padded[0], default=True):
        raise BadInput(
            "verl's Ulysses needs sequences without padding",
            where=f"{settings.where}: {padded[0]}",
            got="false",
            wanted=f"{MODEL}use_remove_padding=true",
        )
    return devices // ulysses


def _batches(settings: Settings, tokens: int, ulysses: int, dp: int, assumed: list[str]) -> tuple[int, int]:
    """Return the sequences of a micro-batch of one replica, and those of an optimizer step."""
    prompts = settings.whole(f"{ACTOR}ppo_mini_batch_size")
    if prompts is None:
        prompts = 256
        assumed.append(f"{ACTOR}ppo_mini_batch_size is 256, verl's default")
    each = _number(settings, "actor_rollout_ref.rollout.n", 1, lambda n: f"{counted(n, 'response')} of a prompt")
    rank = prompts * each // dp
    if not rank:
        raise BadInput(
            "the mini-batch has fewer sequences than replicas",
            where=f"{settings.where}: {ACTOR}ppo_mini_batch_size",
            got=f"{counted(prompts, 'prompt')} of {counted(each, 'response')}, {dp} replicas",
            wanted=f"at least {dp} sequences",
        )
    settings.says(f"{ACTOR}ppo_mini_batch_size", f"{counted(rank * dp, 'sequence')} an optimizer step")
    most = _most_at_once(settings, tokens, ulysses, dp)
    micro = max(part for part in range(1, min(most, rank) + 1) if rank % part == 0)
    if micro < min(most, rank):
        assumed.append(
            f"micro-batches are of {micro}, not {min(most, rank)}, so that they divide the {rank} of a replica"
        )
    _say_updates(settings, prompts, assumed)
    return micro, rank * dp


def _most_at_once(settings: Settings, tokens: int, ulysses: int, dp: int) -> int:
    """Return how many sequences of the full length a replica plays at once."""
    keys = (f"{ACTOR}ppo_micro_batch_size_per_gpu", f"{ACTOR}ppo_micro_batch_size")
    limit = f"{ACTOR}ppo_max_token_len_per_gpu"
    if settings.flag(f"{ACTOR}use_dynamic_bsz"):
        each = settings.whole(limit) or 16384
        if each * ulysses < tokens:
            raise BadInput(
                "a sequence is longer than the tokens that verl plays at once, which it refuses",
                where=f"{settings.where}: {limit}",
                got=f"{each} tokens on each of {ulysses} ranks, sequences of {tokens}",
                wanted=f"at least {-(-tokens // ulysses)}",
            )
        most = each * ulysses // tokens
        settings.says(f"{ACTOR}use_dynamic_bsz", "micro-batches by their tokens")
        settings.says(limit, f"up to {counted(most, 'sequence')} at once")
        settings.ignore(keys, "use_dynamic_bsz is on: micro-batches are cut by their tokens")
        return most
    settings.says(f"{ACTOR}use_dynamic_bsz", "micro-batches by their sequences")
    settings.ignore(limit, "use_dynamic_bsz is off: micro-batches are cut by their sequences")
    micro, all_ranks = (settings.whole(key) for key in keys)
    if micro is None and all_ranks is None:
        raise BadInput(
            "the files do not say how many sequences a replica plays at once",
            where=settings.where,
            wanted=f"{keys[0]}, or use_dynamic_bsz",
            hint=f"--set {keys[0]}=1",
        )
    found = micro or max((all_ranks or 1) // dp, 1)
    for key in keys:
        settings.says(key, f"micro-batches of {counted(found, 'sequence')}")
    return found


def _say_updates(settings: Settings, prompts: int, assumed: list[str]) -> None:
    whole, epochs = settings.whole("data.train_batch_size") or 1024, settings.whole(f"{ACTOR}ppo_epochs") or 1
    steps = -(-whole // prompts) * epochs
    for key in ("data.train_batch_size", f"{ACTOR}ppo_epochs"):
        settings.says(key, f"{counted(steps, 'optimizer step')} of a batch of rollouts")
    assumed.append(f"a step here is one of {counted(steps, 'optimizer step')} that verl makes of a batch of rollouts")


def _recompute(settings: Settings, assumed: list[str]) -> tuple[bool, bool]:
    """Return whether layers are recomputed, and whether their inputs wait on the host."""
    key, offload = f"{MODEL}enable_gradient_checkpointing", f"{MODEL}enable_activation_offload"
    on, offloaded = settings.flag(key, default=True), settings.flag(offload)
    if not settings.has(key):
        assumed.append("enable_gradient_checkpointing is on, verl's default: recompute full")
    settings.says(key, f"recompute {'full' if on else 'none'}")
    if on or not offloaded:
        settings.says(offload, f"inputs of layers on the {'host' if offloaded else 'device'}")
    else:
        settings.ignore(offload, "without gradient checkpointing memo prices activations as kept")
    return on, offloaded and on


def _tile(settings: Settings, local: int, *, recompute: bool) -> int:
    """Return the tokens of a tile of the MLP, 0: all at once."""
    on, shards = settings.flag(f"{MODEL}tiled_mlp.enabled"), settings.whole(f"{MODEL}tiled_mlp.num_shards") or 4
    tokens = -(-local // shards) if on and recompute and shards > 1 else 0
    settings.says(f"{MODEL}tiled_mlp.enabled", f"mlp_chunk {tokens}")
    settings.says(f"{MODEL}tiled_mlp.num_shards", f"mlp_chunk {tokens}")
    return tokens


def _precision(settings: Settings, assumed: list[str]) -> tuple[Any, States]:
    """Return the dtype of compute, and the states."""
    loaded = (settings.text(f"{FSDP}model_dtype") or "fp32").lower()
    keys = (f"{FSDP}mixed_precision.param_dtype", f"{FSDP}dtype")
    word = next((settings.text(key) for key in keys if settings.has(key)), None) or "bfloat16"
    if word.lower() not in _DTYPES or loaded not in _DTYPES:
        raise BadInput(
            "a wrong value",
            where=f"{settings.where}: {keys[1]} or {FSDP}model_dtype",
            got=f"{word!r}, {loaded!r}",
            wanted=", ".join(_DTYPES),
        )
    dtype = _DTYPES[word.lower()]
    second = settings.text(f"{ACTOR}strategy") == "fsdp2"
    host = second and settings.flag(f"{FSDP}offload_policy")
    states: States = "pure-bf16" if loaded in _NARROW else "host" if host else "fp32"
    settings.says(f"{FSDP}model_dtype", f"states {states}")
    if not settings.has(f"{FSDP}model_dtype"):
        assumed.append(f"{FSDP}model_dtype is fp32, verl's default: states {states}")
    if not any(map(settings.has, keys)):
        assumed.append(f"{FSDP}dtype is bfloat16, verl's default")
    for key in keys:
        settings.says(key, f"dtype {dtype}")
    if second:
        settings.says(f"{FSDP}offload_policy", f"states {states}")
    else:
        settings.ignore(f"{FSDP}offload_policy", "FSDP2 alone has it")
    if settings.flag(f"{FSDP}offload_policy") and states == "pure-bf16":
        settings.ignore(f"{FSDP}offload_policy", "memo has no states in bf16 on the host: priced as on the device")
    for key in (f"{FSDP}param_offload", f"{FSDP}optimizer_offload"):
        back = "on the device during the step, as verl has it; the copies to and fro are not priced"
        settings.says(key, back if settings.flag(key) else "on the device")
    return dtype, states


def _reduced(settings: Settings, states: States) -> ReduceDtype:
    """Return the dtype in which gradients are reduced: fp32 by verl's default, also of a model in bf16."""
    key = f"{FSDP}mixed_precision.reduce_dtype"
    word = (settings.text(key) or "fp32").lower()
    settings.says(key, f"reduce_dtype {'bf16' if word in _NARROW else 'fp32'}")
    settings.raw(f"{FSDP}mixed_precision.buffer_dtype")
    if word in _NARROW:
        return "bf16"
    return "fp32" if states == "pure-bf16" else "auto"


def _sharding(settings: Settings, devices: int, assumed: list[str]) -> tuple[Any, int, int | None]:
    """Return whose FSDP it is, the level of ZeRO, and the ranks that share states where not all do."""
    strategy = settings.text(f"{ACTOR}strategy")
    if strategy is None:
        assumed.append(f"{ACTOR}strategy is fsdp, verl's default")
    sharding = "fsdp2" if strategy == "fsdp2" else "fsdp1"
    settings.says(f"{ACTOR}strategy", f"sharding {sharding}")
    settings.raw(f"{FSDP}strategy")
    zero = (3 if settings.flag(f"{FSDP}reshard_after_forward", default=True) else 2) if devices > 1 else 0
    settings.says(f"{FSDP}reshard_after_forward", f"zero {zero}")
    word = settings.text(f"{FSDP}fsdp_size")
    size = None if word == "-1" else settings.whole(f"{FSDP}fsdp_size")
    ranks = size if size is not None and size < devices else None
    if ranks is not None and devices % ranks:
        raise BadInput(
            "fsdp_size does not divide the devices",
            where=f"{settings.where}: {FSDP}fsdp_size",
            got=f"{ranks} of {devices}",
            wanted=f"a divisor of {devices}, or -1",
        )
    settings.says(f"{FSDP}fsdp_size", f"shards over {counted(ranks or devices, 'rank')}")
    return sharding, 0 if ranks == 1 else zero, None if ranks == 1 else ranks


def _loss(settings: Settings, assumed: list[str]) -> tuple[Loss, int]:
    """Return the form of the log-probabilities, and the tokens whose logits exist at once; 0: all of them."""
    keys = (f"{ACTOR}use_fused_kernels", f"{MODEL}use_fused_kernels")
    fused = any(settings.flag(key) for key in keys)
    coefficient = f"{ACTOR}entropy_coeff"
    weighed = (settings.text(coefficient) or "0").strip("0.") != ""
    entropies = weighed or settings.flag(f"{ACTOR}calculate_entropy")
    told = f"in chunks of {FUSED_CHUNK} tokens" if fused else "of whole logits"
    for key in keys:
        settings.says(key, f"log-probabilities {told}")
    backend = f"{MODEL}fused_kernel_options.impl_backend"
    if settings.text(backend) == "triton":
        settings.ignore(backend, "priced as verl's chunks in torch; its Triton kernels hold no logits")
    else:
        settings.says(backend, "chunks in torch")
    for key in (coefficient, f"{ACTOR}calculate_entropy"):
        settings.says(key, "entropies are computed" if entropies else "no entropies")
    if fused:
        assumed.append("chunks of the loss are priced as TRL's, which compute entropies and an accuracy as well")
        return "checkpointed", FUSED_CHUNK
    assumed.append(
        "the loss needs the logits of all tokens at once, prompts' too: use_fused_kernels computes them in chunks"
    )
    if not entropies:
        return "fused", 0
    more = ", nor the gradient of the logits that they add" if weighed else ""
    assumed.append(
        f"entropies keep the logits, so that their gradient has memory of its own; they are not priced themselves{more}"
    )
    for key in (f"{ACTOR}entropy_checkpointing", f"{ACTOR}entropy_from_logits_with_chunking"):
        settings.ignore(key, "memo prices no entropies of tokens")
    return "blocks", 0


def _attention(settings: Settings, assumed: list[str]) -> Any:
    key = f"{MODEL}override_config.attn_implementation"
    if not settings.has(key):
        assumed.append("attn_implementation is flash_attention_2, verl's default")
    word = settings.text(key) or "flash_attention_2"
    if word not in ATTENTION and word != SDPA:
        settings.ignore(key, "memo has no such attention kernel: priced as torch's")
        return None
    settings.says(key, f"attention {ATTENTION.get(word, 'of torch')}")
    return ATTENTION.get(word)


# -- what is left out -------------------------------------------------------------------------------------------------

_NOT_INCLUDED = {
    "actor_rollout_ref.rollout.": "memo prices the training step: rollouts are not part of it",
    "actor_rollout_ref.ref.": "memo prices the training step: the forward of the reference model is not part of it",
    "critic.": "the job has no critic",
    "reward": "memo prices the training step: rewards are not part of it",
    "custom_reward_function.": "memo prices the training step: rewards are not part of it",
    "algorithm.": "advantages are computed before the training step",
}
_CONSTANTS = (
    *("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "kl_loss_coef", "kl_loss_type"),
    *("loss_agg_mode", "grad_clip", "optim.lr", "optim.weight_decay", "optim.lr_warmup_steps", "optim.clip_grad"),
    *("optim.lr_warmup_steps_ratio", "optim.lr_scheduler_type", "optim.warmup_style", "optim.total_training_steps"),
)


def _explain(settings: Settings, said: _Said, assumed: list[str]) -> None:
    """Say what a step of the actor leaves out, and why options were not used."""
    reference = settings.flag(f"{ACTOR}use_kl_loss")
    in_reward = settings.flag("algorithm.use_kl_in_reward")
    settings.says(
        f"{ACTOR}use_kl_loss", "the KL term" if reference else "a KL term of weight 0, which takes the same time"
    )
    for name in _CONSTANTS:
        settings.says(f"{ACTOR}{name}", "a constant, which changes no time")
    padding = [f"{MODEL}use_remove_padding", f"{ACTOR}use_remove_padding"]
    for key in padding:
        settings.says(key, "sequences of the full length, which have no padding")
    assumed.append("row-wise kernels are those of transformers' eager modules (rowwise eager)")
    assumed.append("sequences have the full length: shorter ones take less time, and without padding less memory")
    if any(settings.has(key) and not settings.flag(key) for key in padding):
        assumed.append("with padding verl copies the logits of responses, which is not priced")
    model = " and of the reference model" if reference or in_reward else ""
    assumed.append(
        f"rollouts, rewards and the forwards for log-probabilities of the old policy{model} are not included"
    )
    if not settings.flag("actor_rollout_ref.rollout.free_cache_engine", default=True):
        assumed.append("the rollout engine keeps its memory (free_cache_engine false), which is not counted")
    else:
        assumed.append("the rollout engine has given its memory back; what its processes keep is not counted")
    adapters = [f"{MODEL}{name}" for name in ("lora_rank", "lora_adapter_path")]
    if settings.has(adapters[1]) or (settings.whole(adapters[0], least=0) or 0):
        more = [f"{MODEL}{name}" for name in ("lora_alpha", "target_modules", "exclude_modules")]
        settings.ignore([*adapters, *more], "no framework's adapters are known: priced as training of all parameters")
        assumed.append("low-rank adapters are priced as training of all parameters, which needs far more memory")
    else:
        settings.says(adapters[0], "all parameters are trained")
    settings.ignore(f"{MODEL}use_liger", "memo has no Liger kernels: priced with eager modules")
    settings.ignore(f"{ACTOR}use_prefix_grouper", "memo has no shared prefixes: every response has its prompt")
    settings.ignore(f"{ACTOR}calculate_sum_pi_squared", "memo prices no sums of squared probabilities")
    settings.ignore(
        f"{ACTOR}policy_loss.loss_mode", "memo prices the clipped objective; others take about the same time"
    )
    settings.ignore(f"{ACTOR}optim.optimizer", "memo has torch's AdamW alone")
    for prefix, why in _NOT_INCLUDED.items():
        taken = {option.key for option in settings.read}
        settings.ignore([key for key in settings.values if key.startswith(prefix) and key not in taken], why)
    other = [name for name in said.configs if name not in ("ppo_trainer", "ppo_trainer.yaml", "")]
    if other and not said.yaml:
        assumed.append(
            f"what the configuration {shown(other[0])} says is not known: name its file beside the command;"
            " verl's defaults stand here"
        )


FRAMEWORK = Framework(
    name="verl",
    title="verl",
    version="verl 0.8.0.dev (volcengine/verl@b178a3c) with FSDP actors",
    system="verl-fsdp",
    sayings=SAYINGS,
    jobs=jobs,
    files=_files,
    reads=reads,
    read=read,
)
