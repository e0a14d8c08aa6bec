"""MXFP8 products: one scale for 32 values, a power of two in eight bits (E8M0; OCP Microscaling Formats, 2023).

    scale = the least power of two >= largest |x| of a block / 448,  copy = round(x / scale),  x ~ copy * scale

Rounding the scale up is Transformer Engine's rule (torchao calls it RCEIL), so no value exceeds E4M3's largest. Blocks
lie along the dimension that a product sums. So every tensor, a weight too, has a copy by rows and one by columns, each
quantised from the bf16 values: neither is the other one transposed.

Scales lie in tiles as cuBLASLt reads them (its "1D block scaling factors layout"; torch: SWIZZLE_32_4_4). A tile has
those of 128 rows and 128 values of each row, and tiles lie row of tiles after row of tiles:

    scale of row r and of block c  ->  byte 16 (r mod 32) + 4 (r div 32) + c of its tile, 0 <= r < 128, 0 <= c < 4

With sizes that are multiples of 128 no tile is padded, so scales take 1/32 of the values' bytes, which the program
counts. What one call quantises is one matrix, and behind it its scales:

    by rows      values (tokens, features)    scales (tokens / 128, features / 128) tiles
    by columns   values (features, tokens)    scales (features / 128, tokens / 128) tiles

Of a layer's weights the values of all matrices come first, by rows and then by columns, and then the scales of both in
the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from memo_exec.kernels.fp8_blocks import features_of, pieces
from memo_exec.kernels.fp8_scales import Fp8Scales

VALUES = 32
"""Values with one scale."""
TILE = 128
"""Rows of a tile of scales, and values of each row."""
_TILE_BYTES = TILE * TILE // VALUES
_LEAST = 2.0**-126
"""The least scale, also that of zeros: its reciprocal is a normal number in fp32."""
_MANTISSA, _MANTISSA_BITS = 0x7FFFFF, 23


class MxBlocks(NamedTuple):
    """A matrix of FP8 values, and the tiles of its scales."""

    matrix: Tensor
    tiles: Tensor
    """Bytes, (rows / 128, columns / 128, 512)."""

    def tokens(self, begin: int, end: int) -> MxBlocks:
        """Return some columns, in whole tiles; their scales are apart then."""
        return MxBlocks(self.matrix[:, begin:end], self.tiles[:, begin // TILE : end // TILE])

    def rows(self, rows: slice, scratch: Tensor) -> MxBlocks:
        """Return some rows, in whole tiles, whose scales are together: nothing is written to ``scratch``."""
        return MxBlocks(self.matrix[rows], self.tiles[rows.start // TILE : rows.stop // TILE])


def blocks(part: Tensor, width: int, *, by_columns: bool) -> MxBlocks:
    """Return what one call quantised; ``part``: its bytes, flat, ``width`` of them for each token."""
    features, tokens = features_of(width), part.numel() // width
    rows, columns = (features, tokens) if by_columns else (tokens, features)
    return _matrix(part[: rows * columns], part[rows * columns :], rows, columns)


def weight_blocks(scales: Fp8Scales, copy: Tensor, rows: int, columns: int) -> MxBlocks:
    """Return a weight's copy of ``rows`` x ``columns`` values.

    Raises:
        ValueError: when it was not quantised.
    """
    scales.of(copy)
    return _matrix(copy, scales.tiles_of(copy), rows, columns)


def quantise(scales: Fp8Scales, x: Tensor, *, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
    """Write ``x`` (tokens, features) to its copies by rows and by columns, with their scales behind the values."""
    for copy, by_columns in ((rows, False), (columns, True)):
        if copy is not None:
            scales.made(copy)
            _quantise(x, blocks(copy.view(-1), copy.shape[1], by_columns=by_columns), scales.wide, turned=by_columns)


def quantise_weight(scales: Fp8Scales, x: Tensor, rows: Tensor, columns: Tensor, tiles: tuple[Tensor, Tensor]) -> None:
    """Write a weight ``x`` (out, in) to its flat copies by rows and by columns, and their scales to ``tiles``."""
    for copy, scale, turned in zip((rows, columns), tiles, (False, True), strict=True):
        scales.made(copy)
        scales.keep_tiles(copy, scale)
        shape = x.shape[::-1] if turned else x.shape
        _quantise(x, _matrix(copy, scale, *shape), scales.wide, turned=turned)


def multiply(one: MxBlocks, two: MxBlocks, out: Tensor, bias: Tensor | None, scratch: Tensor) -> None:
    """``out = one @ two.T (+ bias)``; ``scratch``: flat, in fp32, for scales that are apart."""
    if out.device.type == "cpu":  # for which torch has no such product; tests alone come here
        out.copy_(torch.nn.functional.linear(values(one), values(two), None if bias is None else bias.float()))
        return
    free, scaled = scratch.view(torch.uint8), list[Tensor]()
    for operand in (one, two):
        tiles = operand.tiles
        if not tiles.is_contiguous():
            tiles, free = free[: tiles.numel()].view(tiles.shape).copy_(tiles), free[tiles.numel() :]
        scaled.append(tiles.view(torch.float8_e8m0fnu).view(-1))
    kinds, swizzled = [ScalingType.BlockWise1x32.value], [SwizzleType.SWIZZLE_32_4_4.value]
    torch._scaled_mm_v2(  # the public scaled_mm writes no tensor that is given
        one.matrix,
        two.matrix.t(),
        [scaled[0]],
        kinds,
        swizzled,
        [scaled[1]],
        kinds,
        swizzled,
        bias,
        out.dtype,
        out=out,
    )


def values(of: MxBlocks) -> Tensor:
    """Return the values that a copy stands for, in fp32."""
    rows, columns = of.matrix.shape
    scale = _in_order(of.tiles).reshape(rows, columns // VALUES).view(torch.float8_e8m0fnu).float()
    return of.matrix.float() * scale.repeat_interleave(VALUES, 1)


def _matrix(copy: Tensor, tiles: Tensor, rows: int, columns: int) -> MxBlocks:
    shape = (rows // TILE, columns // TILE, _TILE_BYTES)
    return MxBlocks(copy.view(rows, columns), tiles.view(torch.uint8).view(shape))


def _in_order(tiles: Tensor) -> Tensor:
    """Return a view of tiles with the scales in the order of rows and blocks: (tiles, 4, 32, tiles, 4)."""
    return tiles.view(*tiles.shape[:2], 32, 4, 4).permute(0, 3, 2, 1, 4)


def _quantise(x: Tensor, copy: MxBlocks, wide: Tensor, *, turned: bool) -> None:
    """Write ``x``, or with ``turned`` its transposition, to ``copy``; blocks lie along the rows of ``copy``."""
    most = torch.finfo(copy.matrix.dtype).max
    room = wide.numel() * VALUES // (VALUES + 1)  # for values and their scales
    for part, features in pieces(len(x), x.shape[1], room):
        source = x[part, features]
        high, broad = source.shape
        along, shape = (1, (-1, VALUES, broad)) if turned else (2, (high, -1, VALUES))
        scale = wide[high * broad :][: high * broad // VALUES].view((-1, broad) if turned else (high, -1))
        torch.linalg.vector_norm(source.view(shape), torch.inf, dim=along, dtype=torch.float32, out=scale)
        scale.div_(most).nan_to_num_(nan=torch.inf, posinf=torch.inf).clamp_(min=_LEAST)
        exponents = scale.view(torch.int32).add_(_MANTISSA).bitwise_right_shift_(_MANTISSA_BITS)  # inf: 255, a NaN
        rows, columns, ordered = (features, part, exponents.t()) if turned else (part, features, exponents)
        tiles = copy.tiles[rows.start // TILE : rows.stop // TILE, columns.start // TILE : columns.stop // TILE]
        _in_order(tiles).copy_(ordered.view(tiles.shape[0], 4, 32, tiles.shape[1], 4))
        exponents.bitwise_left_shift_(_MANTISSA_BITS)
        rounded = wide[: high * broad]
        torch.div(source.view(shape), scale.unsqueeze(along), out=rounded.view(shape))
        rounded = rounded.view(high, broad)
        copy.matrix[rows, columns].copy_(rounded.t() if turned else rounded)
