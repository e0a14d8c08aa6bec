"""Products in FP8, and what quantises their operands: one scale a tensor, from its own values (current scaling).

Scales from earlier steps are in ``fp8_delayed.py``; what follows is the same for both.

    scale = largest |x| / largest value of the format,  copy = round(x / scale),  x ~ copy * scale

E4M3 and E5M2 are those of Micikevicius et al. (2022), "FP8 formats for deep learning". A copy by columns is the one by
rows transposed: a buffer of ``tokens`` rows holds a matrix (features, tokens). So every product has the layout that
Hopper needs, both operands contiguous along the dimension that is summed:

    out = x w^T           x (tokens, in)       w (out, in)
    grad_x = grad w       grad (tokens, out)   w by columns (in, out)
    grad_w = grad^T x     grad by columns (out, tokens)   x by columns (in, tokens)

The program counts no bytes for scales. They lie outside its buffers, one number for each range of addresses that was
quantised by one call. Rows that ranks gathered have a scale of each rank, rows that were quantised block by block one
of each block, and a product multiplies each such part by itself: rows one after the other, and of a sum over tokens the
terms of each part. A part's copy by columns is a matrix of its own, (features, its tokens).
``machine/fp8_products.py`` checks before a run that all that products read was quantised.

Scales of blocks (``fp8_blocks.py``, ``fp8_mx.py``) move with the values. Each part is then one matrix too, by rows and
by columns. On Hopper a copy by columns that was gathered becomes one matrix again before its product; on Blackwell the
program has no such kernel, and a weight's gradient sums the products of its parts.

On CUDA ``torch._scaled_mm`` multiplies. It has no sum, so a weight's gradient is made in pieces in fp32, and added.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from memo_exec.kernels import fp8_blocks, fp8_delayed, fp8_mx
from memo_exec.kernels.call import Call
from memo_exec.kernels.fp8_blocks import Blocks
from memo_exec.kernels.fp8_mx import MxBlocks
from memo_exec.kernels.fp8_scales import LEAST_LARGEST, Fp8Scales, Part
from memo_sim.program.ir.kinds import BlockKind
from memo_sim.program.layout.fp8 import by_blocks, weights
from memo_sim.program.layout.parameters import Block, experts_block, layer_block

WHOLE = 16
"""Hopper multiplies rows and columns in multiples of this."""
WHOLE_MX = fp8_mx.TILE
"""Pieces of a gradient in MXFP8 have multiples of this, so that tiles of scales are whole."""
MX_TOKENS, MX_COLUMNS = 2**15, 2**13
"""Most tokens of a term, and columns of a piece, whose scales of MXFP8 may have to be copied to scratch: 8 MiB."""


def quantise(call: Call) -> None:
    """Quantise ``x`` to its copies: by rows (``out``), by columns (``columns``), or both.

    A copy may have the first features of ``x`` alone: of packed gradients, the queries' (``latent.py``).
    """
    scales, x, rows, columns = _scales(call), call.matrix("x"), call.get("out"), call.get("columns")
    width = next(copy for copy in (rows, columns) if copy is not None).shape[1]
    if _in_mx(call):
        fp8_mx.quantise(scales, x[:, : fp8_blocks.features_of(width)], rows=rows, columns=columns)
        return
    if _by_blocks(call):
        fp8_blocks.quantise(scales, x[:, : fp8_blocks.features_of(width)], rows, columns)
    else:
        given = fp8_delayed.scale_of(call, x) if _delayed(call) else None
        _quantise(scales, x[:, :width], rows, columns, given)


def quantise_weights(call: Call) -> None:
    """Quantise the matrices of a block, which lie one after the other in ``x``, each with scales of its own.

    ``x``: bf16 parameters, or the master weights of what is kept in FP8 alone.
    """
    x, out, columns = call["x"], call["out"], call.get("columns")
    for weight in weights(call.context.decisions, block_of(call)[1]):
        part = slice(weight.first, weight.first + weight.elements)
        turned = None if columns is None else columns[part]
        matrix, rows = x[part].view(weight.shape), out[part].view(weight.shape)
        if _in_mx(call):
            assert columns is not None  # MXFP8's copies have a direction, so there are two
            assert turned is not None
            behind = columns[out.numel() :].view(2, -1)  # the scales of all matrices by rows, and by columns
            first, end = part.start // fp8_mx.VALUES, part.stop // fp8_mx.VALUES
            tiles = behind[0, first:end], behind[1, first:end]
            fp8_mx.quantise_weight(_scales(call), matrix, out[part], turned, tiles)
        elif _delayed(call):
            given = fp8_delayed.scale_of(call, x[part], weight.name.removesuffix(".weight"))
            _quantise(_scales(call), matrix, rows, turned, given)
        elif _by_blocks(call):
            fp8_blocks.quantise_weight(_scales(call), matrix, rows, turned)
        else:
            _quantise(_scales(call), matrix, rows, turned)


def transpose_weights(call: Call) -> None:
    """Write the matrices of a block in FP8, each transposed, to ``out``, with their scales."""
    scales, x, out = _scales(call), call["x"], call["out"]
    for weight in weights(call.context.decisions, block_of(call)[1]):
        part = slice(weight.first, weight.first + weight.elements)
        if _by_blocks(call):
            fp8_blocks.transpose_weight(scales, x[part], out[part], *weight.shape)
            continue
        scales.made(out[part]).copy_(scales.of(x[part]))
        out[part].view(weight.shape[::-1]).copy_(x[part].view(weight.shape).t())


def block_of(call: Call) -> tuple[BlockKind, Block]:
    """Return the block whose weights are quantised: that of the layer, or of its experts that ranks divide.

    The instruction's name ends with the name of the block's family.
    """
    model, layout = call.context.model, call.context.decisions.layout
    layer = model.layer(call.layer)
    if not call.instruction.name.rpartition("params.")[2].startswith(str(BlockKind.EXPERTS)):
        return BlockKind.LAYER, layer_block(model, layout.divided, layer, ep=layout.ep)
    block = experts_block(model, layout.expert_divided, layout.ep, layer.experts)
    assert block is not None
    return BlockKind.EXPERTS, block


def transpose(call: Call) -> None:
    """Write the parts of ``x``, each transposed, to ``out``, with their scales; of blocks, the parts by columns as one.

    Ranks gather copies of blocks by columns, each rank's a matrix of its own.
    """
    scales, x, out = _scales(call), call.matrix("x"), call["out"].view(-1)
    features = x.shape[1]
    if _by_blocks(call):
        scales.made(out)
        parts = (part for _, _, part in _parts(call, "x", by_columns=True))
        fp8_blocks.join([part for part in parts if isinstance(part, Blocks)], call.matrix("out"))
        return
    for part in scales.parts(x):
        turned = out[part.first : part.first + part.elements]
        scales.made(turned).copy_(part.scale)
        turned.view(features, -1).copy_(x.view(-1)[part.first : part.first + part.elements].view(-1, features).t())


def linear(call: Call) -> None:
    """``out = x @ weight.T (+ bias)``."""
    _multiply_rows(call, "x", bias=call.get("bias"), fast=True)


def linear_add(call: Call) -> None:
    """``out += x @ weight.T``: one term of a sum of products."""
    _multiply_rows(call, "x", fast=True, add=True)


def linear_dgrad_add(call: Call) -> None:
    """``out += grad @ weight``: one term of an input's gradient."""
    _multiply_rows(call, "grad", add=True)


