"""Attention over Q, K, V: splits operands by sequence and head group, and calls the plan's attention backend.

A call has one of three sets of operands:

    qkv        packed rows: each row holds the query, the key and the value of one token
    qkv, kv    queries from the packed rows, keys and values from ``kv`` (received in a ring, or all-gathered)
    q, kv      queries from ``q``, keys and values from the KV cache: of this subsequence or of earlier ones

A backend is a module with the functions ``forward`` and ``backward``. They take (batch, tokens, heads, head_dim) views
and an fp32 log-sum-exp of (batch, tokens, heads). A ``Mask`` says which keys a query sees, ``scale`` is the factor on
the scores. Packed documents are calls of their own, on views of their rows (``documents.py``).
A backend may have ``forward_packed`` and ``backward_packed`` besides, which take all documents of a rank's own rows in
one call (varlen). Values narrower than queries and keys are padded with zeros for backends that need equal widths
(``contract/attention_kernels.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from memo_exec.kernels.attention_backend import CAUSAL, AttentionBackward, Mask, Packing
from memo_exec.kernels.call import Call
from memo_exec.kernels.documents import EVERYTHING, Joined, Segment, segments
from memo_sim.program.ir.work import Attention, WindowedAttention
from memo_sim.program.layout.token_order import cuts_documents

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
    out, lse = call["out"].view(*q.shape[:3], work.value_dim), call.matrix("lse").view(q.shape[:3])
    packing, scale = _packing(call, work, backend), call.context.model.score_scale
    if _leaves_rows(call, work):
        out.zero_()  # a merge leaves the rows of queries without keys as they were
        lse.fill_(-torch.inf)
    for queries, keys in _groups(call, work):
        own_q, own_k, own_v = q[:, :, queries], k[:, :, keys], _padded(v[:, :, keys], work)
        into, sums = out[:, :, queries], lse[:, :, queries]
        written = _padded(into, work)
        if packing is not None:
            backend.forward_packed(own_q, own_k, own_v, written, sums, packing=packing, scale=scale)
        else:
            for document in _documents(call, work):
                rows, seen = Joined(document.queries, document.at), Joined(document.keys, document.at)
                with rows.written(written, sums) as results:
                    operands = rows.of(own_q), seen.of(own_k), seen.of(own_v)
                    backend.forward(*operands, *results, mask=_mask(work), scale=scale)
        if work.padded:
            into.copy_(written[..., : work.value_dim])


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
    heads = (work.heads, work.value_dim)
    grad, out = (_queries(torch.unflatten(call[role], 1, heads), work) for role in ("grad", "out"))
    lse = _queries(call.matrix("lse"), work)
    packing, scale = _packing(call, work, backend), call.context.model.score_scale
    if _leaves_rows(call, work):
        for gradient in (grad_q, grad_k, grad_v):
            gradient.zero_()
    for queries, keys in _groups(call, work):
        mine = _Padded(work, grad[:, :, queries], v[:, :, keys], out[:, :, queries], grad_v[:, :, keys])
        own_q, own_k, sums = q[:, :, queries], k[:, :, keys], lse[:, :, queries]
        into_q, into_k = grad_q[:, :, queries], grad_k[:, :, keys]
        if packing is not None:
            backend.backward_packed(
                AttentionBackward(
                    mine.grad,
                    (own_q, own_k, mine.values),
                    mine.out,
                    sums,
                    (into_q, into_k, mine.grad_values),
                    mask=CAUSAL,
                    scale=scale,
                    deterministic=call.context.decisions.deterministic,
                ),
                packing,
            )
        else:
            for document in _documents(call, work):
                rows, seen = Joined(document.queries, document.at), Joined(document.keys, document.at)
                with rows.written(into_q) as (of_q,), seen.written(into_k, mine.grad_values) as (of_k, of_v):
                    backend.backward(
                        AttentionBackward(
                            rows.of(mine.grad),
                            (rows.of(own_q), seen.of(own_k), seen.of(mine.values)),
                            rows.of(mine.out),
                            rows.of(sums),
                            (of_q, of_k, of_v),
                            mask=_mask(work),
                            scale=scale,
                            deterministic=call.context.decisions.deterministic,
                        )
                    )
        mine.finish()


class _Padded:
    """Operands of a backward that are as wide as values; a kernel that takes no narrow ones gets padded copies."""

    def __init__(self, work: Attention, grad: Tensor, values: Tensor, out: Tensor, grad_values: Tensor) -> None:
        self._work, self._into = work, grad_values
        self.grad, self.values, self.out = (_padded(rows, work) for rows in (grad, values, out))
        self.grad_values = _padded(grad_values, work)

    def finish(self) -> None:
        """Copy the gradients of the values out of the padded ones."""
        if self._work.padded:
            self._into.copy_(self.grad_values[..., : self._work.value_dim])


def _padded(rows: Tensor, work: Attention) -> Tensor:
    """Return values, or rows as wide as them, with zeros up to ``head_dim`` where the kernel takes no narrower ones."""
    return functional.pad(rows, (0, work.head_dim - work.value_dim)) if work.padded else rows


def _documents(call: Call, work: Attention) -> Iterator[Segment]:
    """Yield each document of a call, or all sequences where a sequence is one document."""
    if call.context.decisions.documents is None:
        yield EVERYTHING
        return
    yield from segments(call, work)


def _packing(call: Call, work: Attention, backend: ModuleType) -> Packing | None:
    """Return the documents of a rank's own rows, for backends that take them in one call.

    None for other calls, and for windows, which play document by document.
    """
    decisions = call.context.decisions
    own = work.mask == "causal" and not isinstance(work, WindowedAttention) and not cuts_documents(decisions)
    if decisions.documents is None or not own or not hasattr(backend, "forward_packed"):
        return None
    lengths = [rows.stop - rows.start for part in segments(call, work) for rows in part.queries]
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
    if work.narrow_values:
        keys = (work.heads + work.kv_heads) * work.head_dim
        q, k = torch.split(_by_head(qkv[:, :keys], work), [work.heads, work.kv_heads], dim=2)
        return q, k, _queries(torch.unflatten(qkv[:, keys:], 1, (-1, work.value_dim)), work)
    q, k, v = torch.split(_by_head(qkv, work), [work.heads, work.kv_heads, work.kv_heads], dim=2)
    return q, k, v


def _by_head(rows: Tensor, work: Attention) -> Tensor:
    return _queries(torch.unflatten(rows, 1, (-1, work.head_dim)), work)


def _keys(kv: Tensor, work: Attention) -> tuple[Tensor, Tensor]:
    if work.narrow_values:
        rows, keys = torch.unflatten(kv, 0, (work.batch, work.k_tokens)), work.kv_heads * work.head_dim
        k, v = rows[..., :keys], rows[..., keys:]
        return torch.unflatten(k, 2, (-1, work.head_dim)), torch.unflatten(v, 2, (-1, work.value_dim))
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
