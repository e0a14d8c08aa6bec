"""Attention over Q, K, V: splits operands by sequence and head group, and calls the plan's attention backend.

A call has one of three sets of operands:

    qkv        packed rows: each row holds the query, the key and the value of one token
    qkv, kv    queries from the packed rows, keys and values from ``kv`` (received in a ring, or all-gathered)
    q, kv      queries from ``q``, keys and values from the KV cache: of this subsequence or of earlier ones

A backend is a module with the functions ``forward`` and ``backward``. They take (batch, tokens, heads, head_dim) views
and an fp32 log-sum-exp of (batch, tokens, heads). A ``Mask`` says which keys a query sees, ``scale`` is the factor on
the scores. Packed documents are calls of their own, on views of their rows (``documents.py``).
A backend may have ``forward_packed`` and ``backward_packed`` besides, which take all documents of a rank's own rows in
one call (varlen).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from memo_exec.kernels.attention_backend import CAUSAL, AttentionBackward, Mask, Packing
from memo_exec.kernels.call import Call
from memo_exec.kernels.documents import segments
from memo_sim.program.ir.work import Attention, WindowedAttention

BACKENDS = {
    "torch-flash-cpu": "memo_exec.kernels.attention_torch_cpu",
    "torch-flash": "memo_exec.kernels.attention_torch_flash",
    "torch-cudnn": "memo_exec.kernels.attention_torch_cudnn",
    "flash2": "memo_exec.kernels.attention_flash2",
    "flash3": "memo_exec.kernels.attention_flash3",
    "flash4": "memo_exec.kernels.attention_flash4",
    "te-fused": "memo_exec.kernels.attention_te",
}
"""Module of each attention kernel that a plan can select."""


def attention(call: Call) -> None:
    """``out, lse = attention(Q, K, V)``, with the operands that the module docstring lists."""
    work, backend = _work(call), _backend(call)
    q, k, v = _operands(call, work)
    out, lse = call["out"].view(q.shape), call.matrix("lse").view(q.shape[:3])
    if (packing := _packing(call, work, backend)) is not None:
        for queries, keys in _groups(call, work):
            mine = q[:, :, queries], k[:, :, keys], v[:, :, keys], out[:, :, queries], lse[:, :, queries]
            backend.forward_packed(*mine, packing=packing, scale=call.context.model.score_scale)
        return
    if _leaves_rows(call, work):
        out.zero_()  # a merge leaves the rows of queries without keys as they were
        lse.fill_(-torch.inf)
    for at, own, of in _documents(call, work):
        for queries, keys in _groups(call, work):
            backend.forward(
                q[at, own, queries],
                k[at, of, keys],
                v[at, of, keys],
                out[at, own, queries],
                lse[at, own, queries],
                mask=_mask(work),
                scale=call.context.model.score_scale,
            )


def attention_backward(call: Call) -> None:
    """Write ``grad_qkv`` from the output, its log-sum-exp and its gradient.

    If keys and values come from ``kv``, it writes ``grad_q`` and ``grad_kv`` instead. The output and the log-sum-exp
    then cover all keys of each query, not only those in ``kv``.
    """
    work, backend = _work(call), _backend(call)
    q, k, v = _operands(call, work)
    if call.get("grad_kv") is None:
        grad_q, grad_k, grad_v = _packed(call["grad_qkv"], work)
    else:
        grad_q, (grad_k, grad_v) = call["grad_q"].view(q.shape), _keys(call["grad_kv"], work)
    grad, out = (_queries(torch.unflatten(call[role], 1, q.shape[2:]), work) for role in ("grad", "out"))
    lse = _queries(call.matrix("lse"), work)
    if (packing := _packing(call, work, backend)) is not None:
        for queries, keys in _groups(call, work):
            backend.backward_packed(
                AttentionBackward(
                    grad[:, :, queries],
                    (q[:, :, queries], k[:, :, keys], v[:, :, keys]),
                    out[:, :, queries],
                    lse[:, :, queries],
                    (grad_q[:, :, queries], grad_k[:, :, keys], grad_v[:, :, keys]),
                    mask=CAUSAL,
                    scale=call.context.model.score_scale,
                    deterministic=call.context.decisions.deterministic,
                ),
                packing,
            )
        return
    if _leaves_rows(call, work):
        for gradient in (grad_q, grad_k, grad_v):
            gradient.zero_()
    for at, own, of in _documents(call, work):
        for queries, keys in _groups(call, work):
            backend.backward(
                AttentionBackward(
                    grad[at, own, queries],
                    (q[at, own, queries], k[at, of, keys], v[at, of, keys]),
                    out[at, own, queries],
                    lse[at, own, queries],
                    (grad_q[at, own, queries], grad_k[at, of, keys], grad_v[at, of, keys]),
                    mask=_mask(work),
                    scale=call.context.model.score_scale,
                    deterministic=call.context.decisions.deterministic,
                )
            )


def _documents(call: Call, work: Attention) -> Iterator[tuple[slice, slice, slice]]:
    """Yield (sequences, queries, keys) of each document, or of all sequences where a sequence is one document."""
    if call.context.decisions.documents is None:
        yield slice(None), slice(None), slice(None)
        return
    for part in segments(call, work):
        yield slice(part.sequence, part.sequence + 1), part.queries, part.keys


def _packing(call: Call, work: Attention, backend: ModuleType) -> Packing | None:
    """Return the documents of a rank's own rows, for backends that take them in one call; None for other calls."""
    if call.context.decisions.documents is None or work.mask == "none" or not hasattr(backend, "forward_packed"):
        return None
    lengths = [part.queries.stop - part.queries.start for part in segments(call, work)]
    return Packing(call["documents"][: len(lengths) + 1], max(lengths))


