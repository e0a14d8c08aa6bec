"""Products in FP8 with one scale a tensor, from its own values (current scaling), and what quantises their operands.

    scale = largest |x| / largest value of the format,  copy = round(x / scale),  x ~ copy * scale

E4M3 and E5M2 are those of Micikevicius et al. (2022), "FP8 formats for deep learning". A copy by columns is the one by
rows transposed: a buffer of ``tokens`` rows holds a matrix (features, tokens). So every product has the layout that
Hopper needs, both operands contiguous along the dimension that is summed:

    out = x w^T           x (tokens, in)       w (out, in)
    grad_x = grad w       grad (tokens, out)   w by columns (in, out)
    grad_w = grad^T x     grad by columns (out, tokens)   x by columns (in, tokens)

The program counts no bytes for scales. They lie outside its buffers, one number for each range of addresses that was
quantised last; a product must read just such a range (``machine/fp8_products.py`` checks it before a run).
``torch._scaled_mm`` multiplies. It has no sum, so a weight's gradient is made in blocks of rows in fp32, and added.
"""

from __future__ import annotations

from collections.abc import Iterator

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


def linear(call: Call) -> None:
    """``out = x @ weight.T (+ bias)``."""
    x, out = call.matrix("x"), call.matrix("out")
    weight = call["weight"].view(out.shape[1], x.shape[1])
    _multiply(_scales(call), x, weight, out, bias=call.get("bias"), fast=True)


def linear_dgrad(call: Call) -> None:
    """``out = grad @ weight``; ``weight`` is the copy by columns."""
    grad, out = call.matrix("grad"), call.matrix("out")
    _multiply(_scales(call), grad, call["weight"].view(out.shape[1], grad.shape[1]), out)


def linear_wgrad(call: Call) -> None:
    """``out += grad.T @ x``; both operands are copies by columns."""
    scales = _scales(call)
    grad, x = (_by_columns(call, role) for role in ("grad", "x"))
    out = call["out"].view(len(grad), len(x))
    for rows in _blocks(len(grad), scales.wide.numel() // len(x)):
        wide = scales.wide[: (rows.stop - rows.start) * len(x)].view(-1, len(x))
        _multiply(scales, grad[rows], x, wide, scale=scales.of(grad))
        out[rows].add_(wide)


def linear_wgrad_product(call: Call) -> None:
    """``out = grad.T @ x``: the gradient of the weight in a tensor of its own."""
    grad, x = (_by_columns(call, role) for role in ("grad", "x"))
    _multiply(_scales(call), grad, x, call["out"].view(len(grad), len(x)))


def _scales(call: Call) -> Fp8Scales:
    scales = call.context.fp8
    assert scales is not None  # a program has these operators with FP8 alone
    return scales


def _by_columns(call: Call, role: str) -> Tensor:
    """Return a copy by columns as the matrix (features, tokens) that it holds."""
    tensor = call.matrix(role)
    return tensor.view(tensor.shape[1], tensor.shape[0])


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


def _multiply(
    scales: Fp8Scales,
    one: Tensor,
    two: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
    scale: Tensor | None = None,
) -> None:
    """``out = one @ two.T (+ bias)``; ``scale``: that of ``one``, where it is a part of what was quantised.

    ``fast``: sums of Hopper's matrix units are not promoted to fp32, as Transformer Engine has it in forward alone.
    """
    scale = scales.of(one) if scale is None else scale
    torch._scaled_mm(  # the public scaled_mm writes no tensor that is given
        one, two.t(), scale, scales.of(two), bias=bias, out_dtype=out.dtype, use_fast_accum=fast, out=out
    )


def _blocks(rows: int, most: int) -> Iterator[slice]:
    """Yield the rows in blocks of at most ``most``, and a multiple of ``WHOLE`` where that allows it."""
    size = max(1, most - most % WHOLE or most)
    for first in range(0, rows, size):
        yield slice(first, min(rows, first + size))
