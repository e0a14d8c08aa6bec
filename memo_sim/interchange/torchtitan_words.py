"""How torchtitan 0.3.0 says each decision of a plan."""

from __future__ import annotations

from memo_sim.contract.knobs import Schedule
from memo_sim.interchange.eager_words import exact, near, sayings
from memo_sim.interchange.framework import Saying

RECOMPUTES = ("none", "full", "operators")
"""Recompute that it has: ``activation_checkpoint`` None, ``FullAC`` and ``SelectiveAC``."""
SCHEDULES: dict[str, Schedule] = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved"}
"""Names of torch's pipeline schedules. Its zero-bubble schedules have two chunks a stage, memo's has one."""
STEPPING = "happens between steps"

SAYINGS = sayings(
    {
        **{
            f"model.{name}": exact("model_spec")
            for name in (
                *("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab"),
                *("tied_embeddings", "max_positions", "rope_theta", "qk_norm", "activation"),
            )
        },
        "model.norm_eps": near("model_spec", lost="norms inside of layers have torchtitan's eps of that model"),
        "model.rope_scaling": near("model_spec", lost="its Llama has the scaling of Llama 3.1; that costs nothing"),
        "model.qkv_bias": exact("model_spec", lost="only models without biases"),
        "model.linear_bias": exact("model_spec", lost="only models without biases"),
        "layout.tp": exact("parallelism.tensor_parallel_degree"),
        "layout.sequence_parallel": exact("parallelism.enable_sequence_parallel"),
        "layout.tp_overlap": exact(
            "compile.enable_async_tensor_parallel", lost="asynchronous tensor parallelism needs compiled modules"
        ),
        "layout.cp": exact(
            "parallelism.context_parallel_degree",
            "parallelism.context_parallel_load_balancer",
            lost="it replaces the other ways to divide a sequence",
        ),
        "layout.pp": exact("parallelism.pipeline_parallel_degree"),
        "layout.pp_layers": exact("parallelism.module_fqns_per_model_part"),
        "layout.schedule": exact(
            "parallelism.pipeline_parallel_schedule",
            lost="torch's zero-bubble schedules have two chunks a stage; 1F1B replaces memo's",
        ),
        "layout.virtual_stages": exact("parallelism.module_fqns_per_model_part"),
        "layout.dp": exact("parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"),
        "layout.zero": exact(
            "parallelism.data_parallel_shard_degree",
            "parallelism.fsdp_reshard_after_forward",
            lost="FSDP2 has ZeRO 3, or 2 where parameters stay gathered; it always divides over cp",
        ),
        "layout.zero_ranks": exact(
            "parallelism.data_parallel_replicate_degree", lost="shards divide over whole cp groups"
        ),
        "decisions.seq_tokens": exact("training.seq_len"),
        "decisions.micro_batch": exact("training.local_batch_size", "parallelism.pipeline_parallel_microbatch_size"),
        "decisions.global_batch": exact("training.global_batch_size"),
        "decisions.recompute": exact("activation_checkpoint", lost="it recomputes operators, whole layers, or nothing"),
        "decisions.recompute_layers": exact("activation_checkpoint", lost="no groups of layers that share one input"),
        "decisions.states": exact(
            "training.dtype",
            "optimizer.implementation",
            "training.enable_cpu_offload",
            lost="with states on the host, parameters and gradients wait there too, which memo does not price",
        ),
        "decisions.loss": Saying("own", lost="it has cross_entropy of an fp32 copy of the logits"),
        "decisions.loss_chunk_tokens": exact("loss.num_chunks", lost="a rank's tokens in equal chunks"),
        "decisions.reduce_dtype": Saying("own", lost="training.mixed_precision_reduce is float32 alone"),
        "decisions.kernels.attention": near(
            "model_spec.attn_backend",
            lost="varlen attention takes the newest flash attention of the GPU, on Hopper FlashAttention-3; with cp or"
            " CUDA graphs it has FlexAttention, which is priced as PyTorch's flash attention",
        ),
        "decisions.kernels.rowwise": exact("compile.enable", lost="modules run eagerly or compiled"),
        "decisions.kernels.adamw": exact(
            "optimizer.implementation", lost="moments in bf16 need the fused kernel, which is its default"
        ),
        "decisions.fp8": Saying("none", lost="its float8 has a scale for each row, and memo writes none of its MXFP8"),
        "decisions.dtype": exact("training.mixed_precision_param", lost="bf16 or fp32"),
        "decisions.deterministic": exact("debug.deterministic"),
        "decisions.cuda_graphs": exact("training.disable_cuda_graphs", lost="not with pipeline stages"),
    }
)


def chunk_of_loss(local_tokens: int, wanted: int) -> tuple[int, int]:
    """Return the number of equal chunks of the loss, and their tokens (0: one chunk), nearest to ``wanted`` tokens."""
    if wanted <= 0 or wanted >= local_tokens:
        return 1, 0
    count = -(-local_tokens // wanted)
    while local_tokens % count:
        count += 1
    return count, local_tokens // count
