"""Cross entropy and its gradient as one fused Triton kernel, with the formulas of ``loss.py``.

One Triton program processes one row and reads its logits twice. The first pass computes the largest logit and the sum
of exponentials, the second the gradient. No fp32 copy of the logits is needed. Row offsets have 64 bits; sums are fp32.
"""

import torch
import triton
import triton.language as tl

from memo_exec.kernels.call import Call
from memo_exec.kernels.loss import IGNORED, gradient_of

COLUMNS = 4096
"""Logits that a Triton program holds at once."""


def cross_entropy(call: Call) -> None:
    """``grad = scale * (softmax(logits) - onehot(labels))`` and ``loss += scale * sum of losses``.

    Without a buffer ``grad``, the gradient replaces the logits: a block is read before it is written, and once more.
    """
    logits, grad, labels = call.matrix("logits"), gradient_of(call), call["labels"]
    rows, vocab = logits.shape
    scratch, scale = call.scratch(), call.context.scalars.loss_scale
    losses, total = scratch.take(rows), scratch.take(1)
    _cross_entropy_kernel[(rows,)](
        logits,
        labels,
        grad,
        losses,
        vocab,
        logits.stride(0),
        grad.stride(0),
        scale,
        IGNORED=IGNORED,
        BLOCK=min(COLUMNS, triton.next_power_of_2(vocab)),
        num_warps=8,
    )
    torch.sum(losses, 0, keepdim=True, out=total)
    call["loss"].add_(total, alpha=scale)


@triton.jit
def _cross_entropy_kernel(
    logits,
    labels,
    grad,
    losses,
    vocab,
    logits_stride,
    grad_stride,
    scale,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    counted = label != IGNORED
    largest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocab
        values = tl.load(logits + row * logits_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, values)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(largest - shift) + tl.exp(values - shift)
        largest = higher
    most = tl.max(largest, 0)
    whole = tl.sum(sums * tl.exp(largest - most), 0)
    chosen = tl.load(logits + row * logits_stride + tl.where(counted, label, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(counted, tl.log(whole) + most - chosen, 0.0))
    factor = tl.where(counted, scale / whole, 0.0)
    once = tl.where(counted, scale, 0.0)
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocab
        values = tl.load(logits + row * logits_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
        result = tl.exp(values - most) * factor - tl.where(columns == label, once, 0.0)
        tl.store(grad + row * grad_stride + columns, result.to(grad.dtype.element_ty), mask=inside)
