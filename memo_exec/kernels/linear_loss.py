"""The loss with the classifier's product inside, a tile of the vocabulary at a time (``layers/linear_loss.py``).

The kernels of ``--loss linear`` are torch's operators, those of ``--loss linear-triton`` are in
``triton_linear_loss.py``. Both share what is not over logits: the sum of losses, and the products that add a tile to
the gradients. ``stats`` has shape (3, tokens):

    after statistics    log-sum-exp of this rank's columns, the same again, and the target's logit (0 if elsewhere)
    after loss.reduce   largest of them, sum of exponentials relative to it, the target's logit (``loss_all_reduce``)
    after the sum       log-sum-exp of all columns, the token's weight in the gradient (0 if not counted), as before

The formulas and the meaning of the scale are those of ``loss.py``. Columns beyond the vocabulary get no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.kernels.call import Call
from memo_exec.kernels.divided_loss import own_columns, place_targets
from memo_exec.kernels.linear import add_products
from memo_exec.kernels.loss import IGNORED
from memo_exec.kernels.policy import policy_of
from memo_sim.program.ir.work import LinearLoss, TileGemm
from memo_sim.program.operators.workspaces import LOSS_ROWS, NORM_ROWS, loss_tiles

_ALL = slice(None)
"""The rows of a call: all at once."""


def statistics(call: Call) -> None:
    """Write the log-sum-exp (twice) and the target's logit of each token; ``logits`` holds one tile after another."""
    x, labels, logits, numbers = call.matrix("x"), call["labels"], call.matrix("logits"), call["out"].view(3, -1)
    rows, vocab = len(x), _work(call).n
    weight = weight_of(call, vocab)
    block_rows, wide = min(rows, LOSS_ROWS), logits.dtype != torch.float32
    scratch = call.scratch()
    targets, absent = scratch.take(block_rows, 1, dtype=torch.int64), scratch.take(block_rows, 1, dtype=torch.bool)
    chosen, higher = scratch.take(block_rows, 1), scratch.take(block_rows, 1)
    room = scratch.take(block_rows, logits.shape[1]) if wide else None
    largest, sums, picked = (numbers[n].unsqueeze(1) for n in range(3))
    largest.fill_(float("-inf"))
    sums.zero_()
    picked.zero_()
    for column, width in loss_tiles(vocab):
        first, columns = columns_of(call, vocab, column, width)
        if not columns:
            continue
        torch.mm(x, weight[column : column + width].t(), out=logits[:, :width])
        for start in range(0, rows, LOSS_ROWS):
            block = slice(start, min(rows, start + LOSS_ROWS))
            n = block.stop - start
            values = logits[block, :columns]
            if room is not None:
                values = room[:n, :columns].copy_(values)
            place_targets(labels[block], first, columns, targets[:n], absent[:n])
            torch.gather(values, 1, targets[:n], out=chosen[:n])
            picked[block].add_(chosen[:n].masked_fill_(absent[:n], 0.0))
            torch.amax(values, 1, keepdim=True, out=higher[:n])
            torch.maximum(higher[:n], largest[block], out=higher[:n])
            sums[block].mul_(largest[block].sub_(higher[:n]).exp_())
            largest[block].copy_(higher[:n])
            torch.sum(values.sub_(higher[:n]).exp_(), 1, keepdim=True, out=chosen[:n])
            sums[block].add_(chosen[:n])
    largest.add_(sums.log_())
    sums.copy_(largest)


def add_losses(call: Call) -> None:
    """``loss += scale * sum of losses``; ``stats`` gets the log-sum-exp of all columns and the token's weight."""
    numbers, labels, scale = call["stats"].view(3, -1), call["labels"].unsqueeze(1), call.context.scalars.loss_scale
    rows, scratch = len(labels), call.scratch()
    losses, ignored, total = scratch.take(rows, 1), scratch.take(rows, 1, dtype=torch.bool), scratch.take(1)
    policy = policy_of(call, scratch, rows)
    whole, weights, picked = (numbers[n].unsqueeze(1) for n in range(3))
    torch.eq(labels, IGNORED, out=ignored)
    if call.context.mesh.size("tp") > 1:
        whole.add_(weights.log_())
    torch.sub(whole, picked, out=losses)
    weights.fill_(scale)
    if policy is not None:
        losses, slopes = policy.weigh(_ALL, losses.neg_())
        weights.mul_(slopes)
    torch.sum(losses.masked_fill_(ignored, 0.0), 0, out=total)
    call["loss"].add_(total, alpha=scale)
    weights.masked_fill_(ignored, 0.0)


