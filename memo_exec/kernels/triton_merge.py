"""Merging of partial attention results as a fused Triton kernel, in place and in one pass; no scratch.

It uses the formulas of ``merge.py``, in fp32. A program has one row of the part, which is the end of each sequence, and
merges all its heads. Row offsets have 64 bits.
"""

import triton
import triton.language as tl

from memo_exec.kernels.call import Call
from memo_exec.kernels.merge import sequences_of_a_part

ELEMENTS = 1024
"""Elements that a program merges at once, in as many whole heads as fit."""


def merge(call: Call) -> None:
    """Merge ``part, part_lse`` into ``out, lse``, in place."""
    part, part_lse, out, lse = (call.matrix(role) for role in ("part", "part_lse", "out", "lse"))
    batch, heads = sequences_of_a_part(call), part_lse.shape[1]
    size = part.shape[1] // heads
    block = triton.next_power_of_2(size)
    at_once = min(triton.next_power_of_2(heads), max(1, ELEMENTS // block))
    _merge_kernel[(len(part),)](
        part,
        part_lse,
        out,
        lse,
        len(part) // batch,
        len(out) // batch,
        heads,
        part.stride(0),
        part_lse.stride(0),
        out.stride(0),
        lse.stride(0),
        SIZE=size,
        HEADS=at_once,
        BLOCK=block,
        num_warps=min(8, max(1, at_once * block // 256)),
    )


@triton.jit
def _merge_kernel(
    part,
    part_lse,
    out,
    lse,
    part_rows,
    rows,
    heads,
    part_stride,
    part_lse_stride,
    out_stride,
    lse_stride,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    ours = tl.program_id(0).to(tl.int64)
    into = (ours // part_rows + 1) * rows - part_rows + ours % part_rows
    columns = tl.arange(0, BLOCK)[None, :]
    for group in range(0, heads, HEADS):
        numbers = group + tl.arange(0, HEADS)
        old = tl.load(lse + into * lse_stride + numbers, mask=numbers < heads, other=0.0)
        added = tl.load(part_lse + ours * part_lse_stride + numbers, mask=numbers < heads, other=0.0)
        largest = tl.maximum(old, added)
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        new = shift + tl.log(tl.exp(old - shift) + tl.exp(added - shift))
        weight = tl.exp(added - new)[:, None]
        at = numbers[:, None] * SIZE + columns
        there = (numbers < heads)[:, None] & (columns < SIZE)
        one = tl.load(out + into * out_stride + at, mask=there, other=0.0).to(tl.float32)
        two = tl.load(part + ours * part_stride + at, mask=there, other=0.0).to(tl.float32)
        change = two - one  # as torch.lerp: exact at both ends
        merged = tl.where(weight < 0.5, one + change * weight, two - change * (1.0 - weight))
        tl.store(out + into * out_stride + at, merged.to(out.dtype.element_ty), mask=there)
        tl.debug_barrier()  # several threads may have read a log-sum-exp that one of them now writes
        tl.store(lse + into * lse_stride + numbers, new, mask=numbers < heads)
