"""Looking tokens (and learned positions) up, and adding gradient rows to their tables."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memo_exec.kernels.call import Call
from memo_sim.program.kernel_table import NORM_ROWS


def embed(call: Call) -> None:
    """``out = weight[ids] (+ positions)``."""
    out, positions = call.matrix("out"), call.get("positions")
    torch.index_select(call["weight"].view(-1, out.shape[1]), 0, call["ids"], out=out)
    if positions is not None:
        table = positions.view(-1, out.shape[1])
        for rows, place in _sequences(call, 0, len(out)):
            out[rows].add_(table[place])


def embed_backward(call: Call) -> None:
    """``grad_weight[ids] += grad``, and the same by position."""
    grad, ids = call.matrix("grad"), call["ids"]
    table = call["grad_weight"].view(-1, grad.shape[1])
    positions = call.get("grad_positions")
    count = min(len(grad), NORM_ROWS)
    wide = call.scratch().take(count, grad.shape[1]) if grad.dtype != table.dtype else None
    for first in range(0, len(grad), count):
        n = min(count, len(grad) - first)
        source = grad[first : first + n]
        if wide is not None:
            source = wide[:n].copy_(source)
        table.index_add_(0, ids[first : first + n], source)
        if positions is not None:
            for rows, place in _sequences(call, first, n):
                positions.view(-1, grad.shape[1])[place].add_(source[rows])


def _sequences(call: Call, first: int, count: int) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, positions) of each run of ``count`` tokens from ``first`` on that lies in one sequence."""
    for rows, place in call.context.positions(call.first("ids") + first, count):
        yield rows, slice(place, place + rows.stop - rows.start)