def _leaves_rows(call: Call, work: Attention) -> bool:
    """Return whether some rows may have no keys or no queries in this call: documents that lie on one rank alone."""
    return call.context.decisions.documents is not None and work.mask == "none"


def _work(call: Call) -> Attention:
    work = call.instruction.work
    assert isinstance(work, Attention)
    return work


def _mask(work: Attention) -> Mask:
    return Mask(work.mask == "causal", work.window if isinstance(work, WindowedAttention) else 0)


def _backend(call: Call) -> ModuleType:
    return import_module(BACKENDS[_work(call).kernel])


def _operands(call: Call, work: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q, K, V as (batch, tokens, heads, head_dim) views of the packed rows, or of ``q`` and ``kv``."""
    kv = call.get("kv")
    if kv is None:
        return _packed(call["qkv"], work)
    separate = call.get("q")
    q = _packed(call["qkv"], work)[0] if separate is None else _by_head(separate, work)
    return q, *_keys(kv, work)


def _packed(qkv: Tensor, work: Attention) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.split(_by_head(qkv, work), [work.heads, work.kv_heads, work.kv_heads], dim=2)
    return q, k, v


def _by_head(rows: Tensor, work: Attention) -> Tensor:
    return _queries(torch.unflatten(rows, 1, (-1, work.head_dim)), work)


def _keys(kv: Tensor, work: Attention) -> tuple[Tensor, Tensor]:
    k, v = kv.view(work.batch, work.k_tokens, 2, work.kv_heads, work.head_dim).unbind(2)
    return k, v


def _queries(rows: Tensor, work: Attention) -> Tensor:
    """Return the last ``q_tokens`` rows of each sequence."""
    return torch.unflatten(rows, 0, (work.batch, -1))[:, -work.q_tokens :]


def _groups(call: Call, work: Attention) -> Iterator[tuple[slice, slice]]:
    """Yield (query heads, key/value heads) of each head group; grouped-query attention keeps both aligned."""
    groups = call.context.decisions.kernels.head_groups
    q, kv = work.heads // groups, work.kv_heads // groups
    for i in range(groups):
        yield slice(i * q, (i + 1) * q), slice(i * kv, (i + 1) * kv)
