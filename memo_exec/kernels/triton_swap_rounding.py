"""Rows rounded to FP8 for the host, and back, as Triton kernels with the results of ``swap_rounding.py``.

One Triton program plays one row. To round it, it reads the row for its largest value, and again, from the cache, for
its values: device memory is read once, and no fp32 copy of rows is needed. E4M3 is written and read as bits, with
integer arithmetic, because GPUs before Hopper and Ada have no such numbers. Values are rounded to the nearest, ties to
even. Row offsets have 64 bits. Tested in Triton's interpreter, and compiled for Hopper; no GPU has run these kernels.
"""

import torch
import triton
import triton.language as tl

from memo_exec.kernels.call import Call
from memo_exec.kernels.fp8_scales import LEAST_LARGEST
from memo_exec.kernels.swap_rounding import E4M3
from memo_sim.program.layout.swap_format import SCALE_BYTES

COLUMNS = 4096
"""Values of a row that a Triton program holds at once."""
LARGEST = torch.finfo(E4M3).max


def round_rows(call: Call) -> None:
    """``out = x`` in FP8, each row with its scale behind it."""
    x, packed = call.matrix("x"), call["out"]
    scales = packed[:, -SCALE_BYTES:].view(torch.float32)
    _round_kernel[(len(x),)](
        x,
        packed,
        scales,
        x.shape[1],
        x.stride(0),
        packed.stride(0),
        scales.stride(0),
        LEAST=LEAST_LARGEST,
        LARGEST=LARGEST,
        BLOCK=min(COLUMNS, triton.next_power_of_2(x.shape[1])),
        num_warps=4,
    )


def widen_rows(call: Call) -> None:
    """``out = x``, whose rows are in FP8 with their scales behind them."""
    packed, out = call["x"], call.matrix("out")
    scales = packed[:, -SCALE_BYTES:].view(torch.float32)
    block = min(COLUMNS, triton.next_power_of_2(out.shape[1]))
    _widen_kernel[(len(out), triton.cdiv(out.shape[1], block))](
        packed,
        scales,
        out,
        out.shape[1],
        packed.stride(0),
        scales.stride(0),
        out.stride(0),
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def _bits_of(value):
    """Return the bits of E4M3 of fp32 numbers of at most 448 (PyTorch, c10/util/Float8_e4m3fn.h); NaN beyond."""
    bits = value.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # Adding 2^14 to a number below 2^-6 leaves its multiple of 2^-9 in the last bits, rounded.
    small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    odd = (bits >> 20) & 1
    large = (bits - (120 << 23) + 0x7FFFF + odd) >> 20
    code = tl.where(bits < (121 << 23), small, large)
    return (tl.where(bits >= (1087 << 20), 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def _value_of(code):
    """Return the fp32 numbers of bits of E4M3."""
    bits = code.to(tl.uint32)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    normal = ((exponent + 120) << 23 | mantissa << 20).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    size = tl.where((bits & 0x7F) == 0x7F, float("nan"), size)
    return tl.where(bits >= 128, -size, size)


@triton.jit
def _round_kernel(
    x,
    packed,
    scales,
    features,
    x_stride,
    packed_stride,
    scale_stride,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, features, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        values = tl.load(x + row * x_stride + columns, mask=columns < features, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(values))
    scale = tl.div_rn(tl.maximum(tl.max(most, 0), LEAST), LARGEST)
    tl.store(scales + row * scale_stride, scale)
    for first in range(0, features, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < features
        values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(packed + row * packed_stride + columns, _bits_of(tl.div_rn(values, scale)), mask=inside)


@triton.jit
def _widen_kernel(packed, scales, out, features, packed_stride, scale_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < features
    scale = tl.load(scales + row * scale_stride)
    values = _value_of(tl.load(packed + row * packed_stride + columns, mask=inside, other=0)) * scale
    tl.store(out + row * out_stride + columns, values.to(out.dtype.element_ty), mask=inside)
