"""Rotary position embedding of Q and K as a fused Triton kernel, in place, one launch per row block.

It uses the formulas and the tables of ``rotary.py``, so cosines and sines are identical. Each pair is read and written
once and computed in fp32, so no copy of its first half is needed. Row offsets have 64 bits.
"""

import triton
import triton.language as tl

from memo_exec.kernels.call import Call
from memo_exec.kernels.rotary import Tables
from memo_sim.program.operators.workspaces import NORM_ROWS


def rotary(call: Call) -> None:
    """Rotate Q and K by their positions."""
    _rotate(call, "qkv", 1.0)


def rotary_backward(call: Call) -> None:
    """Rotate the gradients of Q and K by the negative angles."""
    _rotate(call, "grad", -1.0)


def _rotate(call: Call, role: str, sign: float) -> None:
    packed, model = call[role], call.context.model
    half, heads = model.head_dim // 2, call.context.heads + call.context.kv_heads
    tables = Tables(call, packed, call.row(role))
    for first in range(0, len(packed), NORM_ROWS):
        block = packed[first : first + NORM_ROWS]
        cosines, sines = tables.of(first, len(block))
        _rotate_kernel[(len(block), heads)](
            block, cosines, sines, block.stride(0), half, sign, BLOCK=triton.next_power_of_2(half), num_warps=1
        )


@triton.jit
def _rotate_kernel(packed, cosines, sines, stride, half, sign, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < half
    cos = tl.load(cosines + row * half + columns, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sines + row * half + columns, mask=inside, other=0.0).to(tl.float32) * sign
    at = packed + row * stride + tl.program_id(1) * 2 * half + columns
    one = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (one * cos - two * sin).to(packed.dtype.element_ty), mask=inside)
    tl.store(at + half, (two * cos + one * sin).to(packed.dtype.element_ty), mask=inside)
