"""Rotary position embedding of Q and K as a fused Triton kernel, in place, in one pass over the packed Q, K, V.

A program has one row: it computes the row's cosines and sines once, and rotates all heads of Q and K with them. Only Q
and K go over memory; there are no tables. The formulas are those of ``rotary.py``: an angle is a position times a
frequency in fp32, and cosines and sines are rounded to the dtype. There is one launch for each run of rows whose
positions follow each other. Row offsets have 64 bits.

Plans declare a workspace for tables all the same (``rotary_workspace_bytes``).
"""

import triton
import triton.language as tl

from memo_exec.kernels.call import Call
from memo_exec.kernels.rotary import frequencies

HEADS = 8
"""Heads that a program rotates at once. With a thread for each pair of a head, it loads 16 bytes at a time."""


def rotary(call: Call) -> None:
    """Rotate Q and K by their positions."""
    _rotate(call, "qkv", 1.0)


def rotary_backward(call: Call) -> None:
    """Rotate the gradients of Q and K by the negative angles."""
    _rotate(call, "grad", -1.0)


def _rotate(call: Call, role: str, sign: float) -> None:
    packed, heads = call[role], call.context.heads + call.context.kv_heads
    by_pair, factor = frequencies(call)
    half = call.context.model.head_dim // 2
    block = triton.next_power_of_2(half)
    for run, position in call.positions(call.row(role), len(packed)):
        _rotate_kernel[(run.stop - run.start,)](
            packed[run],
            by_pair,
            position,
            packed.stride(0),
            heads,
            factor,
            sign,
            HALF=half,
            HEADS=min(HEADS, triton.next_power_of_2(heads)),
            BLOCK=block,
            num_warps=max(1, block // 32),
        )


@triton.jit(do_not_specialize=["position"])
def _rotate_kernel(
    packed,
    frequencies,
    position,
    stride,
    heads,
    factor,
    sign,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < HALF
    angles = (position + row).to(tl.float32) * tl.load(frequencies + columns, mask=inside, other=0.0)
    kind = packed.dtype.element_ty
    cos = (tl.cos(angles) * factor).to(kind).to(tl.float32)[None, :]
    sin = (tl.sin(angles) * factor).to(kind).to(tl.float32)[None, :] * sign
    first = packed + row.to(tl.int64) * stride
    for group in range(0, heads, HEADS):
        numbers = group + tl.arange(0, HEADS)
        at = first + numbers[:, None] * 2 * HALF + columns[None, :]
        there = (numbers < heads)[:, None] & inside[None, :]
        one = tl.load(at, mask=there, other=0.0).to(tl.float32)
        two = tl.load(at + HALF, mask=there, other=0.0).to(tl.float32)
        tl.store(at, (one * cos - two * sin).to(kind), mask=there)
        tl.store(at + HALF, (two * cos + one * sin).to(kind), mask=there)
