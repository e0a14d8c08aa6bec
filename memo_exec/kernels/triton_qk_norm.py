"""RMSNorm over each head of Q and K as fused Triton kernels, in place in the packed Q, K, V: one pass each way.

They use the formulas of ``qk_norm.py``. A forward program has one row. Backward runs in ``norm_programs(rows)`` Triton
programs, as the norms in ``triton_norm.py``: program i has rows i, i + programs, and so on, and sums its part of both
weights' gradients in fp32 into its own rows of the workspace, which are then added in a fixed order. Row offsets have
64 bits.
"""

import torch
import triton
import triton.language as tl

from memo_exec.kernels.call import Call
from memo_sim.program.operators.workspaces import norm_programs

ELEMENTS, BACKWARD_ELEMENTS = 1024, 4096
"""Elements that a program computes with at once, in as many whole heads as fit."""


def qk_norm(call: Call) -> None:
    """``raw = q, k``; ``q = q * rstd * q_weight``, ``k`` likewise."""
    raw, packed = call.matrix("raw"), call["qkv"]
    rows, width = raw.shape
    size, q_heads = _sizes(call, width)
    block, at_once, warps = _tile(width // size, size, ELEMENTS)
    _forward_kernel[(rows,)](
        packed,
        raw,
        call["q_weight"],
        call["k_weight"],
        packed.stride(0),
        raw.stride(0),
        width // size,
        q_heads,
        call.context.model.norm_eps,
        SIZE=size,
        HEADS=at_once,
        BLOCK=block,
        num_warps=warps,
    )


def qk_norm_backward(call: Call) -> None:
    """Replace the gradients of the normalised Q and K by those of the raw ones; add the weights' gradients."""
    raw, grad = call.matrix("raw"), call["grad"]
    rows, width = raw.shape
    size, q_heads = _sizes(call, width)
    block, at_once, warps = _tile(width // size, size, BACKWARD_ELEMENTS)
    scratch, programs = call.scratch(), norm_programs(rows)
    parts, total = scratch.take(2, programs, size), scratch.take(size)
    _backward_kernel[(programs,)](
        grad,
        raw,
        call["q_weight"],
        call["k_weight"],
        parts,
        grad.stride(0),
        raw.stride(0),
        rows,
        programs,
        width // size,
        q_heads,
        call.context.model.norm_eps,
        SIZE=size,
        HEADS=at_once,
        BLOCK=block,
        num_warps=warps,
    )
    for part, name in zip(parts, ("grad_q_weight", "grad_k_weight"), strict=True):
        if (summed := call.get(name)) is not None:
            summed.add_(torch.sum(part, 0, out=total))


def _sizes(call: Call, width: int) -> tuple[int, int]:
    """Return the features of a head, and how many of the heads in ``width`` features are those of Q."""
    context, size = call.context, call.context.model.head_dim
    return size, context.heads * (width // size) // (context.heads + context.kv_heads)


def _tile(heads: int, size: int, elements: int) -> tuple[int, int, int]:
    """Return the width of a tile, its number of heads, and the warps that compute with it."""
    block = triton.next_power_of_2(size)
    at_once = min(triton.next_power_of_2(heads), max(1, elements // block))
    return block, at_once, min(8, max(1, at_once * block // 256))


@triton.jit
def _forward_kernel(
    packed,
    raw,
    q_weight,
    k_weight,
    stride,
    raw_stride,
    heads,
    q_heads,
    eps,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    kind = packed.dtype.element_ty
    q_factor = tl.load(q_weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    k_factor = tl.load(k_weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    for group in range(0, heads, HEADS):
        numbers = group + tl.arange(0, HEADS)[:, None]
        at = numbers * SIZE + columns[None, :]
        there = (numbers < heads) & inside[None, :]
        x = tl.load(packed + row * stride + at, mask=there, other=0.0)
        tl.store(raw + row * raw_stride + at, x, mask=there)
        wide = x.to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, 1, keep_dims=True) / SIZE + eps)
        hat = (wide * rstd).to(kind).to(tl.float32)  # rounded before it is multiplied by the weight, as in norms
        result = hat * tl.where(numbers < q_heads, q_factor, k_factor)
        tl.store(packed + row * stride + at, result.to(kind), mask=there)


@triton.jit
def _backward_kernel(
    grad,
    raw,
    q_weight,
    k_weight,
    parts,
    stride,
    raw_stride,
    rows,
    programs,
    heads,
    q_heads,
    eps,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    q_factor = tl.load(q_weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    k_factor = tl.load(k_weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    q_part = tl.zeros((HEADS, BLOCK), dtype=tl.float32)
    k_part = tl.zeros((HEADS, BLOCK), dtype=tl.float32)
    for i in range(program, rows, programs):
        row = tl.cast(i, tl.int64)
        for group in range(0, heads, HEADS):
            numbers = group + tl.arange(0, HEADS)[:, None]
            at = numbers * SIZE + columns[None, :]
            there = (numbers < heads) & inside[None, :]
            incoming = tl.load(grad + row * stride + at, mask=there, other=0.0).to(tl.float32)
            x = tl.load(raw + row * raw_stride + at, mask=there, other=0.0).to(tl.float32)
            rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1, keep_dims=True) / SIZE + eps)
            hat = x * rstd
            product = incoming * hat
            q_part += tl.where(numbers < q_heads, product, 0.0)
            k_part += tl.where(numbers < q_heads, 0.0, product)
            factor = tl.where(numbers < q_heads, q_factor, k_factor)
            mean = tl.sum(product * factor, 1, keep_dims=True) / SIZE
            result = (incoming * factor - hat * mean) * rstd
            tl.store(grad + row * stride + at, result.to(grad.dtype.element_ty), mask=there)
    first = tl.cast(program, tl.int64) * SIZE
    tl.store(parts + first + columns, tl.sum(q_part, 0), mask=inside)
    second = (tl.cast(programs, tl.int64) + program) * SIZE
    tl.store(parts + second + columns, tl.sum(k_part, 0), mask=inside)
