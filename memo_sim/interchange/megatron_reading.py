"""Reads Megatron's configuration, in its own names, as a job: the other direction of ``megatron_words.py``.

Values are texts, as a command line has them, or numbers, as YAML and Python have them. Every name is read, or listed as
ignored with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import msgspec

from memo_sim.contract.attention_kernels import AttentionName
from memo_sim.contract.errors import BadInput
from memo_sim.contract.interchange import IgnoredOption, ReadOption
from memo_sim.contract.knobs import Fp8Recipe, Loss, Overlap, Pins, Recompute, States
from memo_sim.contract.model import Model
from memo_sim.contract.rope_scaling import RopeScaling
from memo_sim.contract.units import format_percent
from memo_sim.interchange.framework import Read
from memo_sim.interchange.job import Job
from memo_sim.interchange.megatron_words import ATTENTION, FP8, LLAMA3_SCALING, MODULES, equal_runs, padded
from memo_sim.interchange.shell_script import is_unresolved, shown, unresolved_in

TRUE, FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off", "none", "null", "")

REFUSED = {
    "num_experts": "experts",
    "num_moe_experts": "experts",
    "multi_latent_attention": "latent attention",
    "hybrid_layer_pattern": "layers of several kinds",
    "hybrid_override_pattern": "layers of several kinds",
    "experimental_attention_variant": "another kind of attention",
    "heterogeneous_layers_config_path": "layers of several kinds",
}
"""Options that change what a layer is, so that a prediction without them would be of another model."""

_LEARNED = (
    r"^(lr|min_lr|max_lr|lr_.*|weight_decay.*|.*weight_decay|adam_.*|beta\d|sgd.*|optimizer|clip_grad|init_method.*"
    r"|train_iters|train_samples|loss_scale.*|initial_loss.*|min_loss.*|seed|decoupled.*|hysteresis|muon.*"
    r"|calculate_per_token_loss|scheduler.*|warmup.*|start_weight.*|end_weight.*|override_opt.*|use_checkpoint_opt.*"
    r"|finetune|reset_.*|eod_mask_loss|.*ratio|apply_layernorm_1p|layernorm_zero_centered_gamma|train_.*|max_steps"
    r"|apply_residual.*|apply_query.*|epsilon|adam_eps|cross_entropy_fusion_impl)$"
)
_RUNNING = (
    r"log|tensorboard|wandb|save|load|eval|exit|ckpt|checkpoint|timing|profil|interval|timeout|distributed_backend"
    r"|manual_gc|straggler|check_for|empty_unused|world|rank|master|nnodes|nproc|local|results|attach|print|record"
    r"|rerun|trace|spec$|spec_|dir$|path$|one_logger|experiment|name$|tags"
)
_NEEDED = re.compile(
    r"(tensor|pipeline|context)_model_parallel_size|context_parallel_size|num_(layers|attention_heads|query_groups)|"
    r"(hidden|ffn_hidden|vocab|padded_vocab|micro_batch|global_batch)_size|seq_length|recompute_num_layers|kv_channels|"
    r"max_position_embeddings"
)
"""Names whose values have to be known."""
_WHY: tuple[tuple[str, str], ...] = (
    (r"^[A-Z][A-Z0-9_]*$", "the environment of the run"),
    (r"fp4|nvfp", "memo has no products of four bits: they are faster than predicted"),
    (r"fp8|mxfp", "a choice of FP8 beside its recipe, which changes no time or memory that memo predicts"),
    (r"(hidden|attention)_dropout|embedding_dropout", "dropout is not priced"),
    (r"mtp_", "predicting several tokens is not priced: the step is longer than predicted"),
    (r"window_|attention_softmax|softmax_type|sink", "attention is priced as causal over the whole sequence"),
    (r"cpu_offloading|offload_modules|fine_grained|activation_offload", "offloading of activations is not priced"),
    (r"moe_|expert_|num_shared|shared_expert", "experts: the model has none"),
    (r"batch_size_schedule|rampup", "the batch grows to its full size, which is priced"),
    (
        r"grad_reduce_in_bf16|accumulate_allreduce|main_grads|main_params|grad_reduce_in_fp32",
        "memo sums gradients in fp32",
    ),
    (
        r"fusion|fused|persist_layer_norm|use_mcore|use_flash_attn|transformer_impl|^te_|gemm|jit|masked_softmax",
        "a choice of kernels, beside those that memo knows",
    ),
    (
        r"overlap|bucket|nccl|ddp|gloo|sharp|comm|ub_|p2p|deallocate|gradient_reduce|average_in",
        "how the framework communicates: the prediction has its own default",
    ),
    (_LEARNED, "what is learned, not how long a step takes"),
    (
        r"data|split|tokenizer|vocab_file|merge_file|mock|num_workers|dataset|blend|eod|mmap|mask_in|tiktoken|fim_",
        "data and tokenizer",
    ),
    (_RUNNING, "logging, evaluation, checkpoints and start"),
)
"""Why a name is ignored, by the first expression that finds it."""

_UNKNOWN = "memo does not know it"


def why_ignored(name: str) -> str:
    """Return why memo does not use an option."""
    return next((why for pattern, why in _WHY if re.search(pattern, name)), _UNKNOWN)


@dataclass
class Configuration:
    """The values of a file by Megatron's names; what is taken is noted, so that the rest can be listed.

    ``spelled``: how the file writes a name. ``where``: the file.
    """

    values: Mapping[str, Any]
    spelled: Mapping[str, str]
    where: str
    read: list[ReadOption] = field(default_factory=list)
    ignored: list[IgnoredOption] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    """Names on which conditions of a script depend that could not be told."""
    taken: set[str] = field(default_factory=set)
    model: Model | None = None
    """The model, where the file names one in place of a shape."""

    def has(self, name: str) -> bool:
        """Return whether the file gives a value."""
        value = self.values.get(name)
        return value is not None and str(value).lower() not in ("none", "null")

    def raw(self, name: str) -> Any:
        """Return a value, and note that it was used."""
        self.taken.add(name)
        value = self.values.get(name)
        return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value

    def key(self, name: str) -> str:
        """Return a name as the file writes it."""
        return self.spelled.get(name, name)

    def bad(self, name: str, wanted: str) -> BadInput:
        """Return the error about a value."""
        text = str(self.values.get(name))
        hint = None
        if is_unresolved(text):
            names = " ".join(f"--set {open_}=..." for open_ in self.open_names())
            hint = f"give what the script leaves open: {names} (or --set {name}=...)"
        return BadInput(
            "a value that cannot be read",
            where=f"{self.where}: {self.key(name)}",
            got=shown(text)[:80],
            wanted=wanted,
            hint=hint,
        )

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int | None:
        """Return a whole number, or ``default`` where the file has none.

        Raises:
            BadInput: when it is something else.
        """
        if not self.has(name):
            self.taken.add(name)
            return default
        text = str(self.raw(name)).replace("_", "")
        if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or int(text) < least:
            raise self.bad(name, f"a whole number from {least}")
        return int(text)

    def open_names(self) -> list[str]:
        """Return the names that the script leaves open and that memo may need, in their order."""
        texts = [str(value) for name, value in self.values.items() if _NEEDED.fullmatch(name)]
        found = [*self.undecided, *(name for text in texts for name in unresolved_in(text))]
        return list(dict.fromkeys(name for name in found if re.fullmatch(r"\w+", name, re.ASCII)))

    def needed(self, name: str) -> int:
        """Return a whole number that the file has to give.

        Raises:
            BadInput: when it does not.
        """
        found = self.whole(name)
        if found is None:
            raise BadInput(
                "the job does not say what memo needs",
                where=self.where,
                got=f"no {self.key(name)}",
                hint=f"give it: --set {name}=...",
            )
        return found

    def number(self, name: str, default: float) -> float:
        """Return a finite number.

        Raises:
            BadInput: when it is something else.
        """
        if not self.has(name):
            self.taken.add(name)
            return default
        try:
            value = float(str(self.raw(name)))
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e30:
            raise self.bad(name, "a number")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return whether a switch is on.

        Raises:
            BadInput: when it is neither on nor off.
        """
        if not self.has(name):
            self.taken.add(name)
            return default if name not in self.values else False
        raw = self.raw(name)
        words = raw if isinstance(raw, list | tuple) else [raw]
        if self.key(name).startswith("--") and all(is_unresolved(str(word)) for word in words):
            return True  # a switch, and variables behind it that nothing sets
        text = str(raw).lower()
        if text not in (*TRUE, *FALSE):
            raise self.bad(name, "true or false")
        return text in TRUE

    def text(self, name: str, default: str = "") -> str:
        """Return a text.

        Raises:
            BadInput: when it is not resolved.
        """
        if not self.has(name):
            self.taken.add(name)
            return default
        value = str(self.raw(name))
        if is_unresolved(value):
            raise self.bad(name, "a value")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of texts, which the file may join by commas."""
        self.taken.add(name)
        value = self.values.get(name)
        parts = value if isinstance(value, list | tuple) else re.split(r"[,\s]+", str(value or "").strip("[]()"))
        return [str(part).strip("'\" ") for part in parts if str(part).strip("'\" ")]

    def say(self, names: tuple[str, ...], says: str) -> None:
        """Note what the values of ``names`` say in memo's words; names that the file does not give are left out."""
        for name in names:
            if name in self.values:
                self.read.append(ReadOption(key=self.key(name), value=self._shown(name), says=says))

    def ignore_rest(self) -> None:
        """List every name that was not taken."""
        for name, value in self.values.items():
            if name not in self.taken:
                why = why_ignored(name)
                self.ignored.append(IgnoredOption(key=self.key(name), value=_shown(value), why=why))

    def _shown(self, name: str) -> str:
        """Return the value as the file has it; a switch by its name has none."""
        value = self.values[name]
        return "" if isinstance(value, bool) and self.key(name).startswith("--") else _shown(value)


