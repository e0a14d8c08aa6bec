"""Ring self-attention (RSA): matrix products over materialised scores, and the softmax.

The algorithm is in ``memo_sim/program/attention/rsa.py``. Scores are stored in one block per rank's keys, each of
(sequence, head, query, key). Rows received through the ring keep the sending rank's row order. A rank reads its own
keys and values from its packed Q, K, V. For grouped-query attention there is one product per query of a group, over all
key/value heads at once. The softmax is in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memo_exec.kernels.call import Call, Context
from memo_sim.program.layout.rank_order import stride
from memo_sim.program.layout.token_order import token_runs
from memo_sim.program.operators.workspaces import score_rows


def pack(call: Call) -> None:
    """Copy the keys, or the values, out of the packed Q, K, V."""
    which = "keys" if call.get("values") is None else "values"
    call[which].copy_(_columns(call, call["qkv"])[which])


def return_gradients(call: Call) -> None:
    """Store gradients of this rank's values or keys in the packed ``grad_qkv``.

    With ``values``, it writes their gradients and sets those of queries and keys to zero. With ``keys``, it adds.
    """
    columns, part = _columns(call, call["grad_qkv"]), call.get("values")
    if part is None:
        columns["keys"].add_(call["keys"])
        return
    columns["values"].copy_(part)
    for other in ("queries", "keys"):
        columns[other].zero_()


def scores(call: Call) -> None:
    """``out = Q K^T`` with one rank's keys."""
    _by_key(call, _columns(call, call["qkv"])["queries"], "keys")


def d_probabilities(call: Call) -> None:
    """``out = grad V^T`` with one rank's values."""
    _by_key(call, call["grad"], "values")


def values(call: Call) -> None:
    """``out = probs V`` for this rank's own values, which come first; ``out += probs V`` for other ranks' values."""
    _by_query(call, call["probs"], call["out"], "values", fresh=call.get("values") is None)


def d_queries(call: Call) -> None:
    """Add one rank's keys' contribution to the gradients of the queries, in the packed gradient."""
    _by_query(call, call["grad"], _columns(call, call["out"])["queries"], "keys", fresh=False)


def d_values(call: Call) -> None:
    """``out = probs^T grad``: this rank's queries' contribution to the gradients of all ranks' values."""
    _over_queries(call, call["probs"], call["grad"])


def d_keys(call: Call) -> None:
    """``out = grad^T Q``: this rank's queries' contribution to the gradients of all ranks' keys."""
    _over_queries(call, call["grad"], _columns(call, call["qkv"])["queries"])


def softmax(call: Call) -> None:
    """Replace scores ``x`` by softmax(x / sqrt(head_dim)) over all blocks of a row; mask later keys if causal."""
    x, scratch = _by_rank(call, call["x"]), call.scratch()
    ranks, _, _, tokens, keys = x.shape
    rows = score_rows(tokens, ranks * keys)
    total = scratch.take(rows)
    wide = None if x.dtype == torch.float32 else scratch.take(rows * ranks * keys)
    at = later = None
    if not call.context.model.bidirectional:
        queries, places = scratch.take(rows, dtype=torch.int64), scratch.take(ranks * keys, dtype=torch.int64)
        later = scratch.take(rows * ranks * keys, dtype=torch.bool)
        at = _Positions(call.context, places.view(ranks, 1, keys), queries)
    for first, taken in _row_blocks(x, rows):
        block = taken if wide is None else wide[: taken.numel()].view(taken.shape).copy_(taken)
        block.mul_(call.context.model.head_dim**-0.5)
        if at is not None and later is not None:
            hidden = later[: taken.numel()].view(taken.shape)
            block.masked_fill_(torch.gt(at.keys, at.queries(first, taken.shape[1]), out=hidden), -torch.inf)
        number = total[: taken.shape[1]].view(1, -1, 1)
        block.sub_(torch.amax(block, (0, 2), keepdim=True, out=number)).exp_()
        block.div_(torch.sum(block, (0, 2), keepdim=True, out=number))
        if wide is not None:
            taken.copy_(block)


def softmax_backward(call: Call) -> None:
    """Replace ``grad`` of the probabilities by the gradient of the unscaled scores, in place."""
    probs, grad = _by_rank(call, call["probs"]), _by_rank(call, call["grad"])
    ranks, _, _, tokens, keys = probs.shape
    scratch, rows = call.scratch(), score_rows(tokens, ranks * keys)
    total, product = scratch.take(rows), scratch.take(rows * ranks * keys)
    wide = None if grad.dtype == torch.float32 else scratch.take(rows * ranks * keys)
    for (_, weight), (_, taken) in zip(_row_blocks(probs, rows), _row_blocks(grad, rows), strict=True):
        block = taken if wide is None else wide[: taken.numel()].view(taken.shape).copy_(taken)
        weighted = torch.mul(block, weight, out=product[: taken.numel()].view(taken.shape))
        number = torch.sum(weighted, (0, 2), keepdim=True, out=total[: taken.shape[1]].view(1, -1, 1))
        block.sub_(number).mul_(weight).mul_(call.context.model.head_dim**-0.5)
        if wide is not None:
            taken.copy_(block)


