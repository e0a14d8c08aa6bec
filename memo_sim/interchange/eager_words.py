"""What frameworks of eager PyTorch have in common: the decisions that none of them has words for."""

from __future__ import annotations

from collections.abc import Mapping

from memo_sim.interchange.framework import LIMITED, Saying
from memo_sim.interchange.plan_paths import NOT_WRITTEN, plan_paths

_NO_METP = "it has no ring of weights (METP)"
_NO_SUBSEQUENCES = "it plays whole sequences"
_NO_ARENA = "its memory is that of PyTorch's caching allocator"
_NO_SWAP = "it swaps no tokens of a layer's tensors"

_NO_EXPERTS = "memo writes no options of experts"
_COMMON: dict[str, Saying] = {
    "layout.cp_exchange": Saying("own", lost="its ranks gather all keys and values"),
    "layout.ulysses": Saying("none", lost="it has no all-to-all around attention; its context parallelism gathers"),
    "layout.uneven_heads": Saying("none", lost="it has no all-to-all around attention"),
    "layout.metp": Saying("none", lost=_NO_METP),
    "layout.overlap_exchanges": Saying("none", lost=_NO_METP),
    "decisions.keep_norms": Saying("none", lost=_NO_METP),
    "layout.overlap_p2p": Saying("own", lost="its stages wait for what they send and receive"),
    "layout.subsequences": Saying("none", lost=_NO_SUBSEQUENCES),
    "layout.partition": Saying("none", lost=_NO_SUBSEQUENCES),
    "layout.multiplexed": Saying("none", lost=_NO_SUBSEQUENCES),
    "decisions.offload_window": Saying("none", lost=_NO_SUBSEQUENCES),
    "decisions.subsequence_swapped_tokens": Saying("none", lost=_NO_SUBSEQUENCES),
    "decisions.early_stop": Saying(
        "own", lost="its version of torch.utils.checkpoint ends a recompute where backward has its tensors"
    ),
    "decisions.swapped_tokens": Saying("none", lost=_NO_SWAP),
    "decisions.swap_dtype": Saying("none", lost="what it offloads has the dtype that autograd saves"),
    "decisions.rounding_buffers": Saying("none", lost="every layer has buffers of its own"),
    "decisions.memory_policy": Saying("none", lost=_NO_ARENA),
    "decisions.allocator_limit_gib": LIMITED,
    "decisions.host_allocator": Saying("none", lost="pinned memory comes from PyTorch's allocator of powers of two"),
    "decisions.zero_params": Saying("own", lost="FSDP2 keeps fp32 shards and casts them before every gather"),
    "decisions.grad_sums": Saying("own", lost="gradients are summed in fp32"),
    "decisions.overlap": Saying("own", lost="FSDP gathers and reduces beside compute"),
    "decisions.loss": Saying("none", lost="it has a loss of its own"),
    "decisions.objective": Saying("none", lost="memo writes jobs with the objective next-token"),
    "decisions.loss_metrics": Saying("none", lost="it computes no metrics from the logits"),
    "decisions.streams": Saying("own", lost="FSDP2 frees what another stream uses by events"),
    "decisions.sharding": Saying("none", lost="its ZeRO is torch's FSDP2"),
    "decisions.reduce_dtype": Saying("own", lost="gradients are reduced in fp32"),
    "decisions.modules": Saying(
        "own", lost="it trains its own modules, which keep other tensors than memo-exec's layers"
    ),
    "decisions.mlp_chunk_tokens": Saying("none", lost="its MLP runs on all tokens at once"),
    "decisions.mlp_rebuild": Saying("none", lost="its MLP runs on all tokens at once"),
    "decisions.attention_chunk_tokens": Saying("none", lost="its attention runs on the whole sequence"),
    "layout.ep": Saying("none", lost=_NO_EXPERTS),
    "layout.expert_tp": Saying("none", lost=_NO_EXPERTS),
    "decisions.documents": Saying("none", lost="memo writes no options of packed documents"),
    "decisions.document_cuts": Saying("none", lost="memo writes no options of packed documents"),
    "decisions.expert_load": Saying("none", lost=_NO_EXPERTS),
    "decisions.expert_capacity": Saying("none", lost=_NO_EXPERTS),
    "decisions.expert_overflow": Saying("none", lost=_NO_EXPERTS),
    "decisions.expert_overlap": Saying("none", lost=_NO_EXPERTS),
    "decisions.fp8": Saying("none", lost="memo writes no options of FP8: its products would run in bf16"),
    "decisions.fp8_layouts": Saying("own", lost="the device decides it"),
    "decisions.fp8_experts": Saying("none", lost=_NO_EXPERTS),
    "decisions.fp8_params": Saying("none", lost="memo writes no options of FP8"),
    "decisions.adapters": Saying("none", lost="memo writes no options of adapters"),
    "decisions.kernels.head_groups": Saying("none", lost="attention runs on all heads at once"),
    "decisions.libraries": Saying("own", lost="what is installed decides it"),
    "decisions.replay_allocator": Saying("none", lost=_NO_ARENA),
    "model.bidirectional": Saying("none", lost="it trains causal models"),
    "model.latent": Saying("none", lost="memo writes no options of latent attention"),
    "decisions.rebuild_qkv": Saying("none", lost="memo writes no options of latent attention"),
    "model.experts": Saying("none", lost=_NO_EXPERTS),
    "model.layer_pattern": Saying("none", lost="its models have layers of one kind"),
    **{
        f"model.{name}": Saying("none", lost="memo writes no options of windows, sinks or Gemma's layers")
        for name in ("window", "sinks", "proj_bias", *NOT_WRITTEN)
    },
}


def sayings(own: Mapping[str, Saying]) -> dict[str, Saying]:
    """Return the sayings of a framework: its own, and those in common, in the order of ``plan_paths``."""
    return {path: own.get(path) or _COMMON[path] for path in plan_paths()}


def exact(*keys: str, lost: str = "") -> Saying:
    """Return the saying of options that say the same; ``lost`` is about values that they do not have."""
    return Saying("exact", keys, lost)


def near(*keys: str, lost: str) -> Saying:
    """Return the saying of options that come near."""
    return Saying("near", keys, lost)


def lost(why: str) -> Saying:
    """Return the saying of a decision without words."""
    return Saying("none", lost=why)
