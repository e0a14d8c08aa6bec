"""What ranks exchange, in place on the program's buffers: torch.distributed over NCCL, or over gloo on CPUs.

Row blocks of gathered tensors lie in token order: where an operand spans two row blocks (or, of keys and values under
context parallelism, early and late chunks), each is gathered by itself, so that nothing is rearranged.

gloo has all of these operators since torch 2.6; shares of unequal length, which no operator takes, are sent by one
broadcast or reduce a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch import Tensor

from memo_exec.distributed.mesh import Share
from memo_exec.kernels.call import Call
from memo_sim.program.ir.work import Collective, Exchange
from memo_sim.program.layout.token_order import clipped_runs


def all_gather(call: Call) -> None:
    """``full`` = the ranks' ``shard`` rows, row block by row block."""
    shard, full, group = call["shard"], call["full"], _group(call)
    for part, whole in _blocks(call, full):
        _all_gather(full[whole], shard[part], group)


def reduce_scatter(call: Call) -> None:
    """``shard`` = this rank's rows of the sum of ``full``, row block by row block."""
    shard, full, group = call["shard"], call["full"], _group(call)
    for part, whole in _blocks(call, full):
        _reduce_scatter(shard[part], full[whole], group)


def all_reduce(call: Call) -> None:
    """``tensor`` = its sum over the ranks."""
    dist.all_reduce(call["tensor"], group=_group(call))


def loss_all_reduce(call: Call) -> None:
    """Join each rank's part of the softmax: (largest, sum, target's logit) of the tokens, three rows of numbers.

    Before: a rank's log-sum-exp twice, and the target's logit where it has the target. After: the largest of the
    log-sum-exps, the sum of exponentials over it, and the target's logit.
    """
    numbers, group = call["tensor"].view(3, -1), _group(call)
    dist.all_reduce(numbers[0], op=dist.ReduceOp.MAX, group=group)
    numbers[1].sub_(numbers[0]).exp_()
    dist.all_reduce(numbers[1:], group=group)


def all_to_all(call: Call) -> None:
    """``recv`` = part i of this rank's place from rank i, whose part of ``send`` it is; equal parts, in rank order.

    One side has this rank's tokens (packed by rank), the other its heads of all ranks' tokens, row block by row block.
    """
    send, recv, ranks = call["send"], call["recv"], _work(call).ranks
    sequence_side = "send" if len(send) < len(recv) else "recv"
    first = call.first(sequence_side)
    for start, rows in clipped_runs(call.row_blocks, first, len(call[sequence_side])):
        tokens, heads = (slice(n * (start - first), n * (start - first + rows)) for n in (1, ranks))
        given, taken = (tokens, heads) if sequence_side == "send" else (heads, tokens)
        dist.all_to_all_single(recv[taken].view(-1), send[given].view(-1), group=_group(call))


def broadcast(call: Call) -> None:
    """``tensor`` = what the root has in ``own``; the other ranks' own is not looked at."""
    root, tensor = _root(call), call["tensor"]
    if root == call.context.rank:
        tensor.copy_(call["own"])
    dist.broadcast(tensor, root, group=_group(call))


def reduce(call: Call) -> None:
    """The root's ``total`` += the sum of the ranks' ``tensor``; of the other ranks ``tensor`` is undefined then."""
    root = _root(call)
    dist.reduce(call["tensor"], root, group=_group(call))
    if root == call.context.rank:
        call["total"].add_(call["tensor"])


def send_recv(call: Call) -> None:
    """One hop of a ring: ``send`` goes to the next rank of the group, ``recv`` comes from the one before."""
    group, name = _group(call), _work(call).group
    mesh = call.context.mesh
    members, here = mesh.members(name), mesh.at(name)
    ways = [
        dist.P2POp(dist.isend, call["send"], members[(here + 1) % len(members)], group),
        dist.P2POp(dist.irecv, call["recv"], members[here - 1], group),
    ]
    for work in dist.batch_isend_irecv(ways):
        work.wait()


def grads_reduce_scatter(call: Call) -> None:
    """Sum every run of gradients, and leave this rank's share of each in its place; the rest is undefined."""
    group, mesh = _group(call), call.context.mesh
    members = mesh.members(_work(call).group)
    for full in call.numbered("full").values():
        share = Share(len(full), len(members))
        if share.even:
            first, count = share.of(mesh.at(_work(call).group))
            _reduce_scatter(full[first : first + count], full, group)
            continue
        for index, rank in enumerate(members):
            first, count = share.of(index)
            if count:
                dist.reduce(full[first : first + count], rank, group=group)


def params_all_gather(call: Call) -> None:
    """Make every run of parameters whole: this rank's share lies in its place already, or in ``shard``."""
    group, mesh = _group(call), call.context.mesh
    members, here = mesh.members(_work(call).group), mesh.at(_work(call).group)
    shards = call.numbered("shard")
    for name, full in call.numbered("full").items():
        share = Share(len(full), len(members))
        first, count = share.of(here)
        own = full[first : first + count]
        if share.even:
            _all_gather(full, shards.get(name, own), group)
            continue
        if name in shards:
            own.copy_(shards[name])
        for index, rank in enumerate(members):
            first, count = share.of(index)
            if count:
                dist.broadcast(full[first : first + count], rank, group=group)


def _work(call: Call) -> Collective | Exchange:
    work = call.instruction.work
    assert isinstance(work, Collective | Exchange)
    return work


def _root(call: Call) -> int:
    """Return which of all ranks broadcasts, or has the sum."""
    work = _work(call)
    assert isinstance(work, Collective)
    return call.context.mesh.members(work.group)[work.root]


def _group(call: Call) -> dist.ProcessGroup:
    return call.context.groups[call.instruction.lane, _work(call).group]


def _blocks(call: Call, full: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield (rows of the shard, rows of the whole) that are gathered or scattered at once."""
    ranks, first = _work(call).ranks, call.first("full")
    half = len(full) // 2
    # Context parallelism has all early chunks, then all late ones.
    blocks = [(0, half), (half, half)] if _work(call).group == "cp" else call.row_blocks
    for start, rows in clipped_runs(blocks, first, len(full)):
        low, high = start - first, start - first + rows
        yield slice(low // ranks, high // ranks), slice(low, high)


def _named(new: str, old: str) -> Callable[..., object]:
    """Return a collective by its newer name where torch has it: since 2.13 the older one warns."""
    found: Callable[..., object] = getattr(dist, new, None) or getattr(dist, old)
    return found


def _all_gather(full: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    _named("all_gather_single", "all_gather_into_tensor")(full, shard, group=group)


def _reduce_scatter(shard: Tensor, full: Tensor, group: dist.ProcessGroup) -> None:
    _named("reduce_scatter_single", "reduce_scatter_tensor")(shard, full, group=group)
