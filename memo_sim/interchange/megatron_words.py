"""What Megatron's configuration says, in its own names, to and from a job; shared by Megatron-LM and Megatron-Bridge.

Names are those of the fields of megatron-core's ``TransformerConfig``, ``ModelParallelConfig``, ``OptimizerConfig`` and
``DistributedDataParallelConfig``, and of Megatron-Bridge's ``GPTModelProvider`` (NVIDIA/Megatron-LM@d98e8a6,
NVIDIA-NeMo/Megatron-Bridge@067f987). ``megatron_lm.py`` and ``megatron_bridge.py`` say how their users write them.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from memo_sim.contract.attention_kernels import ATTENTION_KERNELS, AttentionName
from memo_sim.contract.errors import UsageError
from memo_sim.contract.knobs import Fp8Recipe, Recompute, States
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.interchange.framework import LIMITED, Saying
from memo_sim.interchange.job import Job, job_of
from memo_sim.interchange.megatron_layers import check_layers, plain_layers, settings_of_layers
from memo_sim.interchange.plan_paths import NOT_WRITTEN
from memo_sim.program.layout.stage import layers_of_runs

Settings = dict[str, Any]
"""Values by name; what stands at Megatron's default is left out."""

ATTENTION: dict[AttentionName, tuple[str, int | None]] = {
    "flash2": ("flash", 2),
    "flash3": ("flash", 3),
    "flash4": ("flash", 4),
    "flash": ("flash", None),
    "cudnn": ("fused", None),
    "plain": ("unfused", None),
}
"""``attention_backend`` and ``flash_attention_version`` of each generation."""

MODULES: dict[str, Recompute] = {"core_attn": "selective", "layernorm": "norms", "mlp": "mlp"}
"""Selective recompute of one of ``recompute_modules``, as a policy of memo."""


def mlp_modules(model: Model) -> tuple[str, ...]:
    """Return the ``recompute_modules`` that are a model's MLPs and experts."""
    if model.mixture is None:
        return ("mlp",)
    return ("moe",) if all(shape.experts for shape in model.layer_shapes) else ("mlp", "moe")


FP8: dict[Fp8Recipe, tuple[str, str]] = {
    "delayed": ("hybrid", "delayed"),
    "tensor": ("hybrid", "tensorwise"),
    "block": ("e4m3", "blockwise"),
    "mx": ("e4m3", "mxfp8"),
}
"""``fp8`` (the option ``--fp8-format``) and ``fp8_recipe`` of each recipe."""

LLAMA3_SCALING = (1.0, 4.0, 8192)
"""What ``--use-rope-scaling`` fixes: the two frequency factors, and the original positions
(``core/models/common/embeddings/rotary_pos_embedding.py``)."""

_KEPT = (
    "tp",
    "sequence_parallel",
    "cp",
    "ulysses",
    "pp",
    "dp",
    "zero",
    "zero_ranks",
    "overlap",
    "libraries",
    "cuda_graphs",
    "states",
    "fp8",
    "fp8_params",
    "fp8_experts",
    "expert_load",
    "expert_capacity",
)
"""Knobs that an exported job takes from the plan; the others are changed below, or left to Megatron."""

_FULL, _KEEP = {"recompute": "full", "offload_inputs": False}, {"recompute": "none"}