class _Positions:
    """Sequence position of each key and each query; ranks hold zigzag chunks (``token_order.py``)."""

    def __init__(self, context: Context, keys: Tensor, queries: Tensor) -> None:
        self.context, self.keys, self._queries = context, keys, queries
        spacing = stride("cp", context.decisions.layout)
        for rank, places in enumerate(keys.unbind(0)):
            for run in token_runs(context.decisions, rank * spacing):
                if run.row < places.shape[1]:
                    torch.arange(run.token, run.token + run.tokens, out=places[0, run.row : run.row + run.tokens])

    def queries(self, first: int, rows: int) -> Tensor:
        """Return the positions of a sequence's rows from ``first`` on, shape (1, rows, 1)."""
        for chosen, token in self.context.positions(first, rows):
            torch.arange(token, token + chosen.stop - chosen.start, out=self._queries[chosen])
        return self._queries[:rows].view(1, -1, 1)


def _columns(call: Call, qkv: Tensor) -> dict[str, Tensor]:
    """Return the queries, keys and values columns of packed rows, as views."""
    context = call.context
    q, kv = (heads * context.model.head_dim for heads in (context.heads, context.kv_heads))
    return dict(zip(("queries", "keys", "values"), torch.split(qkv, [q, kv, kv], dim=1), strict=True))


def _by_head(call: Call, rows: Tensor) -> Tensor:
    """View rows as (sequence, head, token, feature)."""
    batch, size = call.context.decisions.micro_batch, call.context.model.head_dim
    return torch.unflatten(torch.unflatten(rows, 1, (-1, size)), 0, (batch, -1)).transpose(1, 2)


def _by_rank(call: Call, written: Tensor) -> Tensor:
    """View scores as (rank of the keys, sequence, head, query, key)."""
    decisions = call.context.decisions
    batch, tokens = decisions.micro_batch, decisions.local_tokens // decisions.micro_batch
    return written.view(-1, batch, call.context.heads, tokens, tokens)


def _row_blocks(written: Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (first query, scores as (rank, query, key)) for ``rows`` queries of one sequence and head at a time."""
    for sequence in range(written.shape[1]):
        for head in range(written.shape[2]):
            for first in range(0, written.shape[3], rows):
                yield first, written[:, sequence, head, first : first + rows]


def _other_side(call: Call, which: str) -> Tensor:
    """Return one rank's keys (or values) by head: received ones if the call has them, else this rank's own."""
    arrived = call.get(which)
    return _by_head(call, _columns(call, call["qkv"])[which] if arrived is None else arrived)


def _by_key(call: Call, rows: Tensor, which: str) -> None:
    """Multiply rows by one rank's keys (or values); the result is a block of scores."""
    rows, others = _by_head(call, rows), _other_side(call, which)
    (out,) = _by_rank(call, call["out"])
    for sequence in range(len(rows)):
        for written, queries in _grouped(others, out[sequence], rows[sequence]):
            torch.bmm(queries, others[sequence].transpose(1, 2), out=written)


def _by_query(call: Call, written: Tensor, out: Tensor, which: str, *, fresh: bool) -> None:
    """Add a block of scores times one rank's keys (or values) to ``out``; ``fresh`` overwrites instead."""
    out, others = _by_head(call, out), _other_side(call, which)
    (block,) = _by_rank(call, written)
    for sequence in range(len(out)):
        for weights, rows in _grouped(others, block[sequence], out[sequence]):
            rows.baddbmm_(weights, others[sequence], beta=0 if fresh else 1)


def _over_queries(call: Call, written: Tensor, rows: Tensor) -> None:
    """For every rank's keys, sum the products of scores and their queries' rows, and write them to ``out``."""
    rows, blocks = _by_head(call, rows), _by_rank(call, written)
    for block, out in zip(blocks, call["out"].chunk(len(blocks)), strict=True):
        sums = _by_head(call, out)
        for sequence in range(len(sums)):
            for number, (weights, queries) in enumerate(_grouped(sums, block[sequence], rows[sequence])):
                sums[sequence].baddbmm_(weights.transpose(1, 2), queries, beta=1 if number else 0)


def _grouped(keys: Tensor, *by_head: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield slices of the ``by_head`` tensors with one query head per group, so with as many heads as ``keys``."""
    groups = by_head[0].shape[0] // keys.shape[1]
    for number in range(groups):
        yield tuple(tensor[number::groups] for tensor in by_head)
