"""``torch-flash`` backend: flash attention 2 through aten (CUDA). It copies the results that torch returns.

Its backward indexes batch x heads x tokens x head_dim with 32 bits (TabPFN#1184). Above 2**31 elements, the plan needs
more head groups. A window goes through the operator below, which takes tokens before heads.
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
    factor = scale_of(q, scale)
    if mask.window:
        result, logsumexp, *_ = aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, mask.causal, False, scale=factor, **_window(mask)
        )
        out.copy_(result)
        lse.copy_(logsumexp.transpose(1, 2))
        return
    result, logsumexp, *_ = aten._scaled_dot_product_flash_attention(
        *heads_first(q, k, v), 0.0, mask.causal, False, scale=factor
    )
    store((out, lse), (result, logsumexp))


def backward(call: AttentionBackward) -> None:
    """Write the gradients of Q, K, V; torch's global switch decides whether the operator is deterministic."""
    q, k, v = call.qkv
    factor, lse = scale_of(q, call.scale), call.lse.transpose(1, 2).contiguous()
    no_lengths, no_state = None, torch.empty(0, dtype=torch.uint64, device=q.device)
    rest = (no_lengths, no_lengths, q.shape[1], k.shape[1], 0.0, call.mask.causal, no_state, no_state)
    if call.mask.window:
        found = aten._flash_attention_backward(
            call.grad, q, k, v, call.out, lse, *rest, scale=factor, **_window(call.mask)
        )
        for target, result in zip(call.grads, found, strict=True):
            target.copy_(result)
        return
    grad, q, k, v, out = heads_first(call.grad, q, k, v, call.out)
    found = aten._scaled_dot_product_flash_attention_backward(grad, q, k, v, out, lse, *rest, scale=factor)
    store(call.grads, found)


def _window(mask: Mask) -> dict[str, int]:
    left, right = mask.sides
    return {"window_size_left": left, "window_size_right": right}
