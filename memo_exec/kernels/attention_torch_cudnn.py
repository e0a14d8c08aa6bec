"""``torch-cudnn`` backend: cuDNN's fused attention through aten (CUDA). It copies the results that torch returns.

aten's operator has no argument for a window, so plans with windows are refused for it (``AttentionKernel.windows``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.kernels.attention_backend import AttentionBackward, Mask, heads_first, scale_of, store

aten = torch.ops.aten


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, mask: Mask, scale: float | None = None
) -> None:
    """Write the output and its log-sum-exp."""
    result, logsumexp, *_ = aten._scaled_dot_product_cudnn_attention(
        *heads_first(q, k, v), None, True, 0.0, mask.causal, False, scale=scale_of(q, scale)
    )
    store((out, lse), (result, logsumexp.view(logsumexp.shape[:3])))


def backward(call: AttentionBackward) -> None:
    """Write the gradients of Q, K, V."""
    grad, q, k, v, out, lse = heads_first(call.grad, *call.qkv, call.out, call.lse)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    found = aten._scaled_dot_product_cudnn_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse.unsqueeze(-1).contiguous(),
        seed,
        seed,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        call.mask.causal,
        scale=scale_of(call.out, call.scale),
    )
    store(call.grads, found)
