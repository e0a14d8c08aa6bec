"""Weights in FP8 alone whose master weights are divided over ranks (ZeRO): what a rank quantises is a share of them.

A share is a range of a block's matrices, one after the other, and may begin and end inside a matrix, a row, or a block
of 128 x 128 values with one scale. So scales follow from the largest values of all shares:

    params.largest     this rank's share of the masters -> the largest values of every scale, zero where it has none
    fp8.max_reduce     over the ranks that divide the masters (``collective.py``)
    params.quantize    this rank's share, with the scales that follow
    params.all_gather  the copies of all shares; the scales of whole matrices follow from the same largest values

Shares have the bits that one rank with whole masters writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from memo_exec.distributed.mesh import Share
from memo_exec.kernels import fp8_blocks
from memo_exec.kernels.call import Call
from memo_exec.kernels.fp8 import block_of, scales_of
from memo_exec.kernels.fp8_scales import LEAST_LARGEST
from memo_sim.program.data_parallel.optimizer import Optimizer
from memo_sim.program.layout.fp8 import WEIGHT_BLOCK, by_blocks, weight_scales, weights
from memo_sim.program.layout.parameters import Parameter


class Piece(NamedTuple):
    """Elements [first, end) of a share, one after the other, and a rectangle of largest values.

    The elements are (its rows x some rows) x (its columns x some columns): as many for each largest value.
    """

    first: int
    end: int
    largest: Tensor

    def tiles(self, share: Tensor, features: int) -> Tensor:
        """Return the elements: (rows of largest values, rows, columns of largest values, columns).

        ``features``: how many elements of the piece lie in one row.
        """
        high, broad = self.largest.shape
        return share[self.first : self.end].view(high, -1, broad, features // broad)


def find_largest(call: Call) -> None:
    """``out``: the largest values of ``x``, this rank's share of the master weights; zero where it has none."""
    out, wide = call["out"].zero_(), scales_of(call).wide
    for piece, features in _pieces(call, out):
        found = wide[: piece.largest.numel()].view(piece.largest.shape)
        torch.linalg.vector_norm(piece.tiles(call["x"], features), torch.inf, dim=(1, 3), out=found)
        torch.maximum(piece.largest, found, out=piece.largest)


def quantise(call: Call) -> None:
    """Quantise ``x``, this rank's share of the master weights, to ``out``, by the ``largest`` values of all ranks."""
    wide = scales_of(call).wide
    for piece, features in _pieces(call, call["largest"]):
        number, values = piece.largest.numel(), piece.end - piece.first
        scale = wide[:number].view(piece.largest.shape)
        _to_scales(call, piece.largest, scale)
        tiles = piece.tiles(call["x"], features)
        divided = wide[number : number + values].view(tiles.shape)
        torch.div(tiles, scale[:, None, :, None], out=divided)
        if not _by_blocks(call):  # powers of two are rounded up, so nothing exceeds the format's largest value
            most = torch.finfo(call["out"].dtype).max
            divided.clamp_(-most, most)
        call["out"][piece.first : piece.end].copy_(divided.view(-1))


def keep_scales(call: Call, gathered: Tensor) -> None:
    """Give each of the ``gathered`` matrices of a block the scales that follow from the ``largest`` values."""
    scales = scales_of(call)
    for weight, largest in _matrices(call, call["largest"]):
        copy = gathered[weight.first : weight.first + weight.elements]
        made = scales.made(copy).view(1, 1)
        _to_scales(call, largest, fp8_blocks.weight_scales(scales, copy, *weight.shape) if _by_blocks(call) else made)


def _to_scales(call: Call, largest: Tensor, out: Tensor) -> None:
    """Write the scales that follow from largest values."""
    if _by_blocks(call):
        fp8_blocks.to_powers_of_two(out.copy_(largest))
    else:
        torch.clamp(largest, min=LEAST_LARGEST, out=out).div_(torch.finfo(torch.float8_e4m3fn).max)


def _by_blocks(call: Call) -> bool:
    return by_blocks(call.context.decisions.fp8)


def _matrices(call: Call, largest: Tensor) -> Iterator[tuple[Parameter, Tensor]]:
    """Yield the matrices of a block with their largest values, in rows and columns."""
    _, block = block_of(call)
    first = 0
    for weight in weights(call.context.decisions, block):
        rows, columns = weight_scales(call.context.decisions.fp8, weight.shape)
        yield weight, largest[first : first + rows * columns].view(rows, columns)
        first += rows * columns


def _pieces(call: Call, largest: Tensor) -> Iterator[tuple[Piece, int]]:
    """Yield the pieces of this rank's share, and how many elements of each lie in one row."""
    kind, block = block_of(call)
    optimizer = Optimizer(call.context.decisions, block, kind, 1)
    index = call.context.mesh.at(optimizer.shard_group)
    start, count = Share(optimizer.narrow, optimizer.shards).of(index)
    most = scales_of(call).wide.numel() // 2
    for weight, values in _matrices(call, largest):
        low, high = (min(max(at - weight.first, 0), weight.elements) for at in (start, start + count))
        cut = (
            _in_blocks(low, high, weight.shape[1], most, values)
            if _by_blocks(call)
            else _in_one(low, high, most, values)
        )
        for piece, features in cut:
            moved = weight.first - start
            yield piece._replace(first=piece.first + moved, end=piece.end + moved), features


def _in_one(first: int, end: int, most: int, values: Tensor) -> Iterator[tuple[Piece, int]]:
    """Yield elements [first, end) of a matrix with one scale, at most ``most`` at once."""
    for at in range(first, end, most):
        stop = min(end, at + most)
        yield Piece(at, stop, values), stop - at


def _in_blocks(first: int, end: int, width: int, most: int, values: Tensor) -> Iterator[tuple[Piece, int]]:
    """Yield elements [first, end) of a matrix with rows of ``width``, in pieces of whole rows or of one row.

    row   0     . . . x x x      the end of a row: a part of a block, then whole blocks
          1..   x x x x x x      whole rows: up to the next 128th row, then in blocks of 128, then the rest
          last  x x . . . .      the beginning of a row: whole blocks, then a part of one
    """
    at = first
    while at < end:
        row, column = divmod(at, width)
        line = row // WEIGHT_BLOCK
        if column or end - at < width:  # a part of a row
            stop, begin = min(end, (row + 1) * width), column // WEIGHT_BLOCK
            inside = column % WEIGHT_BLOCK
            if inside or stop - at < WEIGHT_BLOCK:
                stop = min(stop, at + WEIGHT_BLOCK - inside)
            else:
                stop -= (stop - at) % WEIGHT_BLOCK
            features = stop - at
            within = values[line : line + 1, begin : begin + max(1, features // WEIGHT_BLOCK)]
        else:
            rows, inside, features = min((end - at) // width, most // width), row % WEIGHT_BLOCK, width
            if inside or rows < WEIGHT_BLOCK:
                rows = min(rows, WEIGHT_BLOCK - inside)
            else:
                rows -= rows % WEIGHT_BLOCK
            stop = at + rows * width
            within = values[line : line + max(1, rows // WEIGHT_BLOCK)]
        yield Piece(at, stop, within), features
        at = stop
