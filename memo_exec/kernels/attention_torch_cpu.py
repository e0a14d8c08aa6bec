"""``torch-flash-cpu`` backend: torch's flash attention on the CPU. It copies the results that torch returns."""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.kernels.attention_backend import AttentionBackward, heads_first, store

aten = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool) -> None:
    """Write the output and its log-sum-exp."""
    result, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(*heads_first(q, k, v), 0.0, causal)
    store((out, lse), (result, logsumexp))


def backward(call: AttentionBackward) -> None:
    """Write the gradients of Q, K, V; this operator is always deterministic."""
    by_head = heads_first(call.grad, *call.qkv, call.out, call.lse)
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*by_head, 0.0, call.causal)
    store(call.grads, found)
