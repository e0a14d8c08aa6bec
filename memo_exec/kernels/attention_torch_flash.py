"""``torch-flash`` backend: flash attention 2 through aten (CUDA). It copies the results that torch returns.

Its backward indexes batch x heads x tokens x head_dim with 32 bits (TabPFN#1184). Above 2**31 elements, the plan needs
more head groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.kernels.attention_backend import AttentionBackward, heads_first, store

aten = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool) -> None:
    """Write the output and its log-sum-exp."""
    result, logsumexp, *_ = aten._scaled_dot_product_flash_attention(*heads_first(q, k, v), 0.0, causal, False)
    store((out, lse), (result, logsumexp))


def backward(call: AttentionBackward) -> None:
    """Write the gradients of Q, K, V; torch's global switch decides whether the operator is deterministic."""
    grad, q, k, v, out, lse = heads_first(call.grad, *call.qkv, call.out, call.lse)
    no_lengths, no_state = None, torch.empty(0, dtype=torch.uint64, device=q.device)
    found = aten._scaled_dot_product_flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        no_lengths,
        no_lengths,
        q.shape[2],
        k.shape[2],
        0.0,
        call.causal,
        no_state,
        no_state,
    )
    store(call.grads, found)
