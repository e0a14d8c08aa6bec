"""Q, K, V packed, split and exchanged, and gradients that come back added where they belong.

subsequences      queries beside carried keys and values, K before V in each row
keys and values   every sequence's early chunk, then every sequence's late one (``memo_sim/program/ring.py``)
heads             by rank: its heads of Q, of K, of V (``memo_sim/program/ulysses.py``), row block by row block
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memo_exec.kernels.call import Call
from memo_sim.program.layout.token_order import clipped_runs
from memo_sim.program.operators.workspaces import NORM_ROWS


def qkv_split(call: Call) -> None:
    """Copy packed Q, K, V apart: into ``q`` and, where they are wanted, ``kv``."""
    qkv, q, kv = call["qkv"], call["q"], call.get("kv")
    q.copy_(qkv[:, : q.shape[1]])
    if kv is not None:
        kv.copy_(qkv[:, q.shape[1] :])


def qkv_join(call: Call) -> None:
    """Copy the gradients of queries, and of keys and values, into those of the packed Q, K, V."""
    grad_q, grad_qkv = call["grad_q"], call["grad_qkv"]
    grad_qkv[:, : grad_q.shape[1]].copy_(grad_q)
    grad_qkv[:, grad_q.shape[1] :].copy_(call["grad_kv"])


def kv_pack(call: Call) -> None:
    """Copy keys and values out of the packed Q, K, V into the order in which they travel."""
    out = call["out"]
    _exchanged_side(out, call).copy_(_sequence_side(call["qkv"], out.shape[1], call))


def accumulate(call: Call) -> None:
    """``out += x``; x has all features, or those of Q, or those of K and V in the order in which they travelled.

    Sums of all features may be of a wider dtype.
    """
    x, out = call.matrix("x"), call.matrix("out")
    width, name = x.shape[1], call.instruction.name.rpartition("/")[2]
    if width == out.shape[1]:
        _add(x, out, call)
    elif name.startswith("d_kv"):
        _sequence_side(out, width, call).add_(_exchanged_side(x, call))
    else:
        batch = call.context.decisions.micro_batch
        queries = torch.unflatten(x, 0, (batch, -1))
        torch.unflatten(out[:, :width], 0, (batch, -1))[:, -queries.shape[1] :].add_(queries)


def _add(x: Tensor, out: Tensor, call: Call) -> None:
    """``out += x``; the CPU's sum of two dtypes would widen all of ``x`` at once."""
    if x.dtype == out.dtype or x.is_cuda:
        out.add_(x)
        return
    rows = min(len(x), NORM_ROWS)
    wide = call.scratch().take(rows, x.shape[1], dtype=out.dtype)
    for ours, theirs in zip(torch.split(x, rows), torch.split(out, rows), strict=True):
        theirs.add_(wide[: len(ours)].copy_(ours))


def heads_transpose(call: Call) -> None:
    """Group features by the rank that has their heads, or (``unpack``) put those of each rank back."""
    source, target = call.matrix("source"), call.matrix("target")
    packs, start = ".unpack" not in call.instruction.name, call.first("source")
    for first, rows in clipped_runs(call.row_blocks, start, len(source)):
        block = slice(first - start, first - start + rows)
        plain, grouped = (source, target) if packs else (target, source)
        for features, ranks in _by_rank(plain[block], grouped[block], call):
            (ranks if packs else features).copy_(features if packs else ranks)


def _exchanged_side(rows: Tensor, call: Call) -> Tensor:
    """Return keys and values in the order in which they travel as (half, sequence, row, features)."""
    return torch.unflatten(rows, 0, (2, call.context.decisions.micro_batch, -1))


def _sequence_side(qkv: Tensor, width: int, call: Call) -> Tensor:
    """Return the last ``width`` features of a rank's rows in the same order."""
    return torch.unflatten(qkv[:, -width:], 0, (call.context.decisions.micro_batch, 2, -1)).transpose(0, 1)


def _by_rank(plain: Tensor, grouped: Tensor, call: Call) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield of Q, K and V (or of Q alone) both forms as (rank, row, features of the rank)."""
    model, layout = call.context.model, call.context.decisions.layout
    q, kv = model.q_width // layout.tp, model.kv_width // layout.tp
    width, degree = plain.shape[1], layout.ulysses
    ranks = grouped.view(degree, len(plain), width // degree)
    first = 0
    for part in (q,) if width == q else (q, kv, kv):
        features = torch.unflatten(plain[:, first : first + part], 1, (degree, -1)).transpose(0, 1)
        yield features, ranks[:, :, first // degree : (first + part) // degree]
        first += part
