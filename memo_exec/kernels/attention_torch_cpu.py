"""``torch-flash-cpu`` backend: torch's flash attention on the CPU. It copies the results that torch returns."""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool) -> None:
    """Write the output and its log-sum-exp."""
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    result, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(*by_head, 0.0, causal)
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
    """Write the gradients of Q, K, V; this operator is always deterministic."""
    del deterministic
    by_head = [x.transpose(1, 2) for x in (grad, *qkv, out, lse)]
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*by_head, 0.0, causal)
    for target, result in zip(grads, found, strict=True):
        target.copy_(result.transpose(1, 2))
