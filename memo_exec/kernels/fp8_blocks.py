"""Scales of blocks for products in FP8: 1 x 128 values of an activation or a gradient, 128 x 128 of a weight.

    scale = the least power of two >= largest |x| of a block / 448,  copy = round(x / scale),  x ~ copy * scale

A scale is a power of two, as Transformer Engine rounds it by default, so division by it is exact. Blocks lie along the
dimension that a product sums, so the copy by columns is no transposed copy by rows: it has scales of 128 tokens.

The program gives a row of ``features`` values another ``features / 32`` bytes. What one call quantises is one matrix,
and behind it its scales in fp32, in the order that cuBLASLt reads them:

    by rows      values (tokens, features)    scales (features / 128, tokens)
    by columns   values (features, tokens)    scales (tokens / 128, features)

Scales of a weight lie outside the program's buffers: a grid with a row for each 128 rows, whose length is a multiple of
four. Its copy by columns is the one by rows transposed, and so is the grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from memo_exec.kernels.fp8_scales import LEAST_LARGEST, Fp8Scales

BLOCK = 128
"""Values of a row, and rows of a weight, with one scale."""
_MANTISSA, _EXPONENT = 0x7FFFFF, 0x7F800000
"""Bits of a number in fp32."""
_GRID = 4
"""A row of a weight's scales has a multiple of these."""


