"""Reads Megatron's configuration, in its own names, as a job: the other direction of ``megatron_words.py``.

Values are texts, as a command line has them, or numbers, as YAML and Python have them. Every name is read, or listed as
ignored with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, TypeVar

import msgspec

from memo_sim.contract.attention_kernels import AttentionName
from memo_sim.contract.errors import BadInput
from memo_sim.contract.knobs import Fp8Recipe, Loss, Overlap, Pins, Recompute, States
from memo_sim.contract.model import Model
from memo_sim.contract.rope_scaling import RopeScaling
from memo_sim.contract.units import format_percent
from memo_sim.interchange.framework import Read
from memo_sim.interchange.job import Job
from memo_sim.interchange.megatron_configuration import FALSE, Configuration, shown_value
from memo_sim.interchange.megatron_layers import (
    Defaults,
    read_experts,
    read_latent,
    read_layers,
    read_yarn,
)
from memo_sim.interchange.megatron_words import ATTENTION, FP8, LLAMA3_SCALING, MODULES, equal_runs, mlp_modules, padded

REFUSED = {
    "hybrid_layer_pattern": "layers of several kinds",
    "hybrid_override_pattern": "layers of several kinds",
    "experimental_attention_variant": "another kind of attention",
    "heterogeneous_layers_config_path": "layers of several kinds",
}
"""Options that change what a layer is, so that a prediction without them would be of another model."""


def read_job(
    config: Configuration, *, framework: str, name: str, defaults: Defaults, devices: int, fallback_devices: int
) -> Read:
    """Return the job of a configuration. ``devices``: those that the file starts, 0 where it does not say.

    ``fallback_devices`` are used where the file's are unknown, or no multiple of its layout's. ``defaults``: the
    framework's, of latent attention.

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
    model = config.model or _model(config, name, pins["tp"], seq, defaults)
    experts = _expert_parallel(config, model, pins["tp"])
    replicas = dp * pins["cp"] * pins["ulysses"]
    states = _states(config)
    data = _data_parallel(config, replicas)
    fp8 = _fp8(config)
    chosen = Job(
        model=model,
        seq_tokens=seq,
        micro_batch=micro,
        global_batch=batch,
        states=states,
        fp8=fp8,
        fp8_params=_fp8_params(config, fp8),
        fp8_experts=fp8 != "none" and model.mixture is not None,
        loss=_loss(config),
        deterministic=_deterministic(config),
        expert_capacity=_capacity(config, experts["ep"]),
        pins=Pins(
            **pins,
            **experts,
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
                got=shown_value(config.values[name]),
                wanted="a model of attention and MLPs or experts",
                hint="memo-sim what-if MODEL prices presets and config.json files",
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


def _expert_parallel(config: Configuration, model: Model, tp: int) -> dict[str, Any]:
    """Return the pins of expert parallelism, and of tensor parallelism inside experts; None without experts.

    Raises:
        BadInput: when some of the tensor-parallel ranks divide experts, or when they all have all experts whole.
    """
    if model.mixture is None:
        return {"ep": None, "expert_tp": None}
    ep = config.whole("expert_model_parallel_size", 1) or 1
    inside = config.whole("expert_tensor_parallel_size", tp) or tp
    whole = inside == 1 < tp
    if inside not in (1, tp) or (whole and ep == 1):
        raise config.bad("expert_tensor_parallel_size", f"{tp}, as tp, or 1 with expert parallelism")
    config.say(("expert_model_parallel_size",), f"ep {ep}")
    config.say(("expert_tensor_parallel_size",), "whole experts" if whole else f"every expert divided by tp {tp}")
    dispatcher = config.text("moe_token_dispatcher_type", "allgather")
    if ep > 1 and dispatcher != "alltoall":
        config.assumed.append(f"rows travel to experts by all-to-all, not by the dispatcher {dispatcher}")
    config.say(("moe_token_dispatcher_type",), "rows travel by all-to-all")
    return {"ep": ep, "expert_tp": 1 if whole else None}


def _capacity(config: Configuration, ep: int | None) -> float:
    """Return the rows that a rank may send to another one, over the mean; 0: memo's default."""
    factor = config.number("moe_expert_capacity_factor", 0.0)
    config.flag("moe_pad_expert_input_to_capacity")
    config.say(
        ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"),
        f"expert_capacity {factor:g}" if (ep or 1) > 1 else "nothing, without expert parallelism",
    )
    if (ep or 1) == 1:
        return 0.0
    if factor:
        config.assumed.append(f"the capacity {factor:g} of every expert is that of every pair of ranks")
    else:
        config.assumed.append("rows travel in memo's own capacity (--expert-capacity), not in their numbers of a step")
    return factor


def _model(config: Configuration, name: str, tp: int, seq: int, defaults: Defaults) -> Model:
    layers, hidden, heads = (config.needed(key) for key in ("num_layers", "hidden_size", "num_attention_heads"))
    kv_heads = config.whole("num_query_groups", heads) or heads
    latent, latent_scaling = _checked(config, lambda: read_latent(config, defaults))
    head_dim = latent.head_dim if latent else config.whole("kv_channels") or max(1, hidden // heads)
    gated = config.flag("gated_linear_unit") or config.flag("quick_geglu")
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
    if positions not in ("rope", "yarn", "learned_absolute") or (gated and positions == "learned_absolute"):
        config.assumed.append(f"positions are priced as rotary ones, not {positions}")
    yarn = positions == "yarn" and latent is None
    scaling = latent_scaling or (_checked(config, lambda: read_yarn(config)) if yarn else _scaling(config))
    experts = _checked(config, lambda: read_experts(config, ffn, biased=bias))
    sinks = config.text("softmax_type", "vanilla")
    if sinks == "off-by-one":
        config.assumed.append("attention's softmax is priced as the plain one, not off by one")
    config.say(("softmax_type",), "learned sinks" if sinks == "learnable" else "no sinks")
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
        "linear_bias": bias and experts is None,
        "proj_bias": bias and experts is not None,
        "qk_norm": config.flag("qk_layernorm") and latent is None,
        "sinks": sinks == "learnable",
        "latent": latent,
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
    return _checked(config, lambda: read_layers(config, msgspec.convert(fields, Model), experts))


T = TypeVar("T")


def _checked(config: Configuration, make: Callable[[], T]) -> T:
    """Return what ``make`` returns.

    Raises:
        BadInput: when its values are of no model.
    """
    try:
        return make()
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
    modules = modules or ["core_attn"] if granularity == "selective" else []
    rebuilt = model.latent is not None and "mla_up_proj" in modules
    if rest := [module for module in modules if module != "mla_up_proj" or not rebuilt]:
        part = _selective(config, rest, model)
    config.say((*names, *old), f"recompute {part}" + (", with Q, K and V from latents again" if rebuilt else ""))
    return {"recompute": part, **({"rebuild_qkv": True} if rebuilt else {})}


def _recomputed_layers(config: Configuration, a_stage: int, method: str, count: int) -> str | None:
    if method not in ("uniform", "block", ""):
        raise config.bad("recompute_method", "uniform or block")
    if method == "":
        config.assumed.append("recompute of every layer by itself: no recompute method is given")
    if method == "block":
        return f"first-{count}" if count < a_stage else None
    return f"groups-{count}" if count > 1 and method == "uniform" else None


def _selective(config: Configuration, modules: list[str], model: Model) -> Recompute:
    """Return the recompute of one of the modules: memo has one at a time."""
    mlps = mlp_modules(model)
    if set(modules) == set(mlps):
        return "mlp"
    known = [module for module in (*mlps, "core_attn", "layernorm") if module in modules]
    if len(modules) > 1 or not known or known[0] in mlps:
        told = f"priced as {' and '.join(mlps) if known[0] in mlps else known[0]} alone" if known else "priced as none"
        config.assumed.append(f"recompute of {', '.join(modules)} is {told}: memo has one module at a time")
    return MODULES.get(known[0], "mlp") if known else "none"


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
