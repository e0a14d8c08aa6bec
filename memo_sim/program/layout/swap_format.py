"""The rows of a swapped tensor on the host: as they are, or rounded to FP8 with a scale of their own.

    same    the row
    fp8     its values in E4M3, zeros up to a multiple of 4 bytes, one scale in fp32: F + 4 bytes for F values

    scale = largest |x| of the row / 448,  value = round(x / scale),  x ~ value * scale

E4M3 has 3 bits of mantissa (Micikevicius et al., 2022), so a value is off by 1/16 of itself at most, or, where it is
small, by 2^-10 scales: one part in 458,752 of the row's largest value. Tensors in the plan's dtype are rounded;
statistics, routing decisions and tensors that are in FP8 already are swapped as they are.
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.layout.skeletal import Skeletal

PACKED = "uint8"
"""Dtype of a buffer of rounded rows, each with its scale."""
SCALE_BYTES = 4
STAGING_BYTES = 256 * 2**20
"""Of rounded rows on the device, on each copy lane, or one row where that is longer."""
SCRATCH_BYTES = 32 * 2**20
"""Of rows in fp32 that are being rounded, or one row where that is longer."""


def is_rounded(decisions: Decisions, tensor: Skeletal) -> bool:
    """Return whether a tensor is swapped in FP8."""
    return decisions.swap_dtype == "fp8" and tensor.dtype == decisions.dtype and not tensor.statistics


def packed_features(features: int) -> int:
    """Return the bytes of a rounded row of ``features`` values, with its scale behind them."""
    return -(-features // SCALE_BYTES) * SCALE_BYTES + SCALE_BYTES


def row_bytes(decisions: Decisions, tensor: Skeletal) -> int:
    """Return the bytes of a row of a tensor on the host."""
    if is_rounded(decisions, tensor):
        return packed_features(tensor.features)
    return tensor.features * DTYPE_BYTES[tensor.dtype]


def swapped_bytes(decisions: Decisions, tensor: Skeletal) -> int:
    """Return the bytes of a whole tensor on the host."""
    return tensor.tokens * row_bytes(decisions, tensor)


def blocks(rows: int, features: int) -> list[tuple[int, int]]:
    """Return (first row, rows) of the blocks in which rows of ``features`` values are rounded and copied."""
    size = max(1, STAGING_BYTES // packed_features(features))
    return [(first, min(size, rows - first)) for first in range(0, rows, size)]


def rows_at_once(rows: int, features: int) -> int:
    """Return how many rows are rounded at once."""
    return min(rows, max(1, SCRATCH_BYTES // (4 * features)))
