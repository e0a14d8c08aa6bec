"""``flash2`` backend: flash-attn 2.7 and newer (CUDA). It writes output and gradients into the plan's tensors."""

from __future__ import annotations

from torch import Tensor

from memo_exec.kernels.attention_backend import AttentionBackward, Mask, Packing, packed_rows, scale_of


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


def forward_packed(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, packing: Packing, scale: float | None = None
) -> None:
    """Write the output and its log-sum-exp of packed documents, in one call. Not yet run on a GPU."""
    from flash_attn.flash_attn_interface import flash_attn_gpu

    rows = packed_rows(q, k, v, out)
    ends, longest = (packing.ends, packing.ends), (packing.longest, packing.longest)
    _, logsumexp, *_ = flash_attn_gpu.varlen_fwd(
        *rows, *ends, None, None, None, None, *longest, 0.0, scale_of(q, scale), False, True, -1, -1, 0.0, False, None
    )
    lse.flatten(0, 1).copy_(logsumexp.transpose(0, 1))


def backward_packed(call: AttentionBackward, packing: Packing) -> None:
    """Write the gradients of Q, K, V of packed documents, in one call. Not yet run on a GPU."""
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    _flash_attn_varlen_backward(
        *packed_rows(call.grad, *call.qkv, call.out),
        call.lse.flatten(0, 1).transpose(0, 1).contiguous(),
        *packed_rows(*call.grads),
        packing.ends,
        packing.ends,
        packing.longest,
        packing.longest,
        0.0,
        scale_of(call.out, call.scale),
        True,
        -1,
        -1,
        0.0,
        None,
        call.deterministic,
    )
