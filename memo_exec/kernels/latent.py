"""Latent attention: norms of the latents, the product that makes the queries, and the assembly of Q, K and V.

Packed rows have Q of all heads, K of all heads and V of all heads; a head of Q or K has its features without positions,
then the rotary ones. The product of keys and values has, head by head, the key's features without positions and the
value. The rotary key is one for all heads. Rotary pairs are neighbours, as in DeepSeek's weights, or halves. Rotated
features stay where they were: transformers sorts them into halves, which changes neither scores nor gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memo_exec.kernels import fp8
from memo_exec.kernels.call import Call
from memo_exec.kernels.linear import add_weight_gradient
from memo_exec.kernels.norm import reciprocal_deviation
from memo_exec.kernels.rotary import Tables
from memo_sim.contract.latent_attention import LATENT_NORM_EPS, LatentAttention
from memo_sim.program.ir.work import Gemm
from memo_sim.program.operators.workspaces import NORM_ROWS


def _latent(call: Call) -> LatentAttention:
    found = call.context.model.latent
    assert found is not None
    return found


def _blocks(rows: int) -> Iterator[slice]:
    for first in range(0, rows, NORM_ROWS):
        yield slice(first, min(rows, first + NORM_ROWS))


def _parts(call: Call) -> list[tuple[str, slice, int]]:
    """Return each latent that the model has: its role, its features, the column of its scale in the statistics."""
    latent = _latent(call)
    rank, whole = latent.q_rank, latent.q_rank + latent.kv_rank
    queries = [("q", slice(0, rank), 0)] if rank else []
    return [*queries, ("kv", slice(rank, whole), len(queries))]


def norm(call: Call) -> None:
    """``q, kv = RMSNorm of their part of x``; ``rope``: the rest of ``x``. ``stats``: 1 / deviation of each latent."""
    x, rope = call.matrix("x"), call.matrix("rope")
    stats, scratch = call["stats"].view(len(x), -1), call.scratch()
    width = x.shape[1] - rope.shape[1]
    wide = scratch.take(min(len(x), NORM_ROWS), width) if x.dtype != torch.float32 else None
    rope.copy_(x[:, width:])
    for rows in _blocks(len(x)):
        for role, features, column in _parts(call):
            out, rstd, source = call.matrix(role)[rows], stats[rows, column : column + 1], x[rows, features]
            if wide is not None:
                source = wide[: len(source), features].copy_(source)
            reciprocal_deviation(source, LATENT_NORM_EPS, rstd)
            if wide is None:
                torch.mul(source, rstd, out=out)
            else:
                out.copy_(source.mul_(rstd))
            out.mul_(call[f"{role}_weight"])


def norm_backward(call: Call) -> None:
    """Write the gradient of ``x`` into ``out``, and add those of the weights (``norm.py`` has the formula)."""
    x, out, rope = call.matrix("x"), call.matrix("out"), call.matrix("rope")
    stats, scratch = call["stats"].view(len(x), -1), call.scratch()
    width, count = x.shape[1] - rope.shape[1], min(len(x), NORM_ROWS)
    hats, works, means = scratch.take(count, width), scratch.take(count, width), scratch.take(count, 1)
    total, wide_weight = scratch.take(width), scratch.take(width)
    out[:, width:].copy_(rope)
    for rows in _blocks(len(x)):
        n = rows.stop - rows.start
        for role, features, column in _parts(call):
            rstd, hat, work = stats[rows, column : column + 1], hats[:n, features], works[:n, features]
            weight, summed, mean = wide_weight[features], total[features], means[:n]
            grad = call.matrix(role)[rows]
            hat.copy_(x[rows, features]).mul_(rstd)
            weight.copy_(call[f"{role}_weight"])
            work.copy_(grad).mul_(hat)
            torch.sum(work, 0, out=summed)
            call[f"grad_{role}_weight"].add_(summed)
            torch.mean(work.mul_(weight), 1, keepdim=True, out=mean)
            work.copy_(grad).mul_(weight).addcmul_(hat, mean, value=-1).mul_(rstd)
            out[rows, features].copy_(work)


def _queries(call: Call, role: str, inputs: int, weight: str) -> Tensor:
    """Return the features of the queries in packed rows; the weight has them times ``inputs`` elements."""
    return call.matrix(role)[:, : call[weight].numel() // inputs]


def queries(call: Call) -> None:
    """``out = x @ weight.T`` in the queries' features of packed rows; the others are left as they are."""
    x = call.matrix("x")
    out = _queries(call, "out", x.shape[1], "weight")
    torch.mm(x, call["weight"].view(out.shape[1], x.shape[1]).t(), out=out)
    _clear_others(call, out.shape[1])


