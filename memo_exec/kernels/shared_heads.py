"""Tensor-parallel ranks that share a key/value head gather the packed Q, K, V and pick their own heads.

``memo_sim/program/attention/shared_heads.py`` has the exchange. Parts of ranks lie one after the other: (rank, row,
features), each with the features of the rank's query heads, then its part of a key head and of a value head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memo_exec.kernels.call import Call
from memo_sim.program.layout.heads import sharing_ranks


def pick(call: Call) -> None:
    """Copy this rank's query heads, and the key/value head that they read, out of all ranks' parts."""
    for picked, parts in _own(call, call["target"], call["source"]):
        picked.copy_(parts)


def place(call: Call) -> None:
    """Copy the gradients of what this rank picked to their places in all ranks' parts; all else is zero."""
    call["target"].zero_()
    for picked, parts in _own(call, call["source"], call["target"]):
        parts.copy_(picked)


def _own(call: Call, packed: Tensor, gathered: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of Q, K and V in packed rows, and of the same features in the parts of the ranks that have them."""
    context, layout = call.context, call.context.decisions.layout
    rank, q = context.mesh.at("tp"), context.heads * context.model.head_dim
    shared_by, size = sharing_ranks(context.model, layout), context.model.head_dim
    ranks = gathered.view(layout.tp, len(packed), -1)
    yield packed[:, :q], ranks[rank, :, :q]
    first, part = rank // shared_by * shared_by, size // shared_by
    for number in range(2):
        here, there = q + number * size, q + number * part
        head = torch.unflatten(packed[:, here : here + size], 1, (shared_by, part)).transpose(0, 1)
        yield head, ranks[first : first + shared_by, :, there : there + part]
