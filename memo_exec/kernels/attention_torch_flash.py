"""``torch-flash`` backend: flash attention 2 through aten (CUDA). It copies the results that torch returns.

Its backward indexes batch x heads x tokens x head_dim with 32 bits (TabPFN#1184). Above 2**31 elements, the plan needs
more head groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool) -> None:
    """Write the output and its log-sum-exp."""
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    result, logsumexp, *_ = aten._scaled_dot_product_flash_attention(*by_head, 0.0, causal, False)
    out.copy_(result.transpose(1, 2))
    lse.copy_(logsumexp.transpose(1, 2))


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
    """Write the gradients of Q, K, V; torch's global switch decides whether the operator is deterministic."""
    del deterministic
    q, k, v = (x.transpose(1, 2) for x in qkv)
    no_lengths, no_state = None, torch.empty(0, dtype=torch.uint64, device=q.device)
    found = aten._scaled_dot_product_flash_attention_backward(
        grad.transpose(1, 2),
        q,
        k,
        v,
        out.transpose(1, 2),
        lse.transpose(1, 2).contiguous(),
        no_lengths,
        no_lengths,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        no_state,
        no_state,
    )
    for target, result in zip(grads, found, strict=True):
        target.copy_(result.transpose(1, 2))