def linear_dgrad(call: Call) -> None:
    """``out = grad @ weight``; ``weight`` is the copy by columns."""
    _multiply_rows(call, "grad")


def linear_wgrad(call: Call) -> None:
    """``out += grad.T @ x``; both operands are copies by columns."""
    wide, terms = _scales(call).wide, _terms(call)
    m, n = (len(operand.matrix) for operand in terms[0])
    out = call["out"].view(m, n)
    for rows, columns in _pieces(m, n, terms, wide.numel()):
        part, scratch = _apart(wide, rows, columns)
        for grad, x in terms:
            multiply(grad.rows(rows, scratch), _some(x, columns, scratch), part, scratch=scratch)
            out[rows, columns].add_(part)


def linear_wgrad_product(call: Call) -> None:
    """``out = grad.T @ x``: the gradient of the weight in a tensor of its own."""
    wide, (first, *others) = _scales(call).wide, _terms(call)
    m, n = (len(operand.matrix) for operand in first)
    out = call["out"].view(m, n)
    if not others:
        multiply(*first, out, scratch=wide)
        return
    for rows, columns in _pieces(m, n, [first, *others], wide.numel(), results=2):
        summed, left = _apart(wide, rows, columns)
        part, scratch = _apart(left, rows, columns)
        for number, (grad, x) in enumerate((first, *others)):
            result = part if number else summed
            multiply(grad.rows(rows, scratch), _some(x, columns, scratch), result, scratch=scratch)
            if number:
                summed.add_(part)
        out[rows, columns].copy_(summed)


