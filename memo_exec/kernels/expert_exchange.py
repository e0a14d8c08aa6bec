"""Moves dispatched rows to the ranks of their experts and back (``memo_sim/program/layers/expert_exchange.py``).

Every rank sends ``capacity`` rows to each rank, so no kernel waits for a number of rows, and the host for none. Numbers
of rows stay on the device. Rows beyond the capacity have no seat: they are counted (``Context.overflow``), and what
would come back for them is zero.

    seats     (tokens, per_token)   row of every slot among those that are sent; the number of these for a slot without
    sent      (rows)                slot of every row that is sent; any for a seat that nothing takes
    order     (rows)                arrived row of every row in the order of experts, those of empty seats last
    gates     (rows)                probability by which the row is multiplied
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from memo_exec.kernels.call import Call
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.ir.work import Collective

INDEX = torch.int64


def seats(call: Call) -> None:
    """Give each slot a seat among the rows that are sent, in the order of experts; count the slots without one."""
    sent, out, order = call["sent"], call["seats"].view(-1), call["order"]
    ends = call["ends"].view(call.context.decisions.layout.ep, -1)
    ranks, own = ends.shape
    capacity, scratch = len(sent) // ranks, call.scratch()
    index, rank, begun = (scratch.take(len(sent), dtype=INDEX) for _ in range(3))
    of, number = (scratch.take(len(out), dtype=INDEX) for _ in range(2))
    begin, count, total = (scratch.take(ranks, dtype=INDEX) for _ in range(3))
    missing = scratch.take(len(out), dtype=torch.bool)
    total.copy_(ends[:, -1])
    begin.zero_()[1:].copy_(total[:-1])
    torch.sub(total, begin, out=count)
    torch.div(call["experts"].view(-1), own, rounding_mode="floor", out=of)
    torch.index_select(begin, 0, of, out=number)
    torch.sub(call["places"].view(-1), number, out=number)
    torch.add(of.mul_(capacity), number, out=out)
    out.masked_fill_(torch.ge(number, capacity, out=missing), len(sent))
    torch.arange(len(sent), out=index)
    torch.div(index, capacity, rounding_mode="floor", out=rank)
    torch.index_select(begin, 0, rank, out=begun)
    index.sub_(rank.mul_(capacity)).add_(begun).clamp_(max=len(order) - 1)
    torch.index_select(order, 0, index, out=sent)
    call["sent_ends"].view(ranks, own).copy_(ends).sub_(begin.unsqueeze(1)).clamp_(max=capacity)
    if call.instruction.phase is Phase.FORWARD:
        _count(call, count, capacity, total[:1])


def _count(call: Call, rows: Tensor, capacity: int, number: Tensor) -> None:
    """Add to ``Context.overflow`` what the ranks' ``rows``, which are changed, say; ``number`` is scratch."""
    context = call.context
    dropped, every, *each = torch.split(context.overflow, 1)
    most = each[context.routed.index(len(call["seats"]))]
    torch.amax(rows, 0, keepdim=True, out=number)
    torch.maximum(most, number, out=most)
    every.add_(torch.sum(rows, 0, keepdim=True, out=number))
    dropped.add_(torch.sum(rows.sub_(capacity).clamp_(min=0), 0, keepdim=True, out=number))


def gates(call: Call) -> None:
    """``out[row]``: the probability of the slot that is sent as this row."""
    torch.index_select(call["probs"].view(-1), 0, call["order"], out=call["out"])


def gates_backward(call: Call) -> None:
    """``out[slot]``: the gradient that came back for the slot's probability; zero for a slot without a seat."""
    x, places, out = call["x"], call["seats"].view(-1), call["out"].view(-1)
    scratch = call.scratch()
    at, missing = scratch.take(len(places), dtype=INDEX), scratch.take(len(places), dtype=torch.bool)
    torch.index_select(x, 0, torch.clamp(places, max=len(x) - 1, out=at), out=out)
    out.masked_fill_(torch.eq(places, len(x), out=missing), 0.0)


def arrivals(call: Call) -> None:
    """Order the rows that arrive by expert, and by the rank that sent them; rows of empty seats come last.

    ``arrived_ends`` has for every rank where the rows of each expert end among those that it sends here.
    """
    order, own_ends = call["order"], call["ends"]
    ranks, own = call.context.decisions.layout.ep, len(own_ends)
    capacity, scratch = len(order) // ranks, call.scratch()
    ends, count, first, begin = (scratch.take(ranks, own + 1, dtype=INDEX) for _ in range(4))
    place, expert, number, rank = (scratch.take(len(order), dtype=INDEX) for _ in range(4))
    ends[:, :own].copy_(call["arrived_ends"].view(ranks, own))
    ends[:, own].fill_(capacity)  # empty seats count as the rows of one expert more
    first.zero_()[:, 1:].copy_(ends[:, :own])
    torch.sub(ends, first, out=count)
    # Experts come one after the other, and of each expert the ranks: a running sum over (expert, rank).
    running = begin.view(own + 1, ranks)
    torch.cumsum(count.t().reshape(-1), 0, out=begin.view(-1))
    own_ends.copy_(running[:own, -1])
    start = running.t() - count - first  # where the rows of (rank, expert) begin, less their first arrived row
    torch.arange(len(order), out=place)
    torch.remainder(place, capacity, out=number)
    torch.div(place, capacity, rounding_mode="floor", out=rank)
    torch.searchsorted(ends, number.view(ranks, capacity), right=True, out=expert.view(ranks, capacity))
    torch.index_select(start.reshape(-1), 0, expert.add_(rank.mul_(own + 1)), out=rank)
    order.scatter_(0, rank.add_(number), place)


def arrange(call: Call) -> None:
    """``out[row] = x[order[row]]``: from the order of arrival to that of experts."""
    torch.index_select(call["x"], 0, call["order"], out=call["out"])


def arrange_back(call: Call) -> None:
    """``out[order[row]] = x[row]``: from the order of experts to that of arrival."""
    call["out"].index_copy_(0, call["order"], call["x"])


def all_to_all(call: Call) -> None:
    """Send part i of ``send`` to rank i, and receive part i of ``recv`` from it; the parts are equally long."""
    work = call.instruction.work
    assert isinstance(work, Collective)
    group = call.context.groups[call.instruction.lane, work.group]
    dist.all_to_all_single(call["recv"].view(-1), call["send"].view(-1), group=group)
