"""Rotary position embedding of Q and K, in place in the packed Q, K, V.

It rotates the pairs (i, i + head_dim / 2), as Hugging Face does:

    first' = first * cos - second * sin        second' = second * cos + first * sin

A row's position follows from the operand's first row, the call's subsequence and the rank's token order. Cosines and
sines are computed in fp32 for one row block at a time, then rounded to the dtype. A table for 1M tokens would take
512 MiB.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.kernels.call import Call
from memo_sim.program.ir.work import Rotary
from memo_sim.program.operators.workspaces import NORM_ROWS


def rotary(call: Call) -> None:
    """Rotate Q and K by their positions."""
    _rotate(call, "qkv", 1.0)


def rotary_backward(call: Call) -> None:
    """Rotate the gradients of Q and K by the negative angles."""
    _rotate(call, "grad", -1.0)


def frequencies(call: Call) -> tuple[Tensor, float]:
    """Return the layer's frequencies, fp32 (rotary features / 2,), and the factor of cosines and sines."""
    work, context = call.instruction.work, call.context
    if isinstance(work, Rotary) and work.theta:
        return context.own_frequencies[work.theta], 1.0
    scaling = context.model.rope_scaling
    return context.inverse_frequencies, 1.0 if scaling is None else scaling.attention_factor


class Tables:
    """Cosine and sine tables in the workspace, for one row block at a time."""

    def __init__(self, call: Call, packed: Tensor, first: int) -> None:
        self._call, self._first = call, first
        self._frequencies, self._factor = frequencies(call)
        half, self.scratch = call.context.model.rotary_dim // 2, call.scratch()
        rows = min(len(packed), NORM_ROWS)
        self._positions = self.scratch.take(rows)
        self._wide = self.scratch.take(rows, half), self.scratch.take(rows, half)
        narrow = packed.dtype != torch.float32
        self._narrow = [self.scratch.take(rows, half, dtype=packed.dtype) for _ in range(2)] if narrow else None

    def of(self, first: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines from row ``first`` on, (rows, rotary features / 2), in the packed tensor's dtype."""
        positions, (cosines, sines) = self._positions, self._wide
        for run, place in self._call.positions(self._first + first, rows):
            torch.arange(place, place + run.stop - run.start, out=positions[run])
        torch.outer(positions[:rows], self._frequencies, out=sines[:rows])
        torch.cos(sines[:rows], out=cosines[:rows])
        sines[:rows].sin_()
        if self._factor != 1:
            cosines[:rows].mul_(self._factor)
            sines[:rows].mul_(self._factor)
        if self._narrow is None:
            return cosines[:rows], sines[:rows]
        return self._narrow[0][:rows].copy_(cosines[:rows]), self._narrow[1][:rows].copy_(sines[:rows])


def _rotate(call: Call, role: str, sign: float) -> None:
    packed, model = call[role], call.context.model
    half, heads = model.head_dim // 2, call.context.heads + call.context.kv_heads
    tables = Tables(call, packed, call.row(role))
    kept = tables.scratch.take(min(len(packed), NORM_ROWS), heads, half, dtype=packed.dtype)
    for first in range(0, len(packed), NORM_ROWS):
        n = min(len(packed), first + NORM_ROWS) - first
        cos, sin = (table.unsqueeze(1) for table in tables.of(first, n))
        pairs = packed[first : first + n, : heads * 2 * half].view(n, heads, 2, half)
        one, two, old = pairs[:, :, 0], pairs[:, :, 1], kept[:n]
        old.copy_(one)
        one.mul_(cos).addcmul_(two, sin, value=-sign)
        two.mul_(cos).addcmul_(old, sin, value=sign)
