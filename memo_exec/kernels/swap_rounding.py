"""Rows rounded to FP8 for the host, and back (``memo_sim/program/layout/swap_format.py``), in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memo_exec.kernels.call import Call
from memo_exec.kernels.fp8_scales import LEAST_LARGEST
from memo_sim.program.layout.swap_format import SCALE_BYTES, rows_at_once

E4M3 = torch.float8_e4m3fn


def round_rows(call: Call) -> None:
    """``out = x`` in FP8, each row with its scale behind it."""
    x = call.matrix("x")
    for rows, wide, values, scales in _blocks(call, call["out"], x.shape[1]):
        torch.linalg.vector_norm(x[rows], torch.inf, dim=1, keepdim=True, dtype=torch.float32, out=scales)
        scales.clamp_(min=LEAST_LARGEST).div_(torch.finfo(E4M3).max)
        torch.div(x[rows], scales, out=wide)
        values.copy_(wide)


def widen_rows(call: Call) -> None:
    """``out = x``, whose rows are in FP8 with their scales behind them."""
    out = call.matrix("out")
    for rows, wide, values, scales in _blocks(call, call["x"], out.shape[1]):
        out[rows].copy_(wide.copy_(values).mul_(scales))


def _blocks(call: Call, packed: Tensor, features: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield (rows, fp32 scratch, values in FP8, scales (rows, 1)) for the rows that are rounded at once."""
    size = rows_at_once(len(packed), features)
    scratch = call.scratch().take(size, features)
    for first in range(0, len(packed), size):
        rows = slice(first, min(len(packed), first + size))
        block = packed[rows]
        yield rows, scratch[: len(block)], block[:, :features].view(E4M3), block[:, -SCALE_BYTES:].view(torch.float32)
