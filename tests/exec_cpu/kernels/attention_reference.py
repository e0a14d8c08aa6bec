"""Attention by its definition, for one head and one block of queries at a time, so that no index exceeds 32 bits."""

from __future__ import annotations

import torch
from torch import Tensor

Triple = tuple[Tensor, Tensor, Tensor]
QUERIES = 512


def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, shift: int = 0, window: int = 0) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp in ``q``'s dtype; tensors are (batch, tokens, heads, head_dim).

    ``shift`` moves the causal diagonal: query i sees keys up to i + shift (0 is correct). ``window``: how many keys a
    query sees at most; the queries then belong to the last keys.
    """
    shift += k.shape[1] - q.shape[1] if window else 0
    out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])
    for b, h, rows in _blocks(q):
        keys, values = _of_head(q, k, b, h), _of_head(q, v, b, h)
        scores = _scores(q[b, rows, h], keys, rows, causal=causal, shift=shift, window=window)
        lse[b, rows, h] = scores.logsumexp(-1)
        out[b, rows, h] = scores.softmax(-1) @ values
    return out, lse


def backward(
    grad: Tensor, qkv: Triple, out: Tensor, lse: Tensor, *, causal: bool, shift: int = 0, window: int = 0
) -> Triple:
    """Return the gradients of Q, K, V."""
    q, k, v = qkv
    shift += k.shape[1] - q.shape[1] if window else 0
    scale, group = q.shape[-1] ** -0.5, q.shape[2] // k.shape[2]
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in qkv)
    for b, h, rows in _blocks(q):
        keys, values, queries, incoming = _of_head(q, k, b, h), _of_head(q, v, b, h), q[b, rows, h], grad[b, rows, h]
        weights = (
            _scores(queries, keys, rows, causal=causal, shift=shift, window=window) - lse[b, rows, h, None]
        ).exp()
        product = (incoming * out[b, rows, h]).sum(-1, keepdim=True)
        slopes = weights * (incoming @ values.T - product) * scale
        dq[b, rows, h] = slopes @ keys
        dk[b, :, h // group] += slopes.T @ queries
        dv[b, :, h // group] += weights.T @ incoming
    return dq, dk, dv


def _blocks(q: Tensor) -> list[tuple[int, int, slice]]:
    batch, tokens, heads, _ = q.shape
    starts = range(0, tokens, QUERIES)
    return [(b, h, slice(s, min(s + QUERIES, tokens))) for b in range(batch) for h in range(heads) for s in starts]


def _of_head(q: Tensor, keys: Tensor, batch: int, head: int) -> Tensor:
    """Return the keys (or values) for a query head; neighbouring query heads share a key/value head."""
    return keys[batch, :, head // (q.shape[2] // keys.shape[2])]


def _scores(queries: Tensor, keys: Tensor, rows: slice, *, causal: bool, shift: int, window: int) -> Tensor:
    scores = queries @ keys.T * queries.shape[-1] ** -0.5
    if not causal:
        return scores
    at = torch.arange(rows.start, rows.stop, device=keys.device).unsqueeze(1) + shift
    key = torch.arange(len(keys), device=keys.device)
    return scores.masked_fill((key > at) | ((key <= at - window) if window else False), -torch.inf)
