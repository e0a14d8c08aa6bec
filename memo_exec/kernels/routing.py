"""Chooses the experts of every token, and sorts the tokens' copies by expert.

The router's product, softmax and probabilities are in fp32. A token's copy for its j-th expert is slot
``token * per_token + j``; dispatched rows are the slots sorted by expert, within an expert by token. So all sizes are
known before the step, and no kernel waits for what the router decides.

    scores   (tokens, experts)      softmax of the logits over all experts
    probs    (tokens, per_token)    the largest scores, divided by their sum if the model renormalises
    experts  (tokens, per_token)    their experts
    order    (rows)                 slot of every dispatched row
    places   (tokens, per_token)    dispatched row of every slot
    ends     (experts)              number of dispatched rows up to and with each expert
"""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.kernels.call import Call
from memo_sim.contract.model import Experts
from memo_sim.program.operators.workspaces import NORM_ROWS


def experts_of(call: Call) -> Experts:
    """Return the model's experts.

    Raises:
        ValueError: when the model has none.
    """
    experts = call.context.model.mixture
    if experts is None:
        raise ValueError(f"{call.instruction.op} needs a model with experts")
    return experts


def router(call: Call) -> None:
    """``out = x @ weight.T`` in fp32: the logits of every expert."""
    x, out = call.matrix("x"), call.matrix("out")
    weight = call["weight"].view(out.shape[1], x.shape[1])
    if x.dtype == out.dtype:
        torch.mm(x, weight.t(), out=out)
        return
    scratch, count = call.scratch(), min(len(x), NORM_ROWS)
    wide, wide_weight = scratch.take(count, x.shape[1]), scratch.take(*weight.shape).copy_(weight)
    for block in _blocks(len(x)):
        rows = block.stop - block.start
        torch.mm(wide[:rows].copy_(x[block]), wide_weight.t(), out=out[block])


def route(call: Call) -> None:
    """Turn logits into ``scores``, in place, and choose each token's experts and their probabilities."""
    scores, probs, chosen = call.matrix("scores"), call.matrix("probs"), call.matrix("experts")
    total = call.scratch().take(len(scores), 1)
    torch.amax(scores, 1, keepdim=True, out=total)
    scores.sub_(total).exp_()
    scores.div_(torch.sum(scores, 1, keepdim=True, out=total))
    torch.topk(scores, probs.shape[1], dim=1, out=(probs, chosen))
    if experts_of(call).renormalize:
        probs.div_(torch.sum(probs, 1, keepdim=True, out=total))


def sort(call: Call) -> None:
    """Sort the slots by expert: ``order``, and the expert of each dispatched row, ``sorted``."""
    torch.sort(call["experts"].view(-1), stable=True, dim=0, out=(call["sorted"], call["order"]))


def places(call: Call) -> None:
    """Write the dispatched row of every slot (``places``), and where each expert's rows end (``ends``).

    Also add the experts' rows, the fullest first, to those of earlier calls (``Context.loads``)."""
    order, ends = call["order"], call["ends"]
    scratch = call.scratch()
    numbers = scratch.take(len(order), dtype=torch.int64)
    torch.arange(len(order), out=numbers)
    call["places"].view(-1).scatter_(0, order, numbers)
    every = scratch.take(len(ends), dtype=torch.int64)
    torch.arange(len(ends), out=every)
    torch.searchsorted(call["sorted"], every, right=True, out_int32=True, out=ends)
    loads, fullest = scratch.take(len(ends), dtype=torch.int32), scratch.take(len(ends), dtype=torch.int32)
    loads.copy_(ends)[1:].sub_(ends[:-1])
    torch.topk(loads, len(loads), out=(fullest, every))
    call.context.loads.add_(every.copy_(fullest))


