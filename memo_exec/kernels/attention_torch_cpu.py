"""``torch-flash-cpu`` backend: torch's flash attention on the CPU. It copies the results that torch returns.

torch's operator has no window. A window's calls go through it by blocks of queries, each with the keys that its queries
see and a mask of the block. Memory grows with a block's area, not with that of the sequence.

    window 4, blocks of 4 queries      keys of block 2:  4 5 6 7 8 9 10 11 (7 of them are masked in the first row)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memo_exec.kernels.attention_backend import AttentionBackward, Mask, heads_first, scale_of, store

aten = torch.ops.aten
LEAST_BLOCK, MOST_BLOCK = 128, 1024
"""Queries of a block: as many as the window has keys, within these. A mask has a few million entries at most."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, mask: Mask, scale: float | None = None
) -> None:
    """Write the output and its log-sum-exp."""
    operator, factor = aten._scaled_dot_product_flash_attention_for_cpu, scale_of(q, scale)
    if not mask.window:
        result, logsumexp = operator(*heads_first(q, k, v), 0.0, mask.causal, scale=factor)
        store((out, lse), (result, logsumexp))
        return
    for queries, keys in _blocks(q.shape[1], k.shape[1], mask.window):
        result, logsumexp = operator(
            *heads_first(q[:, queries], k[:, keys], v[:, keys]),
            0.0,
            attn_mask=_hidden(queries, keys, k.shape[1] - q.shape[1], mask.window, q),
            scale=factor,
        )
        store((out[:, queries], lse[:, queries]), (result, logsumexp))


def backward(call: AttentionBackward) -> None:
    """Write the gradients of Q, K, V; this operator is always deterministic.

    The keys of neighbouring blocks overlap, so their gradients are summed, in fp32.
    """
    operator, (q, k, v) = aten._scaled_dot_product_flash_attention_for_cpu_backward, call.qkv
    factor = scale_of(q, call.scale)
    if not call.mask.window:
        by_head = heads_first(call.grad, q, k, v, call.out, call.lse)
        store(call.grads, operator(*by_head, 0.0, call.mask.causal, scale=factor))
        return
    sums = [torch.zeros(x.shape, dtype=torch.float32) for x in (k, v)]
    for queries, keys in _blocks(q.shape[1], k.shape[1], call.mask.window):
        by_head = heads_first(
            call.grad[:, queries], q[:, queries], k[:, keys], v[:, keys], call.out[:, queries], call.lse[:, queries]
        )
        hidden = _hidden(queries, keys, k.shape[1] - q.shape[1], call.mask.window, q)
        grad_q, *others = operator(*by_head, 0.0, False, attn_mask=hidden, scale=factor)
        call.grads[0][:, queries].copy_(grad_q.transpose(1, 2))
        for total, part in zip(sums, heads_first(*others), strict=True):
            total[:, keys] += part
    for target, total in zip(call.grads[1:], sums, strict=True):
        target.copy_(total)


def _blocks(tokens: int, of: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Yield the queries of each block, and the keys that they see; the queries belong to the last of ``of`` keys."""
    rows, earlier = min(max(window, LEAST_BLOCK), MOST_BLOCK), of - tokens
    for first in range(0, tokens, rows):
        end = min(first + rows, tokens)
        yield slice(first, end), slice(max(0, first + earlier - window + 1), end + earlier)


def _hidden(queries: slice, keys: slice, earlier: int, window: int, like: Tensor) -> Tensor:
    """Return what is added to the scores of a block: 0 where a query sees a key, else minus infinity."""
    at = torch.arange(queries.start + earlier, queries.stop + earlier).unsqueeze(1)
    key = torch.arange(keys.start, keys.stop)
    seen = (key <= at) & (key > at - window)
    return torch.zeros(seen.shape, dtype=like.dtype).masked_fill_(~seen, -torch.inf)
