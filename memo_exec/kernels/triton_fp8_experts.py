"""Products of dispatched rows with their experts' weights in FP8, one Triton kernel for all experts.

A program multiplies one tile. Of rows, it finds its expert by counting the tiles of the experts before; as many
programs begin as tiles can be needed, and those beyond the last do nothing. Sums are added in fp32 for each 128 terms,
because Hopper's matrix units keep fewer bits while they add in FP8.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from memo_exec.kernels.fp8 import OfExperts
from memo_exec.kernels.fp8_blocks import BLOCK, Blocks
from memo_exec.kernels.fp8_experts import Weights

TILE = 128
"""Rows and columns of a tile."""


def multiply_rows(x: OfExperts, weights: Weights, ends: Tensor, first: int, out: Tensor) -> None:
    """``out[row] = weight of the row's expert @ x[row]``; 0 for rows of no expert.

    ``x`` (rows, in) and ``out`` (rows, out) are the dispatched rows from ``first`` on; ``ends``: where experts' end.
    """
    rows, features = out.shape
    experts, blocks = len(ends), isinstance(x, Blocks)
    grid = triton.cdiv(rows, TILE) + experts + 1, triton.cdiv(features, TILE)
    _rows_kernel[grid](
        x.matrix,
        x.scale,
        weights.values,
        weights.scale,
        ends,
        out,
        first,
        rows,
        experts,
        features,
        x.matrix.shape[1],
        x.matrix.stride(0),
        *(x.scale.stride() if blocks else (0, 0)),
        *weights.values.stride()[:2],
        *(weights.scale.stride() if blocks else (0, 0, 0)),
        out.stride(0),
        BLOCKS=blocks,
        TILE=TILE,
        DEPTH=BLOCK,
        num_warps=8,
    )


def add_gradients(grad: OfExperts, x: OfExperts, ends: Tensor, first: int, out: Tensor) -> None:
    """``out[expert] += grad @ x.T`` over the expert's rows.

    ``grad`` (out, rows) and ``x`` (in, rows) have the dispatched rows from ``first`` on; ``out``: (expert, out, in).
    """
    experts, n, k = out.shape
    blocks = isinstance(x, Blocks)
    grid = experts, triton.cdiv(n, TILE) * triton.cdiv(k, TILE)
    _gradients_kernel[grid](
        grad.matrix,
        grad.scale,
        x.matrix,
        x.scale,
        ends,
        out,
        first,
        x.matrix.shape[1],
        n,
        k,
        grad.matrix.stride(0),
        *(grad.scale.stride() if blocks else (0, 0)),
        x.matrix.stride(0),
        *(x.scale.stride() if blocks else (0, 0)),
        BLOCKS=blocks,
        TILE=TILE,
        DEPTH=BLOCK,
        num_warps=8,
    )


@triton.jit
def _rows_kernel(
    x,
    x_scale,
    weight,
    weight_scale,
    ends,
    out,
    first,
    rows,
    experts,
    n,
    k,
    x_row,
    x_scale_row,
    x_scale_group,
    weight_expert,
    weight_row,
    weight_scale_expert,
    weight_scale_row,
    weight_scale_group,
    out_row,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tile, across = tl.program_id(0), tl.program_id(1)
    # The tiles of one expert come after those of another; rows of no expert count as those of one more.
    expert, low, high, begin, before = experts, 0, 0, 0, 0
    for each in range(experts + 1):
        end = tl.minimum(tl.maximum(tl.load(ends + each, mask=each < experts, other=0) - first, 0), rows)
        end = tl.where(each == experts, rows, end)
        behind = before + tl.cdiv(end - begin, TILE)
        mine = (before <= tile) & (tile < behind)
        expert = tl.where(mine, each, expert)
        low = tl.where(mine, begin + (tile - before) * TILE, low)
        high = tl.where(mine, end, high)
        begin, before = end, behind
    if low < high:
        row, column = low + tl.arange(0, TILE), across * TILE + tl.arange(0, TILE)
        inside, at = row < high, tl.arange(0, DEPTH)
        wide_row, of = row.to(tl.int64), expert.to(tl.int64)
        total = tl.zeros((TILE, TILE), tl.float32)
        if expert < experts:
            for group in range(tl.cdiv(k, DEPTH)):
                depth = group * DEPTH + at
                one = tl.load(
                    x + wide_row[:, None] * x_row + depth[None, :],
                    mask=inside[:, None] & (depth < k)[None, :],
                    other=0.0,
                )
                two = tl.load(
                    weight + of * weight_expert + column.to(tl.int64)[None, :] * weight_row + depth[:, None],
                    mask=(column < n)[None, :] & (depth < k)[:, None],
                    other=0.0,
                )
                if BLOCKS:
                    scale = tl.load(x_scale + wide_row * x_scale_row + group * x_scale_group, mask=inside, other=0.0)
                    block = across * TILE // 128
                    scale *= tl.load(
                        weight_scale + of * weight_scale_expert + block * weight_scale_row + group * weight_scale_group
                    )
                    total += tl.dot(one, two) * scale[:, None]
                else:
                    total += tl.dot(one, two) * (tl.load(x_scale) * tl.load(weight_scale))
        tl.store(
            out + wide_row[:, None] * out_row + column[None, :],
            total.to(out.dtype.element_ty),
            mask=inside[:, None] & (column < n)[None, :],
        )


@triton.jit
def _gradients_kernel(
    grad,
    grad_scale,
    x,
    x_scale,
    ends,
    out,
    first,
    rows,
    n,
    k,
    grad_row,
    grad_scale_row,
    grad_scale_group,
    x_row,
    x_scale_row,
    x_scale_group,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    expert, tile = tl.program_id(0), tl.program_id(1)
    across = tl.cdiv(k, TILE)
    row = tile // across * TILE + tl.arange(0, TILE)
    column = tile % across * TILE + tl.arange(0, TILE)
    begin = tl.minimum(tl.maximum(tl.load(ends + expert - 1, mask=expert > 0, other=0) - first, 0), rows)
    end = tl.minimum(tl.maximum(tl.load(ends + expert) - first, 0), rows)
    if begin < end:
        wide_row, wide_column = row.to(tl.int64), column.to(tl.int64)
        total = tl.zeros((TILE, TILE), tl.float32)
        for group in range(begin // DEPTH, tl.cdiv(end, DEPTH)):
            at = group * DEPTH + tl.arange(0, DEPTH)
            inside = (at >= begin) & (at < end)
            one = tl.load(
                grad + wide_row[:, None] * grad_row + at[None, :],
                mask=(row < n)[:, None] & inside[None, :],
                other=0.0,
            )
            two = tl.load(
                x + wide_column[None, :] * x_row + at[:, None],
                mask=(column < k)[None, :] & inside[:, None],
                other=0.0,
            )
            if BLOCKS:
                left = grad_scale + wide_row * grad_scale_row + group * grad_scale_group
                left = tl.load(left, mask=row < n, other=0.0)
                right = x_scale + wide_column * x_scale_row + group * x_scale_group
                right = tl.load(right, mask=column < k, other=0.0)
                total += tl.dot(one, two) * left[:, None] * right[None, :]
            else:
                total += tl.dot(one, two) * (tl.load(grad_scale) * tl.load(x_scale))
        where = out + expert.to(tl.int64) * n * k + wide_row[:, None] * k + column[None, :]
        held = (row < n)[:, None] & (column < k)[None, :]
        tl.store(where, (tl.load(where, mask=held, other=0.0) + total).to(out.dtype.element_ty), mask=held)
