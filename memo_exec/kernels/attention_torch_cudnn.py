"""``torch-cudnn`` backend: cuDNN's fused attention through aten (CUDA). It copies the results that torch returns."""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool) -> None:
    """Write the output and its log-sum-exp."""
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    result, logsumexp, *_ = aten._scaled_dot_product_cudnn_attention(*by_head, None, True, 0.0, causal, False)
    out.copy_(result.transpose(1, 2))
    lse.copy_(logsumexp.view(logsumexp.shape[:3]).transpose(1, 2))


def backward(
    grad: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    *,
    causal: bool,
    deterministic: bool,
) -> None:
    """Write the gradients of Q, K, V."""
    del deterministic
    q, k, v = (x.transpose(1, 2) for x in qkv)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    found = aten._scaled_dot_product_cudnn_attention_backward(
        grad.transpose(1, 2),
        q,
        k,
        v,
        out.transpose(1, 2),
        lse.transpose(1, 2).unsqueeze(-1).contiguous(),
        seed,
        seed,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
    )
    for target, result in zip(grads, found, strict=True):
        target.copy_(result.transpose(1, 2))
