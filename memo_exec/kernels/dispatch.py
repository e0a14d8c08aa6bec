"""Copies tokens' rows to their experts, sorted by expert, and sums the rows that come back (``routing.py``)."""

from __future__ import annotations

import torch

from memo_exec.kernels.call import Call
from memo_exec.kernels.routing import experts_of
from memo_sim.program.operators.workspaces import NORM_ROWS


def dispatch(call: Call) -> None:
    """``out[row] = x[token of the row]``, for the dispatched rows that ``order`` has."""
    order = call["order"]
    tokens = call.scratch().take(len(order), dtype=torch.int64)
    torch.div(order, experts_of(call).per_token, rounding_mode="floor", out=tokens)
    torch.index_select(call.matrix("x"), 0, tokens, out=call.matrix("out"))


def combine(call: Call) -> None:
    """``out[token]``: the sum of the token's dispatched rows, in fp32, in the order of its experts' probabilities.

    Where ranks divide experts, a row beyond the capacity counts as zero (``expert_exchange.py``).
    """
    x, places, out = call.matrix("x"), call.matrix("places"), call.matrix("out")
    scratch, count = call.scratch(), min(len(out), NORM_ROWS)
    numbers = scratch.take(count, dtype=torch.int64)
    picked = scratch.take(count, out.shape[1], dtype=out.dtype)
    narrow = out.dtype != torch.float32
    wide, term = (scratch.take(count, out.shape[1]) if narrow else None for _ in range(2))
    missing = scratch.take(count, dtype=torch.bool) if call.context.decisions.layout.ep > 1 else None
    for first in range(0, len(out), NORM_ROWS):
        block = slice(first, min(len(out), first + NORM_ROWS))
        rows = block.stop - first
        total = out[block] if wide is None else wide[:rows]
        for j in range(places.shape[1]):
            at = numbers[:rows].copy_(places[block, j])
            if missing is not None:
                torch.eq(at, len(x), out=missing[:rows])
                at.clamp_(max=len(x) - 1)
            torch.index_select(x, 0, at, out=picked[:rows])
            if missing is not None:
                picked[:rows].masked_fill_(missing[:rows].unsqueeze(1), 0.0)
            if j:
                total.add_(picked[:rows] if term is None else term[:rows].copy_(picked[:rows]))
            else:
                total.copy_(picked[:rows])
        if wide is not None:
            out[block].copy_(total)