def nearest_jobs(decisions: Decisions) -> tuple[Job, ...]:
    """Return the jobs of Megatron that come nearest to a plan; one where its recompute can be said.

    Raises:
        UsageError: when the model is none that ``pretrain_gpt.py`` trains.
    """
    if decisions.model.bidirectional:
        raise UsageError(
            "Megatron's GPT has causal attention alone",
            got=f"{decisions.model.name}, which is bidirectional",
            wanted="a model with causal attention",
        )
    check_layers(decisions)
    layout, states, experts = decisions.layout, _states(decisions.states), decisions.model.mixture is not None
    tp, cp, ulysses = layout.tp * layout.metp, layout.cp, layout.ulysses
    if layout.uneven_heads and ulysses > 1:
        cp, ulysses = cp * ulysses, 1
    exchange = "all_gather" if layout.cp_exchange == "all_gather" and ulysses == 1 else "ring"
    zero = layout.zero or int((states != "fp32" or decisions.fp8_params) and layout.replicas > 1)
    if layout.pp > 1:
        zero = min(zero, 1)  # memo has no model of Megatron-FSDP on pipeline stages
    interleaved = layout.schedule == "interleaved" and layout.pp > 1
    changes = {
        "tp": tp,
        # Experts beside tp need it (core/transformer/moe/moe_layer.py).
        "sequence_parallel": (layout.sequence_parallel or layout.metp > 1 or experts) and tp > 1,
        "ep": layout.ep if experts else None,
        "fp8_experts": experts and decisions.fp8 != "none",
        "expert_tp": layout.expert_tp or None,
        "rebuild_qkv": decisions.rebuild_qkv and decisions.recompute != "full",
        "cp": cp,
        "cp_exchange": exchange if cp > 1 else None,
        "ulysses": ulysses,
        "pp_layers": layout.pp_layers or None,
        "schedule": ("interleaved" if interleaved else "1f1b") if layout.pp > 1 else None,
        "virtual_stages": layout.virtual_stages if interleaved else None,
        "zero": zero,
        "overlap": "gradients" if decisions.overlap == "both" and not zero else decisions.overlap,
        "states": states,
        # Deterministic mode refuses both (training/determinism.py; Megatron-Bridge's training/config.py).
        "tp_overlap": "none" if decisions.deterministic else layout.tp_overlap,
        "loss": "fused" if decisions.loss == "fused" and not decisions.deterministic else "auto",
        # Transformer Engine chooses the kernel that has sinks.
        "attention": None if decisions.model.sinks else _generation(decisions.kernels.attention),
    }
    model = replace(plain_layers(decisions.model), vocab=-(-decisions.model.vocab // tp) * tp)
    if model.linear_bias and not model.qkv_bias:
        model = replace(model, qkv_bias=True)
    same = replace(decisions, model=model)
    return tuple(job_of(same, _KEPT, **{**changes, **recompute}) for recompute in _recomputes(decisions))


def unknown(job: Job) -> str:
    """Return what of a job's model Megatron has kernels of that memo does not know; "" where it is nothing."""
    parts = {"experts": job.model.mixture, "latent attention": job.model.latent}
    return " and ".join(name for name, has in parts.items() if has is not None)


LAYOUTS = "megatron-layouts"
"""The system that predicts jobs of which something is ``unknown``."""


def _states(states: States) -> States:
    return "bf16" if states == "pure-bf16" else "fp32" if states == "pure-bf16-fp32-moments" else states


def _generation(kernel: str) -> AttentionName:
    known = ATTENTION_KERNELS[kernel].generation
    return known if known in ATTENTION else "flash2"


def _recomputes(decisions: Decisions) -> list[dict[str, Any]]:
    """Return the pins of recompute that can be said: the plan's own, or all that may replace it."""
    own, layers = decisions.recompute, decisions.recompute_layers
    if own == "full" and not layers.startswith("every-"):
        return [{**_FULL, "recompute_layers": None if layers == "all" else layers}]
    if own in ("none", *MODULES.values()) and not decisions.swapped_tokens:
        return [_KEEP if own == "none" else {"recompute": own}]
    parts = [{"recompute": part} for part in MODULES.values()]
    return [_FULL, _KEEP, *parts, {**_FULL, "recompute_layers": "groups-2"}]


def settings_of(job: Job) -> Settings:
    """Return what Megatron's configuration says for a job."""
    said = {**_model(job), **_batch(job), **_parallel(job), **_optimizer(job), **_rest(job)}
    if job.model.latent is not None:
        said["kv_channels"] = job.model.value_dim
    return said


def _model(job: Job) -> Settings:
    model = job.model
    said: Settings = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn_hidden,
        "num_attention_heads": model.heads,
        "kv_channels": model.head_dim,
        "normalization": "RMSNorm" if model.gated else "LayerNorm",
        "layernorm_epsilon": model.norm_eps,
        "max_position_embeddings": model.max_positions or job.seq_tokens,
        "position_embedding_type": "learned_absolute" if model.learned_positions else "rope",
        "vocab_size": model.vocab,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if model.kv_heads != model.heads:
        said["num_query_groups"] = model.kv_heads
    if model.gated:
        said["gated_linear_unit"] = True
    elif model.activation == "gelu":
        said["bias_activation_fusion"] = False
    elif not model.linear_bias:
        said["openai_gelu"] = True
    if not (model.linear_bias or (model.mixture and model.mixture.bias)):
        said["add_bias_linear"] = False
        if model.qkv_bias:
            said["add_qkv_bias"] = True
    if model.qk_norm:
        said["qk_layernorm"] = True
    if not model.tied_embeddings:
        said["share_embeddings_and_output_weights"] = False
    said["rotary_base"] = int(model.rope_theta)
    scaling = model.rope_scaling
    if scaling and scaling.kind == "llama3":
        said |= {"rope_scaling": True, "rope_scaling_factor": scaling.factor}
    elif scaling and scaling.kind != "yarn":
        said["seq_len_interpolation_factor"] = int(scaling.factor)
    said |= settings_of_layers(model)
    if said.get("quick_geglu"):
        del said["gated_linear_unit"]
    return said


def _batch(job: Job) -> Settings:
    said: Settings = {
        "seq_length": job.seq_tokens,
        "micro_batch_size": job.micro_batch,
        "global_batch_size": job.global_batch,
    }
    dtype = job.pins.dtype
    if dtype in ("bf16", "fp16"):
        said[dtype] = True
    if job.fp8 != "none":
        said["fp8"], said["fp8_recipe"] = FP8[job.fp8]
    if job.fp8_params:
        said["fp8_param_gather"] = True
    return said


def _parallel(job: Job) -> Settings:
    pins = job.pins
    tp, cp, ulysses, pp = pins.tp or 1, pins.cp or 1, pins.ulysses or 1, pins.pp or 1
    said: Settings = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    if pins.sequence_parallel:
        said["sequence_parallel"] = True
    if pins.tp_overlap == "chunked":
        said["tp_comm_overlap"] = True
    said["context_parallel_size"] = cp * ulysses
    if job.model.mixture is not None:
        said |= {"expert_model_parallel_size": pins.ep or 1, "expert_tensor_parallel_size": pins.expert_tp or tp}
        if job.expert_capacity:
            said |= {"moe_expert_capacity_factor": job.expert_capacity, "moe_pad_expert_input_to_capacity": True}
    if ulysses > 1:
        said["cp_comm_type"] = "a2a" if cp == 1 else "a2a+p2p"
        if cp > 1:
            said["hierarchical_context_parallel_sizes"] = [ulysses, cp]
    elif cp > 1:
        said["cp_comm_type"] = "all_gather" if pins.cp_exchange == "all_gather" else "p2p"
    if pp > 1:
        chunks = pins.virtual_stages or 1
        runs = pins.pp_layers or equal_runs(job.model, pp, chunks)
        if len(set(runs)) > 1:
            said["pipeline_model_parallel_layout"] = stages_text(runs)
        elif chunks > 1:
            said["virtual_pipeline_model_parallel_size"] = chunks
    return {**said, **_data_parallel(job)}


def equal_runs(model: Model, pp: int, chunks: int) -> tuple[int, ...]:
    """Return the layers of each run where none are given."""
    plain = Decisions(model=model, seq_tokens=1)
    return layers_of_runs(replace(plain, layout=replace(plain.layout, pp=pp, virtual_stages=chunks)))


def stages_text(runs: tuple[int, ...]) -> str:
    """Return the layers of each run as ``pipeline_model_parallel_layout`` has them: ``Et*3|t*4|t*3L``."""
    return "|".join(
        f"{'E' if at == 0 else ''}t*{layers}{'L' if at == len(runs) - 1 else ''}" for at, layers in enumerate(runs)
    )


def _data_parallel(job: Job) -> Settings:
    pins, said = job.pins, Settings()
    replicas = (pins.cp or 1) * (pins.ulysses or 1) * (pins.dp or 1)
    if (pins.zero or 0) >= 2:
        said |= {"use_megatron_fsdp": True, "use_distributed_optimizer": True, "ckpt_format": "fsdp_dtensor"}
        said["data_parallel_sharding_strategy"] = "optim_grads_params" if pins.zero == 3 else "optim_grads"
    elif pins.zero or job.states != "fp32" or job.fp8_params:
        said["use_distributed_optimizer"] = True
    if pins.zero and pins.zero_ranks and pins.zero_ranks < replicas:
        said["num_distributed_optimizer_instances"] = replicas // pins.zero_ranks
    if pins.overlap in ("gradients", "both"):
        said["overlap_grad_reduce"] = True
    if pins.overlap == "both":
        said["overlap_param_gather"] = True
    return said


def _optimizer(job: Job) -> Settings:
    if job.states == "bf16":
        return {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    if job.states == "host":
        return {
            "use_precision_aware_optimizer": True,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
        }
    return {}


def _rest(job: Job) -> Settings:
    pins, said = job.pins, Settings()
    layers = pins.recompute_layers or "all"
    if pins.recompute == "full":
        kind, _, count = layers.partition("-")
        said["recompute_granularity"] = "full"
        said["recompute_method"] = "block" if kind == "first" else "uniform"
        said["recompute_num_layers"] = int(count or 1)
    modules = [name for name, ours in MODULES.items() if ours == pins.recompute]
    modules = list(mlp_modules(job.model)) if pins.recompute == "mlp" else modules
    if modules or pins.rebuild_qkv:
        said["recompute_granularity"] = "selective"
        said["recompute_modules"] = [*modules, *(["mla_up_proj"] if pins.rebuild_qkv else [])]
    if pins.attention is not None:
        backend, version = ATTENTION[pins.attention]
        said["attention_backend"] = backend
        if version:
            said["flash_attention_version"] = version
    if job.loss == "fused":
        said |= {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}
    if pins.cuda_graphs:
        said |= {"cuda_graph_impl": "full_iteration", "check_for_nan_in_loss": False}
    if job.deterministic:
        said["deterministic_mode"] = True
    return said


def padded(vocab: int, divisible_by: int, tp: int) -> int:
    """Return the rows of the embedding: a multiple of ``divisible_by`` x tp (``training/vocab_utils.py``)."""
    multiple = divisible_by * tp
    return -(-vocab // multiple) * multiple


_NO_SWAP = "Megatron swaps no tokens: its activation offloading is by whole tensors of some layers"
_OWN_ALLOCATOR = "memory comes from PyTorch's caching allocator; no addresses are planned"
_NO_PARTS = "Megatron plays a sequence whole"
_OWN = "Megatron's own"
_LOSSES = "its loss divides the vocabulary over tp, unfused, or fused outside of deterministic mode"

SAYINGS: dict[str, Saying] = {
    "model.family": Saying("exact", ("normalization", "gated_linear_unit")),
    "model.layers": Saying("exact", ("num_layers",)),
    "model.hidden": Saying("exact", ("hidden_size",)),
    "model.heads": Saying("exact", ("num_attention_heads",)),
    "model.kv_heads": Saying("exact", ("num_query_groups",)),
    "model.head_dim": Saying("exact", ("kv_channels",)),
    "model.ffn_hidden": Saying("exact", ("ffn_hidden_size",)),
    "model.vocab": Saying("exact", ("vocab_size",), "every rank of tp holds as many rows"),
    "model.tied_embeddings": Saying("exact", ("share_embeddings_and_output_weights",)),
    "model.max_positions": Saying("exact", ("position_embedding_type", "max_position_embeddings")),
    "model.norm_eps": Saying("exact", ("layernorm_epsilon",)),
    "model.rope_theta": Saying("near", ("rotary_base",), "a whole number"),
    "model.rope_scaling": Saying(
        "near",
        ("rope_scaling", "rope_scaling_factor", "seq_len_interpolation_factor", "rotary_scaling_factor"),
        "Llama 3's scaling has frequency factors 1 and 4 over 8192 positions; a linear one is a whole number",
    ),
    "model.qkv_bias": Saying("near", ("add_qkv_bias", "add_bias_linear"), "goes with the other biases, or alone"),
    "model.linear_bias": Saying("exact", ("add_bias_linear",)),
    "model.qk_norm": Saying("exact", ("qk_layernorm",)),
    "model.bidirectional": Saying("none", (), "GPT has causal attention alone"),
    "decisions.documents": Saying("none", (), "memo writes no options of packed documents"),
    "decisions.document_cuts": Saying("none", (), "memo writes no options of packed documents"),
    "layout.ep": Saying("exact", ("expert_model_parallel_size", "expert_tensor_parallel_size")),
    "layout.expert_tp": Saying("exact", ("expert_tensor_parallel_size",)),
    "decisions.expert_load": Saying("own", (), "the data of the job decide it"),
    "decisions.expert_capacity": Saying(
        "near",
        ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"),
        "its capacity is of every expert, memo's of every pair of ranks; without one rows travel in their numbers",
    ),
    "decisions.expert_overflow": Saying("none", (), "rows beyond the capacity are dropped, never the step"),
    "decisions.expert_overlap": Saying("none", (), "its overlap is of the shared expert alone"),
    "model.latent": Saying(
        "exact",
        ("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        "rotary pairs are neighbours",
    ),
    "decisions.rebuild_qkv": Saying("exact", ("recompute_modules",)),
    "decisions.adapters": Saying("none", (), "memo writes no options of adapters"),
    "model.experts": Saying(
        "exact",
        ("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_router_score_function"),
        "a group's score is of as many experts as a token has of it",
    ),
    "model.layer_pattern": Saying(
        "exact",
        ("moe_layer_freq", "window_attn_skip_freq"),
        "layers have experts or an MLP, a window or none, and are alike otherwise",
    ),
    "model.window": Saying("exact", ("window_size",)),
    "model.sinks": Saying("exact", ("softmax_type",)),
    "model.proj_bias": Saying("exact", ("add_bias_linear",), "with the biases of all products"),
    **{f"model.{name}": Saying("none", (), "memo writes no options of Gemma's layers") for name in NOT_WRITTEN},
    "model.activation": Saying("exact", ("gated_linear_unit", "bias_activation_fusion", "openai_gelu")),
    "layout.tp": Saying("exact", ("tensor_model_parallel_size",)),
    "layout.sequence_parallel": Saying("exact", ("sequence_parallel",)),
    "layout.tp_overlap": Saying("exact", ("tp_comm_overlap",), "not in deterministic mode"),
    "layout.cp": Saying("exact", ("context_parallel_size", "cp_comm_type")),
    "layout.cp_exchange": Saying("exact", ("cp_comm_type",), "p2p or all_gather; beside a2a only p2p"),
    "layout.ulysses": Saying("exact", ("context_parallel_size", "cp_comm_type", "hierarchical_context_parallel_sizes")),
    "layout.uneven_heads": Saying("none", (), "a2a divides heads evenly: context parallelism in its place"),
    "layout.metp": Saying("none", (), "Megatron passes no weights round a ring: tensor parallelism in its place"),
    "layout.overlap_exchanges": Saying("none", (), "a choice of METP"),
    "layout.pp": Saying("exact", ("pipeline_model_parallel_size",)),
    "layout.pp_layers": Saying("exact", ("pipeline_model_parallel_layout",)),
    "layout.schedule": Saying("exact", ("virtual_pipeline_model_parallel_size",), "it has 1F1B, plain or interleaved"),
    "layout.virtual_stages": Saying("exact", ("virtual_pipeline_model_parallel_size",)),
    "layout.overlap_p2p": Saying("own", (), "1F1B waits for its transfers, the interleaved schedule does not"),
    "layout.dp": Saying("exact", (), ""),
    "layout.zero": Saying(
        "exact",
        ("use_distributed_optimizer", "use_megatron_fsdp", "data_parallel_sharding_strategy"),
        "bf16 or host states need the distributed optimizer",
    ),
    "layout.zero_ranks": Saying("exact", ("num_distributed_optimizer_instances",)),
    "layout.subsequences": Saying("none", (), _NO_PARTS),
    "layout.partition": Saying("none", (), _NO_PARTS),
    "layout.multiplexed": Saying("none", (), _NO_PARTS),
    "decisions.seq_tokens": Saying("exact", ("seq_length",)),
    "decisions.micro_batch": Saying("exact", ("micro_batch_size",)),
    "decisions.global_batch": Saying("exact", ("global_batch_size",)),
    "decisions.recompute": Saying(
        "exact",
        ("recompute_granularity", "recompute_modules"),
        "it recomputes whole layers, one module of each (attention, norms or the MLP), or nothing",
    ),
    "decisions.recompute_layers": Saying(
        "exact",
        ("recompute_method", "recompute_num_layers"),
        "all layers, groups of N, or the first K of each stage: no every N-th layer",
    ),
    "decisions.keep_norms": Saying("none", (), "a choice of METP"),
    "decisions.early_stop": Saying("own", (), "full recompute repeats whole layers"),
    "decisions.swapped_tokens": Saying("none", (), _NO_SWAP),
    "decisions.subsequence_swapped_tokens": Saying("none", (), _NO_SWAP),
    "decisions.offload_window": Saying("none", (), _NO_SWAP),
    "decisions.swap_dtype": Saying("none", (), _NO_SWAP),
    "decisions.rounding_buffers": Saying("none", (), _OWN_ALLOCATOR),
    "decisions.memory_policy": Saying("none", (), _OWN_ALLOCATOR),
    "decisions.allocator_limit_gib": LIMITED,
    "decisions.host_allocator": Saying("own", (), _OWN),
    "decisions.fp8": Saying("exact", ("fp8", "fp8_recipe"), "tensorwise, blockwise and mxfp8 need a Megatron of 2025"),
    "decisions.fp8_layouts": Saying("own", (), "the device decides it"),
    "decisions.fp8_experts": Saying("exact", ("fp8",), "experts are in FP8 wherever other products are"),
    "decisions.fp8_params": Saying("exact", ("fp8_param_gather",), "with its distributed optimizer or FSDP alone"),
    "decisions.states": Saying(
        "exact",
        ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype", "optimizer_cpu_offload"),
        "it always keeps master weights in fp32",
    ),
    "decisions.zero_params": Saying("own", (), _OWN),
    "decisions.grad_sums": Saying("own", (), "gradients are summed in fp32"),
    "decisions.overlap": Saying(
        "exact", ("overlap_grad_reduce", "overlap_param_gather"), "parameters are gathered with ZeRO alone"
    ),
    "decisions.loss": Saying("exact", ("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"), _LOSSES),
    "decisions.objective": Saying("none", (), "memo writes jobs with the objective next-token"),
    "decisions.loss_metrics": Saying("none", (), "no metrics are computed from the logits"),
    "decisions.streams": Saying("own", (), _OWN),
    "decisions.sharding": Saying("own", (), _OWN),
    "decisions.reduce_dtype": Saying("own", (), "gradients are reduced in fp32"),
    "decisions.modules": Saying("own", (), _OWN),
    "decisions.loss_chunk_tokens": Saying("none", (), "the logits of all tokens exist at once"),
    "decisions.mlp_chunk_tokens": Saying("none", (), "the MLP is played whole"),
    "decisions.mlp_rebuild": Saying("none", (), "the MLP is played whole"),
    "decisions.attention_chunk_tokens": Saying("none", (), "attention has all keys on the device"),
    "decisions.kernels.attention": Saying(
        "near",
        ("attention_backend", "flash_attention_version"),
        "the generation, not the build; what Transformer Engine finds installed",
    ),
    "decisions.kernels.head_groups": Saying("own", (), "attention runs over all heads at once"),
    "decisions.kernels.rowwise": Saying("own", (), "Megatron-LM's and Transformer Engine's fused kernels"),
    "decisions.kernels.adamw": Saying("own", (), "the fused optimizer of Transformer Engine or apex"),
    "decisions.dtype": Saying("exact", ("bf16", "fp16")),
    "decisions.libraries": Saying("own", (), "what is installed decides; install libraries of that year"),
    "decisions.deterministic": Saying("exact", ("deterministic_mode",)),
    "decisions.replay_allocator": Saying("none", (), _OWN_ALLOCATOR),
    "decisions.cuda_graphs": Saying("near", ("cuda_graph_impl",), "one graph of a whole iteration"),
}
"""How Megatron says each decision, by its configuration's names."""
