"""Attention sinks: one more learned logit a head in the softmax over keys, without a value.

    lse' = log(exp(lse) + exp(sink))        out' = out * exp(lse - lse') = out * sigmoid(lse - sink)
    grad_sink = -sum over rows of exp(sink - lse') * (grad . out')

Attention's own kernels see keys alone. Their backward gets ``out'`` and ``lse'``, with which its formulas hold. Sums
are in fp32, in row blocks. Under Ulysses a rank has some of the heads, and so the gradients of some of the sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.kernels.call import Call, Scratch
from memo_sim.program.operators.workspaces import NORM_ROWS


def sink(call: Call) -> None:
    """Write the sinks into ``out`` and ``lse``, in place."""
    out, lse = call.matrix("out"), call.matrix("lse")
    rows, heads = lse.shape
    scratch, count = call.scratch(), min(rows, NORM_ROWS)
    factors = scratch.take(count, heads)
    own = _own(call, "sinks", heads, scratch)
    wide = scratch.take(count, heads, out.shape[1] // heads) if out.dtype != torch.float32 else None
    for first in range(0, rows, count):
        block = slice(first, min(rows, first + count))
        whole, at = lse[block], out[block].view(-1, heads, out.shape[1] // heads)
        factor = torch.sub(whole, own, out=factors[: len(whole)]).sigmoid_()
        torch.logaddexp(whole, own, out=whole)
        into = at if wide is None else wide[: len(at)].copy_(at)
        into.mul_(factor.unsqueeze(-1))
        if wide is not None:
            at.copy_(into)


def sink_backward(call: Call) -> None:
    """Add the gradients of this rank's sinks to ``grad_sinks``."""
    grad, out, lse = call.matrix("grad"), call.matrix("out"), call.matrix("lse")
    rows, heads = lse.shape
    scratch, count, size = call.scratch(), min(rows, NORM_ROWS), out.shape[1] // heads
    products, dots, shares = scratch.take(count, heads, size), scratch.take(count, heads), scratch.take(count, heads)
    own, total = _own(call, "sinks", heads, scratch), scratch.take(heads)
    wide = scratch.take(count, heads, size) if out.dtype != torch.float32 else None
    for first in range(0, rows, count):
        block = slice(first, min(rows, first + count))
        n = len(lse[block])
        incoming, given = grad[block].view(n, heads, size), out[block].view(n, heads, size)
        if wide is None:
            product = torch.mul(incoming, given, out=products[:n])
        else:
            product = products[:n].copy_(incoming).mul_(wide[:n].copy_(given))
        dot = torch.sum(product, -1, out=dots[:n])
        share = torch.sub(own, lse[block], out=shares[:n]).exp_()
        torch.sum(dot.mul_(share), 0, out=total)
        call["grad_sinks"][_first(call) : _first(call) + heads].sub_(total)


def _first(call: Call) -> int:
    """Return the first of this rank's heads among those of its tensor-parallel rank."""
    return call.context.shares[call.context.mesh.at("ulysses")].first


def _own(call: Call, role: str, heads: int, scratch: Scratch) -> Tensor:
    """Return the sinks of this rank's heads in fp32."""
    return scratch.take(heads).copy_(call[role][_first(call) : _first(call) + heads])
