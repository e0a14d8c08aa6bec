"""Rotary positions on Q and K, in place in the packed Q, K, V: pairs are (i, i + half a head), as in Hugging Face.

    first' = first * cos - second * sin        second' = second * cos + first * sin

Rows know their position from the operand's first token modulo the sequence length; cosines and sines are made for one
row block at a time (a table for 1M tokens would take 512 MiB) in fp32, then rounded to the dtype.
"""

from __future__ import annotations

import torch

from memo_exec.kernels.call import Call
from memo_sim.program.kernel_table import NORM_ROWS


def rotary(call: Call) -> None:
    """Rotate Q and K by their positions."""
    _rotate(call, "qkv", 1.0)


def rotary_backward(call: Call) -> None:
    """Rotate the gradients of Q and K back."""
    _rotate(call, "grad", -1.0)


def _rotate(call: Call, role: str, sign: float) -> None:
    packed, decisions, model = call[role], call.context.decisions, call.context.model
    rows, half, tp = len(packed), model.head_dim // 2, decisions.layout.tp
    heads = (model.heads + model.kv_heads) // tp
    scratch, count = call.scratch(), min(rows, NORM_ROWS)
    positions = scratch.take(count)
    cosines, sines = scratch.take(count, half), scratch.take(count, half)
    narrow = packed.dtype != torch.float32
    if narrow:
        narrow_tables = [scratch.take(count, half, dtype=packed.dtype) for _ in range(2)]
    kept = scratch.take(count, heads, half, dtype=packed.dtype)
    for first in range(0, rows, NORM_ROWS):
        n = min(rows, first + NORM_ROWS) - first
        start = (call.first(role) + first) % decisions.seq_tokens
        torch.arange(start, start + n, out=positions[:n])
        positions[:n].remainder_(decisions.seq_tokens)
        torch.outer(positions[:n], call.context.inverse_frequencies, out=sines[:n])
        torch.cos(sines[:n], out=cosines[:n])
        sines[:n].sin_()
        tables = cosines[:n], sines[:n]
        if narrow:
            tables = narrow_tables[0][:n].copy_(cosines[:n]), narrow_tables[1][:n].copy_(sines[:n])
        cos, sin = (table.unsqueeze(1) for table in tables)
        pairs = packed[first : first + n, : heads * 2 * half].view(n, heads, 2, half)
        one, two, old = pairs[:, :, 0], pairs[:, :, 1], kept[:n]
        old.copy_(one)
        one.mul_(cos).addcmul_(two, sin, value=-sign)
        two.mul_(cos).addcmul_(old, sin, value=sign)
