"""RMSNorm over each head of Q and K, in place in the packed Q, K, V (Qwen3).

Forward keeps the unnormalised rows in ``raw``, because backward needs them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.kernels.call import Call
from memo_exec.kernels.norm import reciprocal_deviation
from memo_sim.program.operators.workspaces import NORM_ROWS


def qk_norm(call: Call) -> None:
    """``raw = q, k``; ``q = q * rstd * q_weight``, ``k`` likewise."""
    raw = call.matrix("raw")
    rows, width = raw.shape
    size = call.context.model.head_dim
    packed, scratch, count = call["qkv"][:, :width], call.scratch(), min(rows, NORM_ROWS)
    rstds = scratch.take(count, width // size, 1)
    narrow = raw.dtype != torch.float32
    wide = scratch.take(count, width // size, size) if narrow else None
    for first in range(0, rows, NORM_ROWS):
        block = slice(first, min(rows, first + NORM_ROWS))
        raw[block].copy_(packed[block])
        heads = packed[block].view(-1, width // size, size)
        rstd = rstds[: len(heads)]
        source = heads if wide is None else wide[: len(heads)].copy_(heads)
        reciprocal_deviation(source, call.context.model.norm_eps, rstd)
        source.mul_(rstd)
        if wide is not None:
            heads.copy_(source)
        for part, weight, _ in _parts(call, heads):
            part.mul_(weight)


def qk_norm_backward(call: Call) -> None:
    """Replace the gradients of the normalised Q and K by those of the raw ones; add the weights' gradients."""
    raw = call.matrix("raw")
    rows, width = raw.shape
    size = call.context.model.head_dim
    grads, scratch, count = call["grad"][:, :width], call.scratch(), min(rows, NORM_ROWS)
    shape = (count, width // size)
    hats, works = scratch.take(*shape, size), scratch.take(*shape, size)
    rstds, means = scratch.take(*shape, 1), scratch.take(*shape, 1)
    total, wide_weight = scratch.take(size), scratch.take(size)
    narrow = raw.dtype != torch.float32
    wide = scratch.take(*shape, size) if narrow else None
    for first in range(0, rows, NORM_ROWS):
        block = slice(first, min(rows, first + NORM_ROWS))
        outer = grads[block].view(-1, width // size, size)
        n = len(outer)
        hat, work, rstd, mean = hats[:n], works[:n], rstds[:n], means[:n]
        hat.copy_(raw[block].view(-1, width // size, size))
        reciprocal_deviation(hat, call.context.model.norm_eps, rstd)
        hat.mul_(rstd)
        grad = outer if wide is None else wide[:n].copy_(outer)
        torch.mul(grad, hat, out=work)
        for part, weight, name in _parts(call, work):
            if (summed := call.get(name)) is not None:
                torch.sum(part, (0, 1), out=total)
                summed.add_(total)
            part.mul_(wide_weight.copy_(weight))
        torch.mean(work, -1, keepdim=True, out=mean)
        for part, weight, _ in _parts(call, grad):
            part.mul_(wide_weight.copy_(weight))
        grad.addcmul_(hat, mean, value=-1).mul_(rstd)
        if wide is not None:
            outer.copy_(grad)


def _parts(call: Call, heads: Tensor) -> list[tuple[Tensor, Tensor, str]]:
    """Return (heads, weight, role of the weight's gradient) for Q and for K."""
    context = call.context
    q_heads = context.heads * heads.shape[1] // (context.heads + context.kv_heads)
    return [
        (heads[:, :q_heads], call["q_weight"], "grad_q_weight"),
        (heads[:, q_heads:], call["k_weight"], "grad_k_weight"),
    ]