def queries_in_fp8(call: Call) -> None:
    """``queries`` of operands in FP8. Its gradients read a copy of the queries' features alone (``fp8.py``)."""
    work = call.instruction.work
    assert isinstance(work, Gemm)
    fp8.linear(call)
    _clear_others(call, work.n)


def _clear_others(call: Call, features: int) -> None:
    """Zero the features behind the queries' in debug mode, which has poisoned the rows: the assembly changes them in
    place, and a read of NaN is a fault."""
    if call.context.debug:
        call.matrix("out")[:, features:].zero_()


def queries_dgrad(call: Call) -> None:
    """``out = grad @ weight``, of the queries' features of packed rows."""
    out = call.matrix("out")
    grad = _queries(call, "grad", out.shape[1], "weight")
    torch.mm(grad, call["weight"].view(grad.shape[1], out.shape[1]), out=out)


def queries_wgrad(call: Call) -> None:
    """``out += grad.T @ x``, of the queries' features of packed rows."""
    x = call.matrix("x")
    add_weight_gradient(call, _queries(call, "grad", x.shape[1], "out"), x)


class _Assembly:
    """Views of packed rows and of the product of keys and values, and rotations of their rotary features."""

    def __init__(self, call: Call, role: str) -> None:
        self.call, self.latent = call, _latent(call)
        latent, packed, kv = self.latent, call[role], call["kv"]
        width = latent.nope_dim + latent.value_dim
        heads = kv.shape[1] // width
        keys, count = heads * latent.head_dim, len(packed)
        self.q = packed[:, :keys].view(count, heads, -1)
        self.k = packed[:, keys : 2 * keys].view(count, heads, -1)
        self.v = packed[:, 2 * keys :].view(count, heads, -1)
        self.kv = kv.view(count, heads, width)
        self.tables = Tables(call, packed, call.row(role))
        block, half = min(count, NORM_ROWS), latent.rope_dim // 2
        self._old = self.tables.scratch.take(block, heads + 1, half, dtype=packed.dtype)
        self.shared = self.tables.scratch.take(block, latent.rope_dim, dtype=packed.dtype)
        """Room for the rotary key of one block of rows."""

    def rotate(self, rows: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
        """Rotate ``rows``, (rows, heads, rotary features), in place; tables are (rows, half of the features)."""
        if self.latent.interleaved:
            one, two = rows[..., 0::2], rows[..., 1::2]
        else:
            one, two = rows.chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        old = self._old[: len(rows), : rows.shape[1]]
        old.copy_(one)
        one.mul_(cos).addcmul_(two, sin, value=-sign)
        two.mul_(cos).addcmul_(old, sin, value=sign)


def assemble(call: Call) -> None:
    """Rotate Q and the shared key, and write K and V beside Q: ``qkv`` has the queries already."""
    parts = _Assembly(call, "qkv")
    nope, rope = parts.latent.nope_dim, call.matrix("rope")
    parts.k[..., :nope].copy_(parts.kv[..., :nope])
    parts.v.copy_(parts.kv[..., nope:])
    for rows in _blocks(len(rope)):
        cos, sin = parts.tables.of(rows.start, rows.stop - rows.start)
        parts.rotate(parts.q[rows, :, nope:], cos, sin, 1.0)
        shared = parts.shared[: rows.stop - rows.start].copy_(rope[rows]).unsqueeze(1)
        parts.rotate(shared, cos, sin, 1.0)
        keys = parts.k[rows, :, nope:]
        keys.copy_(shared.expand_as(keys))


def assemble_backward(call: Call) -> None:
    """Split the gradient of packed rows: ``kv`` and ``rope`` get those of keys and values, the queries' stay in place.

    The shared key's gradient is the sum over this rank's heads.
    """
    parts = _Assembly(call, "grad")
    nope, rope = parts.latent.nope_dim, call.matrix("rope")
    parts.kv[..., :nope].copy_(parts.k[..., :nope])
    parts.kv[..., nope:].copy_(parts.v)
    torch.sum(parts.k[..., nope:], 1, out=rope)
    for rows in _blocks(len(rope)):
        cos, sin = parts.tables.of(rows.start, rows.stop - rows.start)
        parts.rotate(parts.q[rows, :, nope:], cos, sin, -1.0)
        parts.rotate(rope[rows].unsqueeze(1), cos, sin, -1.0)
