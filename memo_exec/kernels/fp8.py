"""Products in FP8 with one scale a tensor, from its own values (current scaling), and what quantises their operands.

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

``torch._scaled_mm`` multiplies. It has no sum, so a weight's gradient is made in blocks of rows in fp32, and added.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from memo_exec.kernels.call import Call
from memo_exec.kernels.fp8_scales import Fp8Scales
from memo_sim.program.layout.fp8 import weights
from memo_sim.program.layout.parameters import layer_block

LEAST_LARGEST = 1e-30
"""Stands for the largest value of a tensor of zeros, whose scale may be any number."""
WHOLE = 16
"""Hopper multiplies rows and columns in multiples of this."""


def quantise(call: Call) -> None:
    """Quantise ``x`` to ``out``, and to its transposed copy ``columns`` where there is one."""
    x, out = call.matrix("x"), call.matrix("out")
    _quantise(_scales(call), x, out, call.get("columns"))


def quantise_weights(call: Call) -> None:
    """Quantise the matrices of a layer, which lie one after the other in ``x``, each with a scale of its own."""
    model, layout = call.context.model, call.context.decisions.layout
    x, out, columns = call["x"], call["out"], call.get("columns")
    for weight in weights(
        call.context.decisions, layer_block(model, layout.divided, model.layer(call.layer), ep=layout.ep)
    ):
        part = slice(weight.first, weight.first + weight.elements)
        turned = None if columns is None else columns[part]
        _quantise(_scales(call), x[part].view(weight.shape), out[part].view(weight.shape), turned)


def transpose(call: Call) -> None:
    """Write the parts of ``x``, each transposed, to ``out``, with their scales."""
    scales, x, out = _scales(call), call.matrix("x"), call["out"].view(-1)
    features = x.shape[1]
    for part in scales.parts(x):
        turned = out[part.first : part.first + part.elements]
        scales.made(turned).copy_(part.scale)
        turned.view(features, -1).copy_(x.view(-1)[part.first : part.first + part.elements].view(-1, features).t())


def linear(call: Call) -> None:
    """``out = x @ weight.T (+ bias)``."""
    x, out = call.matrix("x"), call.matrix("out")
    weight = call["weight"].view(out.shape[1], x.shape[1])
    _multiply_rows(_scales(call), x, weight, out, bias=call.get("bias"), fast=True)


def linear_dgrad(call: Call) -> None:
    """``out = grad @ weight``; ``weight`` is the copy by columns."""
    grad, out = call.matrix("grad"), call.matrix("out")
    _multiply_rows(_scales(call), grad, call["weight"].view(out.shape[1], grad.shape[1]), out)


def linear_wgrad(call: Call) -> None:
    """``out += grad.T @ x``; both operands are copies by columns."""
    scales, terms = _scales(call), _terms(call)
    m, n = call.matrix("grad").shape[1], call.matrix("x").shape[1]
    out = call["out"].view(m, n)
    for rows in _blocks(m, scales.wide.numel() // n):
        wide = scales.wide[: (rows.stop - rows.start) * n].view(-1, n)
        for grad, x in terms:
            _multiply(grad.matrix[rows], x.matrix, wide, grad.scale, x.scale)
            out[rows].add_(wide)


def linear_wgrad_product(call: Call) -> None:
    """``out = grad.T @ x``: the gradient of the weight in a tensor of its own."""
    scales, (first, *others) = _scales(call), _terms(call)
    m, n = call.matrix("grad").shape[1], call.matrix("x").shape[1]
    out = call["out"].view(m, n)
    if not others:
        _multiply(first[0].matrix, first[1].matrix, out, first[0].scale, first[1].scale)
        return
    for rows in _blocks(m, scales.wide.numel() // (2 * n)):
        summed, wide = scales.wide[: 2 * (rows.stop - rows.start) * n].view(2, -1, n)
        for number, (grad, x) in enumerate((first, *others)):
            _multiply(grad.matrix[rows], x.matrix, wide if number else summed, grad.scale, x.scale)
            if number:
                summed.add_(wide)
        out[rows].copy_(summed)


def _scales(call: Call) -> Fp8Scales:
    scales = call.context.fp8
    assert scales is not None  # a program has these operators with FP8 alone
    return scales


class _Columns(NamedTuple):
    """Some tokens of a copy by columns: a matrix (features, tokens), and its scale."""

    matrix: Tensor
    scale: Tensor


def _terms(call: Call) -> list[tuple[_Columns, _Columns]]:
    """Return the terms of a weight's gradient: ``grad`` and ``x`` of tokens that have one scale in both."""
    scales, both, ends = _scales(call), list[list[tuple[int, int, _Columns]]](), set[int]()
    for role in ("grad", "x"):
        tensor = call.matrix(role)
        features, found = tensor.shape[1], list[tuple[int, int, _Columns]]()
        for part in scales.columns(tensor):
            matrix = tensor.view(-1)[part.first : part.first + part.elements].view(features, -1)
            first = part.first // features
            found.append((first, first + matrix.shape[1], _Columns(matrix, part.scale)))
        both.append(found)
        ends |= {end for _, end, _ in found}
    terms, begun = list[tuple[_Columns, _Columns]](), 0
    for end in sorted(ends):
        grad, x = (_tokens(found, begun, end) for found in both)
        terms.append((grad, x))
        begun = end
    return terms