def route_backward(call: Call) -> None:
    """``out``: the gradient of the logits, from that of the probabilities and from the loss of the experts' balance.

    With s = softmax(logits) and g the gradient of s: out = s * (g - sum of g * s). A token's probabilities are
    p = v / sum of v for the chosen scores v, or v itself, so g = (d - sum of d * p) / sum of v there, or d.
    """
    experts, scores, out = experts_of(call), call.matrix("scores"), call.matrix("out")
    grad, probs, chosen = call.matrix("grad"), call.matrix("probs"), call.matrix("experts")
    scratch, count = call.scratch(), min(len(scores), NORM_ROWS)
    product, picked = scratch.take(count, experts.count), scratch.take(count, experts.per_token)
    values, number = scratch.take(count, experts.per_token), scratch.take(count, 1)
    loads = None
    if experts.balance:
        counts = scratch.take(experts.count, dtype=torch.int32)
        loads = _loads(call, experts, counts, scratch.take(experts.count))
    for block in _blocks(len(scores)):
        rows = block.stop - block.start
        given, sums = picked[:rows], number[:rows]
        if experts.renormalize:
            torch.mul(grad[block], probs[block], out=given)
            torch.sub(grad[block], torch.sum(given, 1, keepdim=True, out=sums), out=given)
            torch.gather(scores[block], 1, chosen[block], out=values[:rows])
            given.div_(torch.sum(values[:rows], 1, keepdim=True, out=sums))
        else:
            given.copy_(grad[block])
        target = out[block]
        if loads is None:
            target.zero_()
        else:
            target.copy_(loads)
        target.scatter_add_(1, chosen[block], given)
        torch.mul(target, scores[block], out=product[:rows])
        target.sub_(torch.sum(product[:rows], 1, keepdim=True, out=sums)).mul_(scores[block])


def _loads(call: Call, experts: Experts, rows: Tensor, out: Tensor) -> Tensor:
    """Write the gradient of the balance loss for a score of each expert; ``rows`` is scratch in 32-bit integers.

    The loss of T tokens is coefficient x experts / (per_token x T**2) x sum over experts of (rows of the expert x sum
    of its scores). It counts as much in the step as these tokens do among all tokens of the global batch. The ranks of
    tensor parallelism, which have the same tokens, add their results up.
    """
    ends, decisions = call["ends"], call.context.decisions
    tokens = len(call["scores"])
    rows.copy_(ends)[1:].sub_(ends[:-1])
    out.copy_(rows)
    every = decisions.global_batch * decisions.seq_tokens * call.context.mesh.size("tp")
    return out.mul_(experts.balance * experts.count / (experts.per_token * tokens * every))


def router_dgrad(call: Call) -> None:
    """``out += grad @ weight``: the router's part of the gradient of its input."""
    grad, out = call.matrix("grad"), call.matrix("out")
    weight = call["weight"].view(grad.shape[1], out.shape[1])
    if out.dtype == grad.dtype:
        out.addmm_(grad, weight)
        return
    scratch, count = call.scratch(), min(len(out), NORM_ROWS)
    wide, wide_weight = scratch.take(count, out.shape[1]), scratch.take(*weight.shape).copy_(weight)
    for block in _blocks(len(out)):
        rows = block.stop - block.start
        out[block].copy_(wide[:rows].copy_(out[block]).addmm_(grad[block], wide_weight))


def router_wgrad(call: Call) -> None:
    """``out += grad.T @ x``, where the product is in fp32."""
    grad, x = call.matrix("grad"), call.matrix("x")
    out = call["out"].view(grad.shape[1], x.shape[1])
    scratch, count = call.scratch(), min(len(x), NORM_ROWS)
    wide = None if x.dtype == grad.dtype else scratch.take(count, x.shape[1])
    total = out if out.dtype == grad.dtype else scratch.take(*out.shape).zero_()
    for block in _blocks(len(x)):
        source = x[block] if wide is None else wide[: block.stop - block.start].copy_(x[block])
        total.addmm_(grad[block].t(), source)
    if total is not out:
        out.add_(scratch.take(*out.shape, dtype=out.dtype).copy_(total))


def _blocks(rows: int) -> list[slice]:
    return [slice(first, min(rows, first + NORM_ROWS)) for first in range(0, rows, NORM_ROWS)]
