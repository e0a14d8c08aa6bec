"""Conversions between packed Q, K, V and the layouts that attention and communication use, and back for gradients.

subsequences      queries and KV cache are separate; a row of the cache has K, then V
keys and values   transfer order: the early chunks of all sequences, then the late chunks
                  (``memo_sim/program/attention/ring.py``)
heads             grouped by rank: the rank's heads of Q, of K, of V, one row block at a time
                  (``memo_sim/program/attention/ulysses.py``)
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
    """Copy keys and values out of the packed Q, K, V into transfer order."""
    out = call["out"]
    _transferred(out, call).copy_(_packed(call["qkv"], out.shape[1], call))


def accumulate(call: Call) -> None:
    """``out += x``, where x has all features of ``out``, or those of Q, or those of K and V in transfer order.

    If x has all features, ``out`` may have a wider dtype.
    """
    x, out = call.matrix("x"), call.matrix("out")
    width, name = x.shape[1], call.instruction.name.rpartition("/")[2]
    if width == out.shape[1]:
        _add(x, out, call)
    elif name.startswith("d_kv"):
        _packed(out, width, call).add_(_transferred(x, call))
    else:
        batch = call.context.decisions.micro_batch
        queries = torch.unflatten(x, 0, (batch, -1))
        torch.unflatten(out[:, :width], 0, (batch, -1))[:, -queries.shape[1] :].add_(queries)


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
    """Group features by the rank that owns their heads; ``unpack`` instructions do the reverse."""
    source, target = call.matrix("source"), call.matrix("target")
    packs, start = ".unpack" not in call.instruction.name, call.first("source")
    for first, rows in clipped_runs(call.row_blocks, start, len(source)):
        block = slice(first - start, first - start + rows)
        plain, grouped = (source, target) if packs else (target, source)
        for features, ranks in _by_rank(plain[block], grouped[block], call):
            (ranks if packs else features).copy_(features if packs else ranks)


def _transferred(rows: Tensor, call: Call) -> Tensor:
    """View keys and values in transfer order as (half, sequence, row, features)."""
    return torch.unflatten(rows, 0, (2, call.context.decisions.micro_batch, -1))


def _packed(qkv: Tensor, width: int, call: Call) -> Tensor:
    """View the last ``width`` features of packed rows as (half, sequence, row, features)."""
    return torch.unflatten(qkv[:, -width:], 0, (call.context.decisions.micro_batch, 2, -1)).transpose(0, 1)


def _by_rank(plain: Tensor, grouped: Tensor, call: Call) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (plain, grouped) views of Q, K and V, or of Q alone, each as (rank, row, features of the rank)."""
    model, layout = call.context.model, call.context.decisions.layout
    q, kv = model.q_width // layout.tp, model.kv_width // layout.tp
    width, degree = plain.shape[1], layout.ulysses
    ranks = grouped.view(degree, len(plain), width // degree)
    first = 0
    for part in (q,) if width == q else (q, kv, kv):
        features = torch.unflatten(plain[:, first : first + part], 1, (degree, -1)).transpose(0, 1)
        yield features, ranks[:, :, first // degree : (first + part) // degree]
        first += part