def parts_of(call: Call, role: str) -> list[tuple[int, int, OfExperts]]:
    """Return the parts of rows that were quantised together: first row, end, and the rows as one matrix."""
    return [(begin, end, _of_experts(part)) for begin, end, part in _parts(call, role, by_columns=False)]


def terms_of(call: Call) -> list[tuple[OfExperts, OfExperts]]:
    """Return the terms of a weight's gradient, of rows one after the other: ``grad`` and ``x`` by columns."""
    return [(_of_experts(grad), _of_experts(x)) for grad, x in _terms(call)]


def _of_experts(operand: Operand) -> OfExperts:
    assert not isinstance(operand, MxBlocks)  # experts in MXFP8 are refused before a run
    return operand


def scales_of(call: Call) -> Fp8Scales:
    """Return the scales of a step's copies."""
    return _scales(call)


def _scales(call: Call) -> Fp8Scales:
    scales = call.context.fp8
    assert scales is not None  # a program has these operators with FP8 alone
    return scales


def _by_blocks(call: Call) -> bool:
    recipe = call.context.decisions.fp8
    return recipe != "none" and by_blocks(recipe)


def _delayed(call: Call) -> bool:
    return call.context.decisions.fp8 == "delayed"


def _in_mx(call: Call) -> bool:
    return call.context.decisions.fp8 == "mx"


class Scaled(NamedTuple):
    """A matrix of FP8 values, and its one scale."""

    matrix: Tensor
    scale: Tensor

    def tokens(self, begin: int, end: int) -> Scaled:
        """Return some columns."""
        return Scaled(self.matrix[:, begin:end], self.scale)

    def rows(self, rows: slice, scratch: Tensor) -> Scaled:
        """Return some rows; nothing is written to ``scratch``."""
        return Scaled(self.matrix[rows], self.scale)


OfExperts = Scaled | Blocks
"""A matrix that a product of experts reads, with its scales."""
Operand = OfExperts | MxBlocks
"""A matrix that a product reads, with its scales."""
_Found = tuple[int, int, Operand]
"""Tokens [begin, end) of an operand, as one matrix."""


def values(of: OfExperts) -> Tensor:
    """Return the values that a copy stands for, in fp32."""
    return fp8_blocks.values(of) if isinstance(of, Blocks) else of.matrix.float() * of.scale


def _parts(call: Call, role: str, *, by_columns: bool) -> list[_Found]:
    """Return the parts of an operand that were quantised together: (tokens, features), or the other way round."""
    scales, tensor, found = _scales(call), call.matrix(role), list[_Found]()
    width, whole = tensor.shape[1], by_columns or _by_blocks(call)
    parts = scales.whole_parts(tensor) if whole else scales.parts(tensor)
    if _delayed(call) and not whole:  # all parts have the scale of the step before, so rows are one matrix
        parts = [Part(0, tensor.numel(), parts[0].scale, whole=True)]
    for part in parts:
        flat = tensor.view(-1)[part.first : part.first + part.elements]
        begin, end = part.first // width, (part.first + part.elements) // width
        if _in_mx(call):
            found.append((begin, end, fp8_mx.blocks(flat, width, by_columns=by_columns)))
        elif _by_blocks(call):
            found.append((begin, end, fp8_blocks.blocks(flat, width, by_columns=by_columns)))
        else:
            matrix = flat.view(width, -1) if by_columns else flat.view(-1, width)
            found.append((begin, end, Scaled(matrix, part.scale)))
    return found


