"""Conversions between packed Q, K, V and the layouts that attention and communication use, and back for gradients.

subsequences      queries and KV cache are separate; a row of the cache has K, then V
keys and values   transfer order: the early chunks of all sequences, then the late chunks
                  (``memo_sim/program/attention/ring.py``)
heads             grouped by rank: the rank's heads of Q, of K, of V, one row block at a time
                  (``memo_sim/program/attention/ulysses.py``). Ranks may have copies of one key/value head, or unequal
                  numbers of heads (``memo_sim/program/layout/heads.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memo_exec.kernels.call import Call
from memo_sim.program.layout.token_order import clipped_runs
from memo_sim.program.operators.workspaces import NORM_ROWS


def qkv_split(call: Call) -> None:
    """Copy packed Q, K, V into ``q`` and, if the call has it, ``kv``."""
    qkv, q, kv = call["qkv"], call["q"], call.get("kv")
    q.copy_(qkv[:, : q.shape[1]])
    if kv is not None:
        kv.copy_(qkv[:, q.shape[1] :])


def qkv_join(call: Call) -> None:
    """Copy ``grad_q`` and ``grad_kv`` into the packed ``grad_qkv``."""
    grad_q, grad_qkv = call["grad_q"], call["grad_qkv"]
    grad_qkv[:, : grad_q.shape[1]].copy_(grad_q)
    grad_qkv[:, grad_q.shape[1] :].copy_(call["grad_kv"])


def kv_pack(call: Call) -> None:
    """Copy keys and values into transfer order, out of the packed Q, K, V or of ``kv``, which has them alone.

    Those of one sequence are in this order already.
    """
    out, alone = call["out"], call.get("kv")
    source = call["qkv"] if alone is None else alone
    if call.context.decisions.micro_batch == 1:
        out.copy_(source[:, -out.shape[1] :])
        return
    _transferred(out, call).copy_(_packed(source, out.shape[1], call))


def kv_pack_sequence(call: Call) -> None:
    """Copy keys and values of rows of one sequence out of the packed Q, K, V, as they are."""
    out = call["out"]
    out.copy_(call["qkv"][:, -out.shape[1] :])


def accumulate(call: Call) -> None:
    """``out += x``, where x has all features of ``out``, or those of Q, or those of K and V in transfer order.

    If x has all features, ``out`` may have a wider dtype. If x has half the rows, they are the late half of every
    sequence.
    """
    x, out = call.matrix("x"), call.matrix("out")
    width, name = x.shape[1], call.instruction.name.rpartition("/")[2]
    if width == out.shape[1]:
        batch = call.context.decisions.micro_batch if len(x) < len(out) else 1
        for part, whole in zip(torch.chunk(x, batch), torch.chunk(out, batch), strict=True):
            _add(part, whole[-len(part) :], call)
    elif name.startswith("d_kv"):
        _packed(out, width, call).add_(_transferred(x, call))
    else:
        batch = call.context.decisions.micro_batch
        queries = torch.unflatten(x, 0, (batch, -1))
        torch.unflatten(out[:, :width], 0, (batch, -1))[:, -queries.shape[1] :].add_(queries)


def accumulate_halves(call: Call) -> None:
    """``out += x``, where x is in transfer order; ``out`` may have a wider dtype."""
    x, out = call["x"], call["out"]
    for ours, theirs in zip(_transferred(x, call), _packed(out, out.shape[1], call), strict=True):
        for part, whole in zip(ours, theirs, strict=True):
            _add(part, whole, call)


def _add(x: Tensor, out: Tensor, call: Call) -> None:
    """``out += x``, in row blocks if dtypes differ on the CPU: torch would convert all of ``x`` at once there."""
    if x.dtype == out.dtype or x.is_cuda:
        out.add_(x)
        return
    rows = min(len(x), NORM_ROWS)
    wide = call.scratch().take(rows, x.shape[1], dtype=out.dtype)
    for ours, theirs in zip(torch.split(x, rows), torch.split(out, rows), strict=True):
        theirs.add_(wide[: len(ours)].copy_(ours))


def heads_transpose(call: Call) -> None:
    """Group features by the rank that owns their heads; ``unpack`` instructions do the reverse.

    A key/value head is copied to every rank that reads it. ``unpack`` adds up the gradients of its copies.
    """
    source, target = call.matrix("source"), call.matrix("target")
    packs, start = ".unpack" not in call.instruction.name, call.first("source")
    for first, rows in clipped_runs(call.row_blocks, start, len(source)):
        block = slice(first - start, first - start + rows)
        plain, grouped = (source, target) if packs else (target, source)
        for features, copies in _by_rank(plain[block], grouped[block], call):
            if packs:
                copies.copy_(features.unsqueeze(0).expand_as(copies))
            elif len(copies) == 1:
                features.copy_(copies[0])
            else:
                torch.sum(copies, 0, out=features)


def _transferred(rows: Tensor, call: Call) -> Tensor:
    """View keys and values in transfer order as (half, sequence, row, features)."""
    return torch.unflatten(rows, 0, (2, call.context.decisions.micro_batch, -1))


def _packed(qkv: Tensor, width: int, call: Call) -> Tensor:
    """View the last ``width`` features of packed rows as (half, sequence, row, features)."""
    return torch.unflatten(qkv[:, -width:], 0, (call.context.decisions.micro_batch, 2, -1)).transpose(0, 1)


def _by_rank(plain: Tensor, grouped: Tensor, call: Call) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of the features of plain rows, and of all their copies in the rows that are grouped by rank.

    Features have any shape, and their copies one dimension more, the first. Rows have Q, K and V, or attention's
    output.
    """
    context = call.context
    size, value, shares = context.model.head_dim, context.model.value_dim, context.shares
    q, kv, out = context.heads * size, context.kv_heads * size, context.heads * value
    packed = ((0, q, size), (q, kv, size), (q + kv, context.kv_heads * value, value))
    parts = ((0, out, value),) if plain.shape[1] == out else packed
    mine = [share.heads + 2 * share.kv_heads * (len(parts) > 1) for share in shares]
    if len(set(mine)) > 1:
        yield from _unequal(plain, grouped, call, [heads * size for heads in mine])
        return
    ranks, taken = grouped.view(len(shares), len(plain), -1), 0
    for first, width, head in parts:
        own = (shares[0].kv_heads if first else shares[0].heads) * head
        features = torch.unflatten(plain[:, first : first + width], 1, (-1, own)).transpose(0, 1)
        copies = torch.unflatten(ranks[:, :, taken : taken + own], 0, (len(features), -1)).transpose(0, 1)
        yield features, copies
        taken += own


def _unequal(plain: Tensor, grouped: Tensor, call: Call, widths: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what ``_by_rank`` yields when ranks have different numbers of features, ``widths``; none has a copy."""
    size, q, kv = call.context.model.head_dim, call.context.heads, call.context.kv_heads
    pieces = torch.split(grouped.reshape(-1), [len(plain) * width for width in widths])
    for share, piece, width in zip(call.context.shares, pieces, widths, strict=True):
        rows, taken = piece.view(len(plain), width), 0
        keys = (share.first_kv, share.kv_heads)
        for first, heads in ((share.first, share.heads), (q + keys[0], keys[1]), (q + kv + keys[0], keys[1])):
            if taken < width:
                yield (
                    plain[:, first * size : (first + heads) * size],
                    rows[:, taken : taken + heads * size].unsqueeze(0),
                )
            taken += heads * size
