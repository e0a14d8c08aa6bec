"""Embedding lookup of tokens and learned positions, and its backward: adding gradient rows to the tables."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memo_exec.kernels.call import Call, Scratch
from memo_sim.program.operators.workspaces import NORM_ROWS


def embed(call: Call) -> None:
    """``out = weight[ids] (+ positions)``; times a factor, in models with scaled embeddings."""
    out, positions = call.matrix("out"), call.get("positions")
    torch.index_select(call["weight"].view(-1, out.shape[1]), 0, call["ids"], out=out)
    _scale(out, call)
    if positions is not None:
        table = positions.view(-1, out.shape[1])
        for rows, place in _sequences(call, 0, len(out)):
            out[rows].add_(table[place])


def divided_embed(call: Call) -> None:
    """``out = weight[ids]`` for tokens in this rank's vocabulary shard, else 0; the sum over tp ranks is the result."""
    out, ids = call.matrix("out"), call["ids"]
    table = call["weight"].view(-1, out.shape[1])
    count = min(len(out), NORM_ROWS)
    divided = _DividedIds(call, call.scratch(), count, len(table))
    for first in range(0, len(out), count):
        rows = out[first : first + count]
        own, absent = divided.of(ids[first : first + count])
        torch.index_select(table, 0, own, out=rows)
        rows.masked_fill_(absent.unsqueeze(1), 0.0)
    _scale(out, call)


def positions_add(call: Call) -> None:
    """``target = source + positions``, for the rows of this rank's token shard if tokens are sharded."""
    source, target = call.matrix("source"), call.matrix("target")
    table = call["positions"].view(-1, target.shape[1])
    for rows, place in call.positions(call.first("target"), len(target), shard=True):
        torch.add(source[rows], table[place : place + rows.stop - rows.start], out=target[rows])


def embed_backward(call: Call) -> None:
    """``grad_weight[ids] += grad``, and ``grad_positions[position] += grad`` if positions are learned."""
    grad, ids = call.matrix("grad"), call["ids"]
    table = call["grad_weight"].view(-1, grad.shape[1])
    positions = call.get("grad_positions")
    count = min(len(grad), NORM_ROWS)
    scratch, divided = call.scratch(), None
    if call.context.mesh.size("tp") > 1:
        divided = _DividedIds(call, scratch, count, len(table))
    apart = divided or grad.dtype != table.dtype
    wide = scratch.take(count, grad.shape[1], dtype=table.dtype) if apart else None
    for first in range(0, len(grad), count):
        n = min(count, len(grad) - first)
        source, rows = grad[first : first + n], ids[first : first + n]
        if wide is not None:
            source = wide[:n].copy_(source)
        if positions is not None:
            for run, place in _sequences(call, first, n):
                positions.view(-1, grad.shape[1])[place].add_(source[run])
        if divided is not None:
            rows, absent = divided.of(rows)
            source.masked_fill_(absent.unsqueeze(1), 0.0)
        table.index_add_(0, rows, source, alpha=_factor(call, grad.dtype))


def _factor(call: Call, dtype: torch.dtype) -> float:
    """Return the factor on embeddings, rounded to their dtype as in Hugging Face's Gemma; 1 in other models."""
    model = call.context.model
    return float(torch.tensor(model.hidden**0.5, dtype=dtype)) if model.scaled_embeddings else 1.0


def _scale(out: Tensor, call: Call) -> None:
    if (factor := _factor(call, out.dtype)) != 1.0:
        out.mul_(factor)


class _DividedIds:
    """Converts token ids to rows of this rank's vocabulary shard; the results live in the workspace."""

    def __init__(self, call: Call, scratch: Scratch, rows: int, size: int) -> None:
        self._first, self._size = call.context.mesh.at("tp") * size, size
        self._ids, self._absent = scratch.take(rows, dtype=torch.int64), scratch.take(rows, dtype=torch.bool)

    def of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row of each token (0 for tokens of other ranks), and a mask of the tokens of other ranks."""
        own, absent = self._ids[: len(ids)], self._absent[: len(ids)]
        torch.sub(ids, self._first, out=own)
        torch.lt(own, 0, out=absent)
        own.masked_fill_(absent, self._size)  # out of range, like tokens of later ranks
        torch.ge(own, self._size, out=absent)
        return own.masked_fill_(absent, 0), absent


def _sequences(call: Call, first: int, count: int) -> Iterator[tuple[slice, slice]]:
    """Split ``count`` tokens from ``first`` on at sequence boundaries; yield (rows, positions) of each run.

    One buffer holds the token ids of all subsequences.
    """
    for rows, place in call.context.positions(call.first("ids") + first, count):
        yield rows, slice(place, place + rows.stop - rows.start)