def _terms(call: Call) -> list[tuple[Operand, Operand]]:
    """Return the terms of a weight's gradient: ``grad`` and ``x`` of tokens that are of one part in both."""
    both = [_parts(call, role, by_columns=True) for role in ("grad", "x")]
    terms, begun = list[tuple[Operand, Operand]](), 0
    for stop in sorted({end for found in both for _, end, _ in found}):
        for first, end in _cut(both, begun, stop):
            grad, x = (_tokens(found, first, end) for found in both)
            terms.append((grad, x))
        begun = stop
    return terms


def _cut(both: list[list[_Found]], begin: int, end: int) -> list[tuple[int, int]]:
    """Return tokens [begin, end) as one piece, or as several whose scales of MXFP8 fit into scratch."""
    if not any(_scales_of_a_row(_tokens(found, begin, end)) for found in both if isinstance(found[0][2], MxBlocks)):
        return [(begin, end)]
    return [(first, min(end, first + MX_TOKENS)) for first in range(begin, end, MX_TOKENS)]


def _tokens(parts: list[_Found], begin: int, end: int) -> Operand:
    """Return tokens [begin, end), which lie in one part."""
    first, _, part = next(each for each in parts if each[0] <= begin and end <= each[1])
    return part.tokens(begin - first, end - first)


def _scales_of_a_row(operand: Operand) -> int:
    """Return how many numbers in fp32 the scales of a row need, where they may have to be copied."""
    if isinstance(operand, MxBlocks):
        return 0 if operand.tiles.is_contiguous() else operand.tiles.shape[1]
    return operand.scale.shape[-1] if isinstance(operand, Blocks) else 0


def _some(operand: Operand, rows: slice, scratch: Tensor) -> Operand:
    """Return some rows of an operand, or itself if they are all."""
    return operand if rows == slice(0, len(operand.matrix)) else operand.rows(rows, scratch)


