"""Collectives on the program's buffers through torch.distributed: NCCL on GPUs, gloo on CPUs.

The row blocks of a gathered tensor are in token order. An operand may span two row blocks; under context parallelism,
keys and values have an early and a late chunk. Each block is gathered on its own, so no rows need rearranging.

gloo supports all of these operators since torch 2.6. No operator takes shares of unequal length, so those use one
broadcast or one reduce per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from memo_exec.distributed.mesh import Share
from memo_exec.kernels import fp8_shares
from memo_exec.kernels.call import Call
from memo_exec.kernels.fp8_scales import FORMATS
from memo_sim.program.ir.work import Collective, Exchange
from memo_sim.program.layout.token_order import clipped_runs


def all_gather(call: Call) -> None:
    """Gather the ``shard`` rows of all ranks into ``full``, one row block at a time; in FP8 with each rank's scale."""
    shard, full, group = call["shard"], call["full"], _group(call)
    for part, whole in _blocks(call, full):
        if full.dtype not in FORMATS:
            _all_gather(full[whole], shard[part], group)
            continue
        scales = call.context.fp8
        assert scales is not None  # a program gathers in FP8 with FP8 alone
        if call.context.decisions.fp8 in ("block", "mx"):
            scales.whole_parts(shard[part])  # scales are among the bytes of a whole part
        _all_gather(full[whole].view(torch.uint8), shard[part].view(torch.uint8), group)
        _all_gather(scales.made(full[whole], dist.get_world_size(group)), scales.of(shard[part]), group)


def reduce_scatter(call: Call) -> None:
    """Sum ``full`` over the ranks and write this rank's rows into ``shard``, one row block at a time."""
    shard, full, group = call["shard"], call["full"], _group(call)
    for part, whole in _blocks(call, full):
        _reduce_scatter(shard[part], full[whole], group)


def all_gather_sequences(call: Call) -> None:
    """Gather the ``shard`` rows of all ranks into ``full``, one sequence of the micro-batch at a time."""
    for part, whole in _sequences(call):
        _all_gather(whole, part, _group(call))


def reduce_scatter_sequences(call: Call) -> None:
    """Sum ``full`` over the ranks and write this rank's rows into ``shard``, one sequence at a time."""
    for part, whole in _sequences(call):
        _reduce_scatter(part, whole, _group(call))


def _sequences(call: Call) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows of ``shard`` and of ``full`` that belong to each sequence of the micro-batch."""
    batch = call.context.decisions.micro_batch
    return zip(torch.chunk(call["shard"], batch), torch.chunk(call["full"], batch), strict=True)


def heads_all_gather(call: Call) -> None:
    """Gather the ``shard`` rows of all ranks into ``full``, one rank's after the other's."""
    _all_gather(call["full"], call["shard"], _group(call))


def heads_reduce_scatter(call: Call) -> None:
    """Sum ``full`` over the ranks, and write the rows that lie in this rank's place into ``shard``."""
    _reduce_scatter(call["shard"], call["full"], _group(call))


def all_reduce(call: Call) -> None:
    """Replace ``tensor`` by its sum over the ranks."""
    dist.all_reduce(call["tensor"], group=_group(call))


def shards_all_reduce(call: Call) -> None:
    """Replace this rank's share of each run of gradients by its sum over the ranks that hold the same share."""
    for tensor in call.numbered("tensor").values():
        if len(tensor):  # with uneven shares, the last ranks may hold none of a run
            dist.all_reduce(tensor, group=_group(call))


def loss_all_reduce(call: Call) -> None:
    """Combine the softmax statistics of all vocabulary shards; ``tensor`` is (3, tokens).

    Before the call, the rows are: this rank's log-sum-exp, the same again, and the target's logit (0 if the target is
    in another shard). After it: the largest log-sum-exp over the ranks, the sum of exp(log-sum-exp - largest), and the
    target's logit.
    """
    numbers, group = call["tensor"].view(3, -1), _group(call)
    dist.all_reduce(numbers[0], op=dist.ReduceOp.MAX, group=group)
    numbers[1].sub_(numbers[0]).exp_()
    dist.all_reduce(numbers[1:], group=group)


def max_reduce(call: Call) -> None:
    """Replace ``tensor`` by its largest value over the ranks."""
    dist.all_reduce(call["tensor"], op=dist.ReduceOp.MAX, group=_group(call))


def all_to_all(call: Call) -> None:
    """Send part i of ``send`` to rank i and receive part i of ``recv`` from it; parts are in rank order.

    Ulysses uses this to change sides, one row block at a time. The sequence-sharded side has this rank's tokens with
    all heads, grouped by rank. The head-sharded side has all ranks' tokens with this rank's heads. With uneven heads
    the parts of the sequence-sharded side have different lengths.
    """
    send, recv, ranks = call["send"], call["recv"], _work(call).ranks
    sequence_sharded = "send" if len(send) < len(recv) else "recv"
    first, widths = call.first(sequence_sharded), _widths(call, recv if sequence_sharded == "send" else send)
    for start, rows in clipped_runs(call.row_blocks, first, len(call[sequence_sharded])):
        tokens, heads = (slice(n * (start - first), n * (start - first + rows)) for n in (1, ranks))
        sent, received = (tokens, heads) if sequence_sharded == "send" else (heads, tokens)
        lengths: list[list[int] | None] = [None, None]
        if len(set(widths)) > 1:
            own = widths[call.context.mesh.at("ulysses")]
            lengths = [[rows * width for width in widths], [rows * own] * ranks]
        of_send, of_recv = lengths if sequence_sharded == "send" else reversed(lengths)
        dist.all_to_all_single(recv[received].view(-1), send[sent].view(-1), of_recv, of_send, group=_group(call))


