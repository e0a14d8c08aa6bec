"""``flash2`` backend: flash-attn 2.7 and newer (CUDA). It writes output and gradients into the plan's tensors."""

from __future__ import annotations

from torch import Tensor

from memo_exec.kernels.attention_backend import AttentionBackward, Mask, scale_of


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, mask: Mask, scale: float | None = None
) -> None:
    """Write the output and its log-sum-exp."""
    from flash_attn.flash_attn_interface import flash_attn_gpu

    factor = scale_of(q, scale)
    _, logsumexp, *_ = flash_attn_gpu.fwd(q, k, v, out, None, 0.0, factor, mask.causal, *mask.sides, 0.0, False, None)
    lse.copy_(logsumexp.transpose(1, 2))


def backward(call: AttentionBackward) -> None:
    """Write the gradients of Q, K, V."""
    from flash_attn.flash_attn_interface import _flash_attn_backward

    logsumexp = call.lse.transpose(1, 2).contiguous()
    _flash_attn_backward(
        call.grad,
        *call.qkv,
        call.out,
        logsumexp,
        *call.grads,
        0.0,
        scale_of(call.out, call.scale),
        call.mask.causal,
        *call.mask.sides,
        0.0,
        None,
        call.deterministic,
        rng_state=None,
    )