def _shown(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return shown(text)[:200]


def read_job(config: Configuration, *, framework: str, name: str, devices: int, fallback_devices: int) -> Read:
    """Return the job of a configuration. ``devices``: those that the file starts, 0 where it does not say.

    ``fallback_devices`` are taken where the file's are unknown, or no multiple of its layout's.

    Raises:
        BadInput: when a value is missing or wrong, or the model is none of memo's.
    """
    _refuse(config)
    pins, replicas_of = _layout(config)
    started = devices
    if started % replicas_of:
        config.assumed.append(f"not the {started} devices that it starts: its layout needs a multiple of {replicas_of}")
        started = 0
    used = started or fallback_devices
    if used and used % replicas_of:
        raise BadInput(
            "the job's layout does not divide the devices",
            where=config.where,
            got=f"{used} devices",
            wanted=f"a multiple of {replicas_of} (tp x pp x cp)",
            hint="another --cluster, or --set devices=...",
        )
    dp = used // replicas_of if used else 1
    if not used:
        config.assumed.append(f"one replica, on {replicas_of} devices: --set devices=... says how many there are")
    micro = config.whole("micro_batch_size", 1) or 1
    batch = config.whole("global_batch_size") or _last_batch(str(config.values.get("step_batch_size_schedule", "")))
    if batch is None:
        batch = micro * dp
        config.assumed.append(f"global batch {batch}: one micro-batch for each replica, Megatron's default")
    config.say(("micro_batch_size",), f"micro_batch {micro}")
    config.say(("global_batch_size",), f"global_batch {batch}")
    seq = config.needed("seq_length")
    config.say(("seq_length",), f"seq_len {seq}")
    model = config.model or _model(config, name, pins["tp"], seq)
    replicas = dp * pins["cp"] * pins["ulysses"]
    states = _states(config)
    data = _data_parallel(config, replicas)
    chosen = Job(
        model=model,
        seq_tokens=seq,
        micro_batch=micro,
        global_batch=batch,
        states=states,
        fp8=(recipe := _fp8(config)),
        fp8_params=_fp8_params(config, recipe),
        loss=_loss(config),
        deterministic=_deterministic(config),
        pins=Pins(
            **pins,
            **_stages(config, model, pins["pp"]),
            **data,
            **_recompute(config, model, pins["pp"]),
            **_rest(config),
            dp=dp,
        ),
    )
    config.ignore_rest()
    return Read(
        framework=framework,
        job=chosen,
        devices=devices,
        read=tuple(config.read),
        ignored=tuple(config.ignored),
        assumed=tuple(config.assumed),
    )


def _refuse(config: Configuration) -> None:
    for name, what in REFUSED.items():
        if config.has(name) and str(config.values[name]).lower() not in FALSE:
            raise BadInput(
                f"memo reads no options of {what} from the files of a framework",
                where=f"{config.where}: {config.key(name)}",
                got=_shown(config.values[name]),
                wanted="a dense model of one kind of layer",
                hint="memo-sim what-if MODEL prices presets and config.json files, experts and latents too",
            )


def _layout(config: Configuration) -> tuple[dict[str, Any], int]:
    """Return the pins of tp, cp, Ulysses and pp, and how many devices one replica of the model takes."""
    tp, pp = config.whole("tensor_model_parallel_size", 1) or 1, config.whole("pipeline_model_parallel_size", 1) or 1
    context = config.whole("context_parallel_size", 1) or 1
    sequence = config.flag("sequence_parallel") and tp > 1
    chunked = config.flag("tp_comm_overlap") and sequence
    config.say(("tensor_model_parallel_size",), f"tp {tp}")
    config.say(("sequence_parallel",), "sequence parallelism" if sequence else "nothing, with tp 1")
    config.say(("tp_comm_overlap",), "tp_overlap chunked" if chunked else "nothing, without sequence parallelism")
    config.say(("pipeline_model_parallel_size",), f"pp {pp}")
    kinds = list(dict.fromkeys(config.texts("cp_comm_type"))) or ["p2p"]
    if len(kinds) > 1:
        config.assumed.append(f"all layers exchange as the first does: {kinds[0]}")
    sizes = [int(size) for size in config.texts("hierarchical_context_parallel_sizes") if size.isdigit()]
    kind, ulysses = kinds[0].replace("_", "").lower(), 1
    if kind == "a2a":
        ulysses = context
    elif kind == "a2a+p2p":
        if len(sizes) != 2 or prod(sizes) != context:
            raise config.bad("hierarchical_context_parallel_sizes", f"two sizes whose product is {context}")
        ulysses = sizes[0]
    cp = context // ulysses
    exchange = ("all_gather" if kind == "allgather" else "ring") if cp > 1 else None
    says = f"cp {cp}" + (f" ({exchange})" if exchange else "") + (f", ulysses {ulysses}" if ulysses > 1 else "")
    config.say(("context_parallel_size", "cp_comm_type", "hierarchical_context_parallel_sizes"), says)
    pins = {
        "tp": tp,
        "sequence_parallel": sequence,
        "tp_overlap": "chunked" if chunked else "none",
        "cp": cp,
        "cp_exchange": exchange,
        "ulysses": ulysses,
        "pp": pp,
    }
    return pins, tp * context * pp


def _model(config: Configuration, name: str, tp: int, seq: int) -> Model:
    layers, hidden, heads = (config.needed(key) for key in ("num_layers", "hidden_size", "num_attention_heads"))
    kv_heads = config.whole("num_query_groups", heads) or heads
    head_dim = config.whole("kv_channels") or max(1, hidden // heads)
    gated = config.flag("gated_linear_unit")
    plain = 4 * hidden if not gated else int((4 * hidden * 2 / 3) / 64) * 64
    ffn = config.whole("ffn_hidden_size", plain) or plain
    rms = config.text("normalization", "LayerNorm") == "RMSNorm"
    if rms != gated:
        config.assumed.append(
            "norms are priced as RMSNorm: memo has LayerNorm only with a plain MLP"
            if gated
            else "norms are priced as LayerNorm: memo has RMSNorm only with a gated MLP"
        )
    if config.flag("squared_relu"):
        config.assumed.append("the MLP's activation is priced as GELU")
    bias, fused = config.flag("add_bias_linear", default=True), config.flag("bias_activation_fusion", default=True)
    qkv = config.flag("add_qkv_bias")
    tied = config.flag("share_embeddings_and_output_weights", default=True)
    tanh = config.flag("openai_gelu") or (bias and fused)
    positions = config.text("position_embedding_type", "learned_absolute")
    if config.flag("use_rotary_position_embeddings"):
        positions = "rope"
    table = config.whole("max_position_embeddings", seq) or seq
    learned = positions == "learned_absolute" and not gated
    if positions not in ("rope", "learned_absolute") or (gated and positions == "learned_absolute"):
        config.assumed.append(f"positions are priced as rotary ones, not {positions}")
    scaling = _scaling(config)
    fields: dict[str, Any] = {
        "name": name,
        "family": "llama" if gated else "gpt",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn_hidden": ffn,
        "vocab": _vocab(config, tp),
        "tied_embeddings": tied,
        "max_positions": table if learned else 0,
        "norm_eps": config.number("layernorm_epsilon", 1e-5),
        "rope_theta": config.number("rotary_base", 10000.0),
        "rope_scaling": scaling,
        "qkv_bias": qkv or bias,
        "linear_bias": bias,
        "qk_norm": config.flag("qk_layernorm"),
        "activation": "silu" if gated else "gelu_tanh" if tanh else "gelu",
        "source": f"read from {config.where}",
    }
    config.taken |= {"rotary_percent", "group_query_attention"}
    shape = (
        *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
        *("normalization", "layernorm_epsilon", "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "qk_layernorm"),
        *("share_embeddings_and_output_weights", "position_embedding_type", "max_position_embeddings", "rotary_base"),
        *("use_rotary_position_embeddings", "rope_scaling", "rope_scaling_factor", "seq_len_interpolation_factor"),
        *("vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by", "bias_activation_fusion", "openai_gelu"),
        *("squared_relu", "rotary_percent", "group_query_attention"),
    )
    config.say(shape, "the model")
    try:
        return msgspec.convert(fields, Model)
    except (ValueError, msgspec.ValidationError) as error:
        raise BadInput("the job's model cannot be", where=config.where, got=str(error)) from None


def _scaling(config: Configuration) -> RopeScaling | None:
    factor = config.number("rope_scaling_factor", 8.0)
    if config.flag("rope_scaling"):
        low, high, original = LLAMA3_SCALING
        return RopeScaling(
            kind="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_positions=original
        )
    stretched = config.number("seq_len_interpolation_factor", 0.0)
    return RopeScaling(kind="linear", factor=stretched) if stretched > 1 else None


def _vocab(config: Configuration, tp: int) -> int:
    """Return the rows of the embedding: as given, or padded as Megatron pads a vocabulary."""
    given, divisible = config.whole("padded_vocab_size"), config.whole("make_vocab_size_divisible_by", 128) or 128
    if given:
        config.taken.add("vocab_size")
        return given
    if not config.has("vocab_size"):
        tokenizer = config.text("tokenizer_type") if config.has("tokenizer_type") else ""
        if tokenizer not in GPT2_TOKENIZERS and not (config.has("vocab_file") and config.has("merge_file")):
            raise BadInput(
                "the size of the vocabulary comes from a tokenizer that memo does not read",
                where=config.where,
                got=tokenizer or "no tokenizer",
                hint="give it: --set vocab_size=128256",
            )
        config.assumed.append(f"a vocabulary of {GPT2_VOCAB}: that of GPT-2's tokenizer")
        return padded(GPT2_VOCAB, divisible, tp)
    vocab = config.needed("vocab_size")
    should_pad = config.flag("should_pad_vocab", default=True)
    return padded(vocab, divisible, tp) if should_pad else vocab


GPT2_TOKENIZERS, GPT2_VOCAB = ("GPT2BPETokenizer",), 50257


def _stages(config: Configuration, model: Model, pp: int) -> dict[str, Any]:
    """Return the pins of the pipeline."""
    chunks = config.whole("virtual_pipeline_model_parallel_size", 1) or 1
    each = config.whole("num_layers_per_virtual_pipeline_stage")
    if each and pp > 1:
        chunks = max(1, model.layers // pp // each)
    text = config.text("pipeline_model_parallel_layout")
    first, last = (config.whole(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last"))
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "overlap_p2p_comm"):
        config.flag(name)
    runs: tuple[int, ...] = ()
    if text:
        runs = tuple(layers_of(text))
        chunks = max(1, len(runs) // pp)
    elif (first or last) and pp > 1:
        runs = tuple(_with_ends(config, model.layers, pp * chunks, first, last))
    says = f"stages of {', '.join(map(str, runs))} layers" if runs else f"{chunks} chunks of layers a stage"
    names = ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage")
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    config.say((*names, *ends, "pipeline_model_parallel_layout"), says if pp > 1 else "nothing, with one stage")
    config.say(("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), "memo's own division")
    config.say(("overlap_p2p_comm",), "the prediction's own: 1F1B waits, interleaved does not")
    if pp == 1:
        return {}
    if runs == equal_runs(model, pp, chunks):
        runs = ()
    return {
        "pp_layers": runs or None,
        "schedule": "interleaved" if chunks > 1 else "1f1b",
        "virtual_stages": chunks if chunks > 1 else None,
    }


def layers_of(text: str) -> Iterator[int]:
    """Yield the transformer layers of each run of a layout such as ``Et*3|(t|)*2,L``."""
    plain = re.sub(r"[\s,]", "", text.strip("\"'"))
    for _ in range(MOST_GROUPS):
        grown = re.sub(r"\(([^()]*)\)\*(\d{1,3})", lambda match: match[1] * int(match[2]), plain)
        if grown == plain:
            break
        plain = grown[:MOST_TEXT]
    for run in plain.replace("(", "").replace(")", "").split("|"):
        yield sum(int(count or 1) for count in re.findall(r"t(?:\*(\d{1,4}))?", run))


MOST_GROUPS, MOST_TEXT = 8, 100_000


def _with_ends(config: Configuration, layers: int, runs: int, first: int | None, last: int | None) -> Iterator[int]:
    """Yield the layers of each run where the first and last have their own numbers."""
    between = runs - bool(first) - bool(last)
    left = layers - (first or 0) - (last or 0)
    if between < 0 or left < 0 or (between and left % between):
        raise config.bad("num_layers_in_first_pipeline_stage", "numbers that leave equal ones to the other stages")
    yield from ([first] if first else [])
    yield from [left // between] * between if between else []
    yield from ([last] if last else [])


def _data_parallel(config: Configuration, replicas: int) -> dict[str, Any]:
    """Return the pins of ZeRO and of what overlaps with it."""
    strategies = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    strategy = config.text("data_parallel_sharding_strategy", "optim_grads_params")
    distributed = config.flag("use_distributed_optimizer")
    zero = int(distributed)
    if config.flag("use_megatron_fsdp") or config.flag("use_custom_fsdp"):
        zero = strategies.get(strategy, 3)
    if config.flag("use_torch_fsdp2"):
        zero = 3
    zero = zero if replicas > 1 else 0
    instances = config.whole("num_distributed_optimizer_instances", 1) or 1
    if replicas % instances:
        raise config.bad("num_distributed_optimizer_instances", f"a divisor of {replicas} replicas")
    grads, params = config.flag("overlap_grad_reduce"), config.flag("overlap_param_gather")
    overlap: Overlap = "none" if not grads else "both" if params else "gradients"
    shards = ("use_distributed_optimizer", "use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")
    config.say(
        (*shards, "data_parallel_sharding_strategy"),
        f"zero {zero}" if replicas > 1 else "zero 0: no rank shares parameters with another",
    )
    config.say(("num_distributed_optimizer_instances",), f"zero_ranks {replicas // instances}")
    config.say(("overlap_grad_reduce", "overlap_param_gather"), f"overlap {overlap}")
    return {"zero": zero, "zero_ranks": replicas // instances if zero and instances > 1 else None, "overlap": overlap}


def _last_batch(schedule: str) -> int | None:
    """Return the batch that a schedule ends with: 1152 of ``0:384 200B:768 400B:1152``."""
    last = re.fullmatch(r".*:([1-9]\d{0,8})\s*", schedule, re.ASCII | re.DOTALL)
    return int(last[1]) if last else None


def _states(config: Configuration) -> States:
    moments = (config.text("exp_avg_dtype", "fp32"), config.text("exp_avg_sq_dtype", "fp32"))
    aware, offloaded = config.flag("use_precision_aware_optimizer"), config.flag("optimizer_cpu_offload")
    share = config.number("optimizer_offload_fraction", 1.0)
    narrow = aware and all("bf16" in moment or "bfloat16" in moment for moment in moments)
    states: States = "host" if offloaded and share > 0 else "bf16" if narrow else "fp32"
    if states == "host" and share < 1:
        config.assumed.append(f"all optimizer states are on the host, not {format_percent(share, 0)} of them")
    names = ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype", "optimizer_cpu_offload")
    config.say((*names, "optimizer_offload_fraction"), f"states {states}")
    return states


def _fp8(config: Configuration) -> Fp8Recipe:
    """Return the recipe of products in FP8; Megatron's default is delayed scaling.

    Raises:
        BadInput: when the recipe is none that memo has.
    """
    word = config.text("fp8_recipe", "delayed").rpartition(".")[2] if config.text("fp8") not in ("", "None") else ""
    recipe: Fp8Recipe | None = next((ours for ours, (_, theirs) in FP8.items() if theirs == word), None)
    if word and recipe is None:
        raise config.bad("fp8_recipe", ", ".join(theirs for _, theirs in FP8.values()))
    config.say(("fp8", "fp8_recipe"), f"fp8 {recipe or 'none'}")
    return recipe or "none"


def _fp8_params(config: Configuration, recipe: Fp8Recipe) -> bool:
    """Return whether weights are kept in FP8 alone; Megatron-Core and NeMo have names of their own for it.

    MXFP8's are taken as copies of bf16 weights. With torch's FSDP2 Megatron turns it off itself (``arguments.py``).
    """
    names = ("fp8_param_gather", "fp8_param", "fp8_params")
    given = [config.flag(name) for name in names]  # all, because reading an option notes it
    on = any(given) and recipe != "none" and not config.flag("use_torch_fsdp2")
    if on and recipe == "mx":
        config.assumed.append("bf16 parameters beside those in MXFP8: memo has no MXFP8 parameters alone")
        on = False
    config.say(names, f"fp8_params {on}")
    return on


def _loss(config: Configuration) -> Loss:
    fused = config.flag("cross_entropy_loss_fusion")
    config.say(("cross_entropy_loss_fusion",), f"loss {'fused' if fused else 'vocab-parallel'}")
    return "fused" if fused else "auto"


def _deterministic(config: Configuration) -> bool:
    on = config.flag("deterministic_mode")
    config.say(("deterministic_mode",), "deterministic" if on else "nothing")
    return on


def _recompute(config: Configuration, model: Model, pp: int) -> dict[str, Any]:
    granularity, method = config.text("recompute_granularity"), config.text("recompute_method")
    count, modules = config.whole("recompute_num_layers", least=0), config.texts("recompute_modules")
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
    old = ("recompute_activations", "checkpoint_activations")
    if config.flag("recompute_activations") and not granularity:
        granularity = "selective"
    if config.flag("checkpoint_activations") and not granularity:
        granularity, method = "full", "uniform"
    if granularity not in ("", "full", "selective"):
        raise config.bad("recompute_granularity", "full or selective")
    if granularity == "full" and not (method == "block" and not count):
        layers = _recomputed_layers(config, model.layers // pp, method, count or 1)
        config.say((*names, *old), "recompute full" + (f", layers {layers}" if layers else ""))
        return {"recompute": "full", "recompute_layers": layers, "offload_inputs": False}
    part: Recompute = "none"
    if granularity == "selective":
        part = _selective(config, modules or ["core_attn"])
    config.say((*names, *old), f"recompute {part}")
    return {"recompute": part}


def _recomputed_layers(config: Configuration, a_stage: int, method: str, count: int) -> str | None:
    if method not in ("uniform", "block", ""):
        raise config.bad("recompute_method", "uniform or block")
    if method == "":
        config.assumed.append("recompute of every layer by itself: no recompute method is given")
    if method == "block":
        return f"first-{count}" if count < a_stage else None
    return f"groups-{count}" if count > 1 and method == "uniform" else None


def _selective(config: Configuration, modules: list[str]) -> Recompute:
    """Return the recompute of one of the modules: memo has one at a time."""
    known = [module for module in ("mlp", "core_attn", "layernorm") if module in modules]
    if len(modules) > 1 or not known:
        told = f"priced as {known[0]} alone" if known else "priced as none"
        config.assumed.append(f"recompute of {', '.join(modules)} is {told}: memo has one module at a time")
    return MODULES[known[0]] if known else "none"


def _rest(config: Configuration) -> dict[str, Any]:
    """Return the pins of kernels and dtype."""
    backend, version = config.text("attention_backend", "auto"), config.whole("flash_attention_version")
    backend = backend.rpartition(".")[2]
    if backend == "auto" and config.flag("use_flash_attn"):
        backend = "flash"
    attention: AttentionName | None = next(
        (name for name, said in ATTENTION.items() if said == (backend, version if backend == "flash" else None)), None
    )
    says = f"attention {attention}" if attention else "the attention that the prediction finds fastest"
    config.say(("attention_backend", "flash_attention_version", "use_flash_attn"), says)
    graphs = config.text("cuda_graph_impl", "none") != "none"
    graphs = config.flag("enable_cuda_graph") or config.flag("external_cuda_graph") or graphs
    config.say(("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"), f"cuda_graphs {graphs}")
    config.taken.add("check_for_nan_in_loss")
    dtype = "bf16" if config.flag("bf16") else "fp16" if config.flag("fp16") else "fp32"
    config.say(("bf16", "fp16"), f"dtype {dtype}")
    return {"attention": attention, "cuda_graphs": graphs, "dtype": dtype}