def _widths(call: Call, head_sharded: Tensor) -> list[int]:
    """Return the features of each rank's head-sharded rows: of attention's output, or of its Q, K and V."""
    context = call.context
    model = context.model
    outputs = [share.heads * model.value_dim for share in context.shares]
    if head_sharded.shape[1] == outputs[context.mesh.at("ulysses")]:
        return outputs
    key, value = model.head_dim, model.value_dim
    return [(share.heads + share.kv_heads) * key + share.kv_heads * value for share in context.shares]


def broadcast(call: Call) -> None:
    """Copy the root's ``own`` into every rank's ``tensor``; the other ranks' ``own`` is ignored."""
    root, tensor = _root(call), call["tensor"]
    if root == call.context.rank:
        tensor.copy_(call["own"])
    dist.broadcast(tensor, root, group=_group(call))


def reduce(call: Call) -> None:
    """Add the sum of all ranks' ``tensor`` to the root's ``sequence_side``.

    On the other ranks, ``tensor`` is undefined afterwards.
    """
    root = _root(call)
    dist.reduce(call["tensor"], root, group=_group(call))
    if root == call.context.rank:
        call["total"].add_(call["tensor"])


def send_recv(call: Call) -> None:
    """Exchange with two ranks of a ring: send ``send`` to the next one, receive ``recv`` from the previous one.

    With a distance above 1 they are that many ranks away.
    """
    group, work = _group(call), call.instruction.work
    assert isinstance(work, Exchange)
    mesh = call.context.mesh
    members, here = mesh.members(work.group), mesh.at(work.group)
    transfers = [
        dist.P2POp(dist.isend, call["send"], members[(here + work.distance) % len(members)], group),
        dist.P2POp(dist.irecv, call["recv"], members[here - work.distance], group),
    ]
    for transfer in dist.batch_isend_irecv(transfers):
        transfer.wait()


def sum_parts(call: Call) -> None:
    """``out``: the sum of ``parts``, one rank's rows after the other's; torch sums in fp32."""
    out, parts = call["out"], call["parts"]
    torch.sum(parts.view(-1, *out.shape), 0, out=out)


def grads_reduce_scatter(call: Call) -> None:
    """Sum each run of gradients over the ranks, in place; outside this rank's share the result is undefined."""
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
    """Gather each run of parameters; this rank's share is either in place in ``full`` already, or in ``shard``.

    What is in FP8 has scales that follow from the ``largest`` values of all shares.
    """
    group, mesh = _group(call), call.context.mesh
    members, here = mesh.members(_work(call).group), mesh.at(_work(call).group)
    shards = {name: _movable(shard) for name, shard in call.numbered("shard").items()}
    for name, gathered in call.numbered("full").items():
        full = _movable(gathered)
        share = Share(len(full), len(members))
        first, count = share.of(here)
        own = full[first : first + count]
        if full is not gathered:
            fp8_shares.keep_scales(call, gathered)
        if share.even:
            _all_gather(full, shards.get(name, own), group)
            continue
        if name in shards:
            own.copy_(shards[name])
        for index, rank in enumerate(members):
            first, count = share.of(index)
            if count:
                dist.broadcast(full[first : first + count], rank, group=group)


def _movable(tensor: Tensor) -> Tensor:
    """Return a tensor as collectives accept it: in FP8, its bytes."""
    return tensor.view(torch.uint8) if tensor.dtype in FORMATS else tensor


def _work(call: Call) -> Collective | Exchange:
    work = call.instruction.work
    assert isinstance(work, Collective | Exchange)
    return work


def _root(call: Call) -> int:
    """Return the global rank that broadcasts, or that receives the sum."""
    work = _work(call)
    assert isinstance(work, Collective)
    return call.context.mesh.members(work.group)[work.root]


def _group(call: Call) -> dist.ProcessGroup:
    return call.context.groups[call.instruction.lane, _work(call).group]


def _blocks(call: Call, full: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield (rows of the shard, rows of ``full``) for each collective call."""
    ranks, first = _work(call).ranks, call.first("full")
    half = len(full) // 2
    # Under context parallelism, all early chunks come first, then all late chunks.
    blocks = [(0, half), (half, half)] if _work(call).group == "cp" else call.row_blocks
    for start, rows in clipped_runs(blocks, first, len(full)):
        low, high = start - first, start - first + rows
        yield slice(low // ranks, high // ranks), slice(low, high)


def _named(new: str, old: str) -> Callable[..., object]:
    """Return a collective by its new name if torch has it; the old name warns since torch 2.13."""
    found: Callable[..., object] = getattr(dist, new, None) or getattr(dist, old)
    return found


def _all_gather(full: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    _named("all_gather_single", "all_gather_into_tensor")(full, shard, group=group)


def _reduce_scatter(shard: Tensor, full: Tensor, group: dist.ProcessGroup) -> None:
    _named("reduce_scatter_single", "reduce_scatter_tensor")(shard, full, group=group)