def _pieces(
    m: int, n: int, terms: list[tuple[Operand, Operand]], room: int, results: int = 1
) -> Iterator[tuple[slice, slice]]:
    """Yield pieces of an (m, n) gradient, ``results`` of which fit into scratch with the scales that are copied."""
    of_grad, of_x = (max(_scales_of_a_row(each) for each in operands) for operands in zip(*terms, strict=True))
    broad, multiple = n, WHOLE
    if isinstance(terms[0][0], MxBlocks):
        fits = (room - WHOLE_MX * of_grad) // (WHOLE_MX * results + of_x)
        broad, multiple = min(n, MX_COLUMNS, fits // WHOLE_MX * WHOLE_MX), WHOLE_MX
    for first in range(0, n, broad):
        columns = slice(first, min(n, first + broad))
        for rows in _blocks(m, (room - broad * of_x) // (results * broad + of_grad), multiple):
            yield rows, columns


def _apart(wide: Tensor, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
    """Return a matrix in scratch, and what is left of it."""
    high, broad = rows.stop - rows.start, columns.stop - columns.start
    return wide[: high * broad].view(high, broad), wide[high * broad :]


def _quantise(
    scales: Fp8Scales,
    x: Tensor,
    out: Tensor | None = None,
    columns: Tensor | None = None,
    given: Tensor | None = None,
) -> None:
    """Write ``x`` (rows, features) in FP8 to ``out`` and, transposed, to ``columns``; keep their scale.

    ``given``: a scale from earlier steps; without it, current scaling.
    """
    copies = [copy for copy in (out, columns) if copy is not None]
    most = torch.finfo(copies[0].dtype).max
    scale, *others = (scales.made(copy) for copy in copies)
    if given is None:
        torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32, out=scale[0])
        scale.clamp_(min=LEAST_LARGEST).div_(most)
    else:
        scale.copy_(given)
    for other in others:
        other.copy_(scale)
    turned = None if columns is None else columns.view(x.shape[1], x.shape[0])
    for rows in _blocks(len(x), scales.wide.numel() // x.shape[1]):
        wide = scales.wide[: (rows.stop - rows.start) * x.shape[1]].view(-1, x.shape[1])
        torch.div(x[rows], scale, out=wide)
        wide.clamp_(-most, most)  # the division may round up to more than the largest value
        if out is not None:
            out[rows].copy_(wide)
        if turned is not None:
            turned[:, rows].copy_((wide if out is None else out[rows]).t())


def _multiply_rows(call: Call, role: str, *, bias: Tensor | None = None, fast: bool = False, add: bool = False) -> None:
    """``out = rows @ weight.T (+ bias)``, part by part, or with ``add`` ``out += ...``.

    The first features of ``out`` are written where it has more. torch's products neither add nor leave features out, so
    these two are made in fp32 in scratch, in blocks of rows.
    """
    scales, weight, out = _scales(call), _weight(call, role), call.matrix("out")
    made = len(weight.matrix)
    out = out[:, :made]
    for begin, end, part in _parts(call, role, by_columns=False):
        if out.is_contiguous() and not add:
            multiply(part, weight, out[begin:end], scratch=scales.wide, bias=bias, fast=fast)
            continue
        assert bias is None  # torch's products with fp32 results take none
        multiple = WHOLE_MX if isinstance(part, MxBlocks) else WHOLE
        for rows in _blocks(end - begin, scales.wide.numel() // (made + _scales_of_a_row(part)), multiple):
            product, scratch = _apart(scales.wide, rows, slice(0, made))
            multiply(part.rows(rows, scratch), weight, product, scratch=scratch, fast=fast)
            into = out[begin + rows.start : begin + rows.stop]
            (into.add_ if add else into.copy_)(product)


def _weight(call: Call, role: str) -> Operand:
    """Return the copy of the weight that multiplies the rows of ``role``."""
    scales, copy, width = _scales(call), call["weight"], call.matrix(role).shape[1]
    if _by_blocks(call):
        features = fp8_blocks.features_of(width)
        shape = copy.numel() // features, features
        if _in_mx(call):
            return fp8_mx.weight_blocks(scales, copy, *shape)
        return fp8_blocks.weight_blocks(scales, copy, *shape)
    return Scaled(copy.view(copy.numel() // width, width), scales.of(copy))


def multiply(
    one: Operand, two: Operand, out: Tensor, *, scratch: Tensor, bias: Tensor | None = None, fast: bool = False
) -> None:
    """``out = one @ two.T (+ bias)``.

    ``scratch``: for scales of MXFP8. ``fast``: with one scale a tensor, sums of Hopper's matrix units are not promoted
    to fp32, as Transformer Engine has it in forward alone.
    """
    if isinstance(one, MxBlocks):
        assert isinstance(two, MxBlocks)
        fp8_mx.multiply(one, two, out, bias, scratch)
        return
    if isinstance(one, Blocks):
        assert isinstance(two, Blocks)
        fp8_blocks.multiply(one, two, out, bias)
        return
    assert isinstance(two, Scaled)
    if out.device.type == "cpu":  # where torch's product in FP8 is ten times slower; tests alone come here
        out.copy_(torch.nn.functional.linear(values(one), values(two), None if bias is None else bias.float()))
        return
    torch._scaled_mm(  # the public scaled_mm writes no tensor that is given
        one.matrix,
        two.matrix.t(),
        one.scale,
        two.scale,
        bias=bias,
        out_dtype=out.dtype,
        use_fast_accum=fast,
        out=out,
    )


def _blocks(rows: int, most: int, multiple: int = WHOLE) -> Iterator[slice]:
    """Yield the rows in blocks of at most ``most``, and a multiple of ``multiple`` where that allows it."""
    size = max(1, most - most % multiple or most)
    for first in range(0, rows, size):
        yield slice(first, min(rows, first + size))