def _tokens(parts: list[tuple[int, int, _Columns]], begin: int, end: int) -> _Columns:
    """Return tokens [begin, end), which lie in one part."""
    first, _, part = next(each for each in parts if each[0] <= begin and end <= each[1])
    return _Columns(part.matrix[:, begin - first : end - first], part.scale)


def _quantise(scales: Fp8Scales, x: Tensor, out: Tensor, columns: Tensor | None) -> None:
    """Write ``x`` (rows, features) in the dtype of ``out`` to it and, transposed, to ``columns``; keep their scale."""
    most = torch.finfo(out.dtype).max
    scale = scales.made(out)
    torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32, out=scale[0])
    scale.clamp_(min=LEAST_LARGEST).div_(most)
    turned = None
    if columns is not None:
        scales.made(columns).copy_(scale)
        turned = columns.view(x.shape[1], x.shape[0])
    for rows in _blocks(len(x), scales.wide.numel() // x.shape[1]):
        wide = scales.wide[: (rows.stop - rows.start) * x.shape[1]].view(-1, x.shape[1])
        torch.div(x[rows], scale, out=wide)
        out[rows].copy_(wide.clamp_(-most, most))  # the division may round up to more than the largest value
        if turned is not None:
            turned[:, rows].copy_(out[rows].t())


def _multiply_rows(
    scales: Fp8Scales, rows: Tensor, weight: Tensor, out: Tensor, *, bias: Tensor | None = None, fast: bool = False
) -> None:
    """``out = rows @ weight.T (+ bias)``, part by part."""
    features, scale = rows.shape[1], scales.of(weight)
    for part in scales.parts(rows):
        own = slice(part.first // features, (part.first + part.elements) // features)
        _multiply(rows[own], weight, out[own], part.scale, scale, bias=bias, fast=fast)


def _multiply(
    one: Tensor,
    two: Tensor,
    out: Tensor,
    scale: Tensor,
    other: Tensor,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
) -> None:
    """``out = one @ two.T (+ bias)``; ``scale`` and ``other``: the scales of the two.

    ``fast``: sums of Hopper's matrix units are not promoted to fp32, as Transformer Engine has it in forward alone.
    """
    torch._scaled_mm(  # the public scaled_mm writes no tensor that is given
        one, two.t(), scale, other, bias=bias, out_dtype=out.dtype, use_fast_accum=fast, out=out
    )


def _blocks(rows: int, most: int) -> Iterator[slice]:
    """Yield the rows in blocks of at most ``most``, and a multiple of ``WHOLE`` where that allows it."""
    size = max(1, most - most % WHOLE or most)
    for first in range(0, rows, size):
        yield slice(first, min(rows, first + size))
