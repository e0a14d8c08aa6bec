"""GELU and SwiGLU as fused Triton kernels, one each for forward and backward.

They use the formulas of ``activation.py`` and read and write every tensor once. Offsets have 64 bits. Arithmetic is in
fp32; only the result is rounded.
"""

import triton
import triton.language as tl
from torch import Tensor

from memo_exec.kernels.call import Call

ELEMENTS = 1024
"""Elements that one Triton program processes."""


def gelu(call: Call) -> None:
    """``out = gelu(x)``."""
    x, out = call["x"].view(-1), call["out"].view(-1)
    _gelu_kernel[_grid(x)](x, x, out, x.numel(), TANH=_tanh(call), BACKWARD=False, BLOCK=ELEMENTS)


def gelu_backward(call: Call) -> None:
    """``grad_x = grad * gelu'(x)``."""
    x, grad, grad_x = (call[role].view(-1) for role in ("x", "grad", "grad_x"))
    _gelu_kernel[_grid(x)](x, grad, grad_x, x.numel(), TANH=_tanh(call), BACKWARD=True, BLOCK=ELEMENTS)


def swiglu(call: Call) -> None:
    """``out = silu(gate) * up``."""
    x, out = call.matrix("x"), call.matrix("out")
    rows, features = out.shape
    grid = rows, triton.cdiv(features, ELEMENTS)
    _swiglu_kernel[grid](x, out, features, x.stride(0), out.stride(0), BLOCK=ELEMENTS)


def swiglu_backward(call: Call) -> None:
    """``grad_gate = grad * up * silu'(gate)``, ``grad_up = grad * silu(gate)``."""
    x, grad, grad_x = call.matrix("x"), call.matrix("grad"), call.matrix("grad_x")
    rows, features = grad.shape
    grid = rows, triton.cdiv(features, ELEMENTS)
    strides = x.stride(0), grad.stride(0), grad_x.stride(0)
    _swiglu_backward_kernel[grid](x, grad, grad_x, features, *strides, BLOCK=ELEMENTS)


def _tanh(call: Call) -> bool:
    return call.context.model.activation == "gelu_tanh"


def _grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), ELEMENTS),)


@triton.jit
def _gelu_kernel(x, grad, out, elements, TANH: tl.constexpr, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if TANH:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        small = tl.exp(-2.0 * tl.abs(inner))  # at most 1, so it cannot overflow
        tanh = tl.where(inner < 0, small - 1.0, 1.0 - small) / (1.0 + small)
        share = 0.5 * (1.0 + tanh)
        slope = 0.5 * value * (1.0 - tanh * tanh) * 0.7978845608028654 * (1.0 + 0.134145 * value * value)
    else:
        share = 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))
        slope = value * 0.3989422804014327 * tl.exp(-0.5 * value * value)
    if BACKWARD:
        result = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * (share + slope)
    else:
        result = value * share
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_kernel(x, out, features, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < features
    gate = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + features + columns, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(x, grad, grad_x, features, x_stride, grad_stride, grad_x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < features
    gate = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + features + columns, mask=inside, other=0.0).to(tl.float32)
    incoming = tl.load(grad + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    slope = share * (1.0 + gate * (1.0 - share))
    at = grad_x + row * grad_x_stride + columns
    tl.store(at, (incoming * up * slope).to(grad_x.dtype.element_ty), mask=inside)
    tl.store(at + features, (incoming * gate * share).to(grad_x.dtype.element_ty), mask=inside)
