"""LayerNorm and RMSNorm as fused Triton kernels, one each for forward and backward.

They use the formulas of ``norm.py`` and read each row once. Backward runs in ``norm_programs(rows)`` Triton programs;
program i takes rows i, i + programs, and so on. Each program sums its part of the weight's gradient in fp32 into its
own row of the workspace. These rows are then added in a fixed order. Row offsets have 64 bits.
"""

import torch
import triton
import triton.language as tl

from memo_exec.kernels.call import Call
from memo_sim.program.operators.workspaces import norm_programs


def layer_norm(call: Call) -> None:
    """``out = (x - mean) * rstd * weight + bias``, ``stats = (mean, rstd)``."""
    _forward(call, centred=True)


def rms_norm(call: Call) -> None:
    """``out = x * rstd * weight``, ``stats = rstd``."""
    _forward(call, centred=False)


def layer_norm_backward(call: Call) -> None:
    """Compute the gradients of LayerNorm; add the residual branch's gradient to the input's gradient."""
    _backward(call, centred=True)


def rms_norm_backward(call: Call) -> None:
    """Compute the gradients of RMSNorm; add the residual branch's gradient to the input's gradient."""
    _backward(call, centred=False)


def warps(elements: int) -> int:
    """Return how many warps process a row of ``elements`` elements."""
    return min(16, max(1, elements // 512))


def _forward(call: Call, *, centred: bool) -> None:
    x, out, stats, bias = call.matrix("x"), call.matrix("out"), call["stats"], call.get("bias")
    rows, features = x.shape
    block = triton.next_power_of_2(features)
    _forward_kernel[(rows,)](
        x,
        call["weight"],
        call["weight"] if bias is None else bias,
        out,
        stats,
        features,
        x.stride(0),
        out.stride(0),
        call.context.model.norm_eps,
        CENTRED=centred,
        BIASED=bias is not None,
        BLOCK=block,
        num_warps=warps(block),
    )


def _backward(call: Call, *, centred: bool) -> None:
    grad, x, out = call.matrix("grad"), call.matrix("x"), call.matrix("out")
    residual, grad_bias = call.get("residual_grad"), call.get("grad_bias")
    rows, features = x.shape
    scratch, programs, block = call.scratch(), norm_programs(rows), triton.next_power_of_2(features)
    parts, total = scratch.take(2, programs, features), scratch.take(features)
    _backward_kernel[(programs,)](
        grad,
        x,
        call["weight"],
        call["stats"],
        out if residual is None else residual,
        out,
        parts,
        rows,
        programs,
        features,
        grad.stride(0),
        x.stride(0),
        out.stride(0) if residual is None else residual.stride(0),
        out.stride(0),
        CENTRED=centred,
        RESIDUAL=residual is not None,
        BIASED=grad_bias is not None,
        BLOCK=block,
        num_warps=warps(block),
    )
    if (grad_weight := call.get("grad_weight")) is not None:
        grad_weight.add_(torch.sum(parts[0], 0, out=total))
    if grad_bias is not None:
        grad_bias.add_(torch.sum(parts[1], 0, out=total))


@triton.jit
def _forward_kernel(
    x,
    weight,
    bias,
    out,
    stats,
    features,
    x_stride,
    out_stride,
    eps,
    CENTRED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < features
    source = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        mean = tl.sum(source, 0) / features
        source = tl.where(inside, source - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(source * source, 0) / features + eps)
    if CENTRED:
        tl.store(stats + 2 * row, mean)
        tl.store(stats + 2 * row + 1, rstd)
    else:
        tl.store(stats + row, rstd)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    hat = source * rstd
    if not CENTRED:  # Hugging Face rounds to the dtype before it multiplies by the weight
        hat = hat.to(out.dtype.element_ty).to(tl.float32)
    result = hat * factor
    if BIASED:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    grad,
    x,
    weight,
    stats,
    residual,
    out,
    parts,
    rows,
    programs,
    features,
    grad_stride,
    x_stride,
    residual_stride,
    out_stride,
    CENTRED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < features
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    weight_part = tl.zeros((BLOCK,), dtype=tl.float32)
    bias_part = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(program, rows, programs):
        row = tl.cast(i, tl.int64)
        incoming = tl.load(grad + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
        hat = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            hat -= tl.load(stats + 2 * row)
            rstd = tl.load(stats + 2 * row + 1)
        else:
            rstd = tl.load(stats + row)
        hat = tl.where(inside, hat * rstd, 0.0)
        weight_part += incoming * hat
        if BIASED:
            bias_part += incoming
        upstream = incoming * factor
        result = upstream - hat * (tl.sum(upstream * hat, 0) / features)
        if CENTRED:
            result -= tl.sum(upstream, 0) / features
        result *= rstd
        if RESIDUAL:
            result += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)
    first = tl.cast(program, tl.int64) * features
    tl.store(parts + first + columns, weight_part, mask=inside)
    if BIASED:
        second = (tl.cast(programs, tl.int64) + program) * features
        tl.store(parts + second + columns, bias_part, mask=inside)
