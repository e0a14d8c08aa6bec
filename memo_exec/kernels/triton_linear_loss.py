"""The loss with the classifier's product inside as Triton kernels, with the formulas of ``linear_loss.py``.

A Triton program multiplies a block of tokens with a block of columns of the classifier, in fp32 sums in registers.

- statistics: a program goes over ``LOSS_SPLIT_COLUMNS`` columns and leaves the largest logit of each token, the sum of
  exponentials relative to it, and the target's logit. torch combines the splits in their order. No logit is written.
- gradient: a program computes its logits again and writes their gradient alone.

Nothing is added atomically, so results do not change from run to run. Products of fp32 operands do not use TF32.
Offsets have 64 bits. Tested in Triton's interpreter, and compiled for Hopper; no GPU has run these kernels yet.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memo_exec.kernels.call import Call
from memo_exec.kernels.linear_loss import clear_rest, columns_of, tile_of, vocab_of, weight_of
from memo_sim.program.operators.workspaces import LOSS_SPLIT_COLUMNS, loss_splits

ROWS, COLUMNS, FEATURES = 128, 128, 64
"""Tokens, columns and features of a block. Two fp32 operands of a stage need 64 KiB of shared memory, bf16 ones 32."""
WARPS = 8


def statistics(call: Call) -> None:
    """Write the log-sum-exp (twice) and the target's logit of each token, from this rank's columns."""
    x, labels, numbers = call.matrix("x"), call["labels"], call["out"].view(3, -1)
    vocab = vocab_of(call)
    rows, splits, weight = len(x), loss_splits(vocab), weight_of(call, vocab)
    first, columns = columns_of(call, vocab, 0, vocab)
    if not columns:
        numbers[:2].fill_(float("-inf"))
        numbers[2].zero_()
        return
    scratch = call.scratch()
    largest, sums, picked = (scratch.take(splits, rows) for _ in range(3))
    _statistics_kernel[(triton.cdiv(rows, ROWS), splits)](
        x,
        weight,
        labels,
        largest,
        sums,
        picked,
        rows,
        columns,
        first,
        x.shape[1],
        x.stride(0),
        SPLIT=LOSS_SPLIT_COLUMNS,
        **_launch(x),
    )
    torch.amax(largest, 0, out=numbers[0])
    sums.mul_(largest.sub_(numbers[0]).exp_())
    torch.sum(sums, 0, out=numbers[1])
    torch.sum(picked, 0, out=numbers[2])
    numbers[0].add_(numbers[1].log_())
    numbers[1].copy_(numbers[0])


def gradient(call: Call) -> None:
    """``out = weight of the token * (exp(x @ weight.T - log-sum-exp) - onehot(labels))`` of one tile."""
    x, labels, out, numbers = call.matrix("x"), call["labels"], call.matrix("out"), call["stats"].view(3, -1)
    weight = tile_of(call)
    work = call.instruction.work
    first, columns = columns_of(call, vocab_of(call), work.column, work.n)  # type: ignore[union-attr]
    clear_rest(out, columns)
    if not columns:
        return
    _gradient_kernel[(triton.cdiv(len(x), ROWS), triton.cdiv(columns, COLUMNS))](
        x,
        weight,
        labels,
        numbers[0],
        numbers[1],
        out,
        len(x),
        columns,
        first,
        x.shape[1],
        x.stride(0),
        out.stride(0),
        **_launch(x),
    )


def _launch(x: Tensor) -> dict[str, int]:
    """Return the sizes of blocks and the launch options; fp32 operands are twice as large, so fewer are in flight.

    Triton's interpreter multiplies the bits of bf16 numbers, so there operands are widened to fp32 first.
    """
    narrow = x.dtype != torch.float32
    return {
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "FEATURES": FEATURES,
        "WIDEN": narrow and bool(triton.knobs.runtime.interpret),
        "num_warps": WARPS,
        "num_stages": 3 if narrow else 2,
    }


@triton.jit
def _logits(
    x,
    weight,
    row,
    column,
    rows,
    columns,
    features,
    x_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Return the logits (ROWS, COLUMNS) in fp32 of rows ``row`` and columns ``column``; zero beyond the ends."""
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    each = tl.arange(0, FEATURES)
    of_x = x + row.to(tl.int64)[:, None] * x_stride
    of_weight = weight + column.to(tl.int64)[None, :] * features
    for start in range(0, features, FEATURES):
        feature = start + each
        left = tl.load(of_x + feature[None, :], mask=(row < rows)[:, None] & (feature < features)[None, :], other=0.0)
        right = tl.load(
            of_weight + feature[:, None], mask=(column < columns)[None, :] & (feature < features)[:, None], other=0.0
        )
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def _statistics_kernel(
    x,
    weight,
    labels,
    largest,
    sums,
    picked,
    rows,
    columns,
    first,
    features,
    x_stride,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    target = tl.load(labels + row, mask=row < rows, other=-1) - first
    most = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    whole = tl.zeros((ROWS,), dtype=tl.float32)
    chosen = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, columns), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        logits = _logits(x, weight, row, column, rows, columns, features, x_stride, ROWS, COLUMNS, FEATURES, WIDEN)
        chosen += tl.sum(tl.where(column[None, :] == target[:, None], logits, 0.0), 1)
        logits = tl.where((column < columns)[None, :], logits, float("-inf"))
        higher = tl.maximum(most, tl.max(logits, 1))
        whole = whole * tl.exp(most - higher) + tl.sum(tl.exp(logits - higher[:, None]), 1)
        most = higher
    at = split.to(tl.int64) * rows + row
    tl.store(largest + at, most, mask=row < rows)
    tl.store(sums + at, whole, mask=row < rows)
    tl.store(picked + at, chosen, mask=row < rows)


@triton.jit
def _gradient_kernel(
    x,
    weight,
    labels,
    wholes,
    weights,
    out,
    rows,
    columns,
    first,
    features,
    x_stride,
    out_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    target = tl.load(labels + row, mask=row < rows, other=-1) - first
    whole = tl.load(wholes + row, mask=row < rows, other=0.0)
    scale = tl.load(weights + row, mask=row < rows, other=0.0)
    logits = _logits(x, weight, row, column, rows, columns, features, x_stride, ROWS, COLUMNS, FEATURES, WIDEN)
    once = tl.where(column[None, :] == target[:, None], 1.0, 0.0)
    result = (tl.exp(logits - whole[:, None]) - once) * scale[:, None]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=inside)