class Blocks(NamedTuple):
    """A matrix of FP8 values and its scales: one for 128 values of a row."""

    matrix: Tensor
    scale: Tensor
    """(rows, columns / 128), one column after the other. Of a weight: (rows / 128, columns / 128 rounded up to 4)."""
    weight: bool = False

    def tokens(self, begin: int, end: int) -> Blocks:
        """Return some columns, in whole blocks."""
        return Blocks(self.matrix[:, begin:end], self.scale[:, begin // BLOCK : end // BLOCK])

    def rows(self, rows: slice, scratch: Tensor) -> Blocks:
        """Return some rows; their scales are copied to ``scratch``, one column after the other again."""
        size = (rows.stop - rows.start) * self.scale.shape[1]
        scale = scratch[:size].view(self.scale.shape[1], -1).copy_(self.scale[rows].t())
        return Blocks(self.matrix[rows], scale.t())


def features_of(width: int) -> int:
    """Return the features of a row of ``width`` bytes, which has their scales as well."""
    return width * 32 // 33


def blocks(part: Tensor, width: int, *, by_columns: bool) -> Blocks:
    """Return what one call quantised; ``part``: its bytes, flat, ``width`` of them for each token."""
    features, tokens = features_of(width), part.numel() // width
    rows, columns = (features, tokens) if by_columns else (tokens, features)
    scale = part[rows * columns :].view(torch.float32).view(columns // BLOCK, rows)
    return Blocks(part[: rows * columns].view(rows, columns), scale.t())


def weight_blocks(scales: Fp8Scales, copy: Tensor, rows: int, columns: int) -> Blocks:
    """Return a weight's copy of ``rows`` x ``columns`` values.

    Raises:
        ValueError: when it was not quantised.
    """
    scales.of(copy)
    return Blocks(copy.view(rows, columns), _grid(scales, copy, rows, columns), weight=True)


def quantise(scales: Fp8Scales, x: Tensor, out: Tensor | None = None, columns: Tensor | None = None) -> None:
    """Write ``x`` (tokens, features) to its copies by rows (``out``) and by columns, with their scales."""
    if out is not None:
        _quantise_rows(scales, x, out)
    if columns is not None:
        _quantise_columns(scales, x, columns)


def _quantise_rows(scales: Fp8Scales, x: Tensor, out: Tensor) -> None:
    scales.made(out)
    rows, of_rows = blocks(out.view(-1), out.shape[1], by_columns=False), x.view(len(x), -1, BLOCK)
    torch.linalg.vector_norm(of_rows, torch.inf, dim=2, dtype=torch.float32, out=rows.scale)
    to_powers_of_two(rows.scale)
    for part, features in pieces(len(x), x.shape[1], scales.wide.numel()):
        groups = slice(features.start // BLOCK, features.stop // BLOCK)
        wide = scales.wide[: x[part, features].numel()].view(part.stop - part.start, -1, BLOCK)
        torch.div(of_rows[part, groups], rows.scale[part, groups, None], out=wide)
        rows.matrix[part, features].copy_(wide.flatten(1))


def _quantise_columns(scales: Fp8Scales, x: Tensor, columns: Tensor) -> None:
    scales.made(columns)
    turned = blocks(columns.view(-1), columns.shape[1], by_columns=True)
    of_columns, scale = x.view(-1, BLOCK, x.shape[1]), turned.scale.t()
    torch.linalg.vector_norm(of_columns, torch.inf, dim=1, dtype=torch.float32, out=scale)
    to_powers_of_two(turned.scale)
    for part, features in pieces(len(x), x.shape[1], scales.wide.numel()):
        lines = slice(part.start // BLOCK, part.stop // BLOCK)
        wide = scales.wide[: x[part, features].numel()].view(lines.stop - lines.start, BLOCK, -1)
        torch.div(of_columns[lines, :, features], scale[lines, None, features], out=wide)
        turned.matrix[features, part].copy_(wide.flatten(0, 1).t())


def quantise_weight(scales: Fp8Scales, x: Tensor, out: Tensor, columns: Tensor | None) -> None:
    """Write a weight ``x`` to its copy and, transposed, to ``columns``, with their scales."""
    n, k = x.shape
    scales.made(out)
    scale = weight_scales(scales, out, n, k)
    tiles = x.view(n // BLOCK, BLOCK, -1, BLOCK)
    torch.linalg.vector_norm(tiles, torch.inf, dim=(1, 3), dtype=torch.float32, out=scale)
    to_powers_of_two(scale)
    for part, features in pieces(n, k, scales.wide.numel()):
        lines, groups = (slice(each.start // BLOCK, each.stop // BLOCK) for each in (part, features))
        wide = scales.wide[: x[part, features].numel()].view(lines.stop - lines.start, BLOCK, -1, BLOCK)
        torch.div(tiles[lines, :, groups], scale[lines, None, groups, None], out=wide)
        out[part, features].copy_(wide.view(part.stop - part.start, -1))
    if columns is not None:
        transpose_weight(scales, out.view(-1), columns, n, k)


def transpose_weight(scales: Fp8Scales, copy: Tensor, columns: Tensor, n: int, k: int) -> None:
    """Write a weight's copy of ``n`` x ``k`` values, transposed, to ``columns``, with its scales."""
    scales.made(columns)
    columns.view(k, n).copy_(copy.view(n, k).t())
    weight_scales(scales, columns, k, n).copy_(weight_scales(scales, copy, n, k).t())


def weight_scales(scales: Fp8Scales, copy: Tensor, rows: int, columns: int) -> Tensor:
    """Return the scales of a weight's copy of ``rows`` x ``columns`` values, for the kernel that writes it."""
    return _grid(scales, copy, rows, columns)[:, : columns // BLOCK]


def join(parts: list[Blocks], out: Tensor) -> None:
    """Write parts by columns, each of some tokens, one after the other to ``out`` (tokens, bytes): one matrix."""
    whole, first = blocks(out.view(-1), out.shape[1], by_columns=True), 0
    for part in parts:
        end = first + part.matrix.shape[1]
        whole.matrix[:, first:end].copy_(part.matrix)
        whole.scale[:, first // BLOCK : end // BLOCK].copy_(part.scale)
        first = end


def multiply(one: Blocks, two: Blocks, out: Tensor, bias: Tensor | None = None) -> None:
    """``out = one @ two.T (+ bias)``; ``two`` may be a weight."""
    if out.device.type == "cpu":  # for which torch has no such product; tests alone come here
        out.copy_(torch.nn.functional.linear(values(one), values(two), None if bias is None else bias.float()))
        return
    kind = ScalingType.BlockWise128x128 if two.weight else ScalingType.BlockWise1x128
    torch._scaled_mm_v2(  # the public scaled_mm writes no tensor that is given
        one.matrix,
        two.matrix.t(),
        [one.scale],
        [ScalingType.BlockWise1x128.value],
        [],
        [two.scale.t() if two.weight else two.scale],
        [kind.value],
        [],
        bias,
        out.dtype,
        out=out,
    )


def values(of: Blocks) -> Tensor:
    """Return the values that a copy stands for, in fp32."""
    rows, columns = of.matrix.shape
    scale = of.scale[:, : columns // BLOCK].repeat_interleave(BLOCK, 1)
    return of.matrix.float() * (scale.repeat_interleave(BLOCK, 0)[:rows] if of.weight else scale)


def _grid(scales: Fp8Scales, copy: Tensor, rows: int, columns: int) -> Tensor:
    return scales.grid(copy, rows // BLOCK, -(-columns // BLOCK // _GRID) * _GRID)


def to_powers_of_two(scale: Tensor) -> None:
    """Turn the largest values of blocks into scales: rounded up, by carrying any bit of the mantissa."""
    scale.clamp_(min=LEAST_LARGEST).div_(torch.finfo(torch.float8_e4m3fn).max)
    scale.view(torch.int32).add_(_MANTISSA).bitwise_and_(_EXPONENT)


def pieces(rows: int, columns: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield parts of a matrix in whole blocks, or tiles of MXFP8, each of at most ``most`` values."""
    wide = min(columns, most // BLOCK // BLOCK * BLOCK)
    high = most // wide // BLOCK * BLOCK
    for first in range(0, rows, high):
        for begin in range(0, columns, wide):
            yield slice(first, min(rows, first + high)), slice(begin, min(columns, begin + wide))