def gradient(call: Call) -> None:
    """``out = weight of the token * (exp(x @ weight.T - log-sum-exp) - onehot(labels))`` of one tile."""
    x, labels, out, numbers, work = call.matrix("x"), call["labels"], call.matrix("out"), call["stats"], _work(call)
    whole, weights = (numbers.view(3, -1)[n].unsqueeze(1) for n in range(2))
    first, columns = columns_of(call, vocab_of(call), work.column, work.n)
    clear_rest(out, columns)
    if not columns:
        return
    rows, block_rows = len(x), min(len(x), LOSS_ROWS)
    scratch = call.scratch()
    targets, absent = scratch.take(block_rows, 1, dtype=torch.int64), scratch.take(block_rows, 1, dtype=torch.bool)
    column = scratch.take(block_rows, 1)
    room = scratch.take(block_rows, out.shape[1]) if out.dtype != torch.float32 else None
    torch.mm(x, tile_of(call).t()[:, :columns], out=out[:, :columns])
    for start in range(0, rows, LOSS_ROWS):
        block = slice(start, min(rows, start + LOSS_ROWS))
        n = block.stop - start
        given = out[block, :columns]
        values = given if room is None else room[:n, :columns].copy_(given)
        place_targets(labels[block], first, columns, targets[:n], absent[:n])
        values.sub_(whole[block]).exp_().mul_(weights[block])
        values.scatter_add_(1, targets[:n], torch.neg(weights[block], out=column[:n]).masked_fill_(absent[:n], 0.0))
        if room is not None:
            given.copy_(values)


def dgrad(call: Call) -> None:
    """``out = grad @ weight`` of a tile, in the dtype of ``out``: the first tile's gradient of the input."""
    _add_dgrad(call, adds=False)


def dgrad_add(call: Call) -> None:
    """``out += grad @ weight`` of a further tile."""
    _add_dgrad(call, adds=True)


def wgrad(call: Call) -> None:
    """``out += grad.T @ x`` in the rows of a tile, summed in the dtype of ``out``."""
    x, work = call.matrix("x"), call.instruction.work
    assert isinstance(work, TileGemm)
    grad, rows = call.matrix("grad")[:, : work.m], call["out"].view(-1, x.shape[1])
    add_products(call, grad, x, [(_ALL, _ALL, rows[work.column : work.column + work.m])])


def _add_dgrad(call: Call, *, adds: bool) -> None:
    out, work = call.matrix("out"), call.instruction.work
    assert isinstance(work, TileGemm)
    grad = call.matrix("grad")[:, : work.k]
    weight = call["weight"].view(-1, out.shape[1])[work.column : work.column + work.k]
    beta = 1 if adds else 0
    if grad.dtype == out.dtype:
        torch.addmm(out, grad, weight, beta=beta, out=out)
    elif grad.is_cuda:
        torch.ops.aten.addmm.dtype_out(out, grad, weight, torch.float32, beta=beta, out=out)
    else:
        # A CPU's products return the dtype of their operands.
        scratch, rows = call.scratch(), min(len(grad), NORM_ROWS)
        wide, wide_weight = scratch.take(rows, work.k), scratch.take(work.k, out.shape[1]).copy_(weight)
        for first in range(0, len(grad), rows):
            into = out[first : first + rows]
            block = wide[: len(into)].copy_(grad[first : first + rows])
            torch.addmm(into, block, wide_weight, beta=beta, out=into)


def clear_rest(out: Tensor, columns: int) -> None:
    """Zero a tile's columns beyond the vocabulary, which products read.

    And those beyond the tile, where it is narrower than its buffer: torch's bf16 products on a CPU read a few columns
    more than their operand has, and zeros times NaN would be NaN.
    """
    out[:, columns:].zero_()


def columns_of(call: Call, vocab: int, column: int, width: int) -> tuple[int, int]:
    """Return the first token id of a tile, and how many of its ``width`` columns are tokens.

    ``vocab``: this rank's columns; ``column``: the tile's first.
    """
    first, tokens = own_columns(call, vocab)
    return first + column, max(0, min(width, tokens - column))


def vocab_of(call: Call) -> int:
    """Return the columns of this rank."""
    return call["weight"].numel() // _work(call).k


def weight_of(call: Call, vocab: int) -> Tensor:
    """Return the classifier's weight, (columns of this rank, features)."""
    return call["weight"].view(vocab, -1)


def tile_of(call: Call) -> Tensor:
    """Return the rows of the classifier's weight that belong to the call's tile."""
    work = _work(call)
    return weight_of(call, vocab_of(call))[work.column : work.column + work.n]


def _work(call: Call) -> LinearLoss:
    work = call.instruction.work
    assert isinstance(work, LinearLoss)
    return work
