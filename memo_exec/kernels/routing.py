"""Chooses the experts of every token, and sorts the tokens' copies by expert.

The router's product, softmax and probabilities are in fp32. A token's copy for its j-th expert is slot
``token * per_token + j``; dispatched rows are the slots sorted by expert, within an expert by token. So all sizes are
known before the step, and no kernel waits for what the router decides.

    scores   (tokens, experts)      softmax of the logits over all experts, or the sigmoid of each
    lse      (tokens)               log-sum-exp of the logits, if the model has a loss of it (``Experts.z_loss``)
    probs    (tokens, per_token)    the largest scores, divided by their sum if the model renormalises, times its scale
    experts  (tokens, per_token)    their experts
    order    (rows)                 slot of every dispatched row
    places   (tokens, per_token)    dispatched row of every slot
    ends     (experts)              number of dispatched rows up to and with each expert

A selection bias and groups change which scores are the largest, not the scores (``_choose``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.kernels.call import Call, Scratch
from memo_sim.contract.experts import Experts
from memo_sim.program.operators.workspaces import NORM_ROWS

LEAST_SUM = 1e-20
"""Added to the sum of sigmoid scores that probabilities are divided by (DeepSeek-V3's code)."""


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
    """``out = x @ weight.T (+ bias)`` in fp32: the logits of every expert."""
    x, out, bias = call.matrix("x"), call.matrix("out"), call.get("bias")
    weight = call["weight"].view(out.shape[1], x.shape[1])
    if x.dtype == out.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        scratch, count = call.scratch(), min(len(x), NORM_ROWS)
        wide, wide_weight = scratch.take(count, x.shape[1]), scratch.take(*weight.shape).copy_(weight)
        bias = bias if bias is None else scratch.take(len(bias)).copy_(bias)
        for block in blocks_of(len(x)):
            rows = block.stop - block.start
            torch.mm(wide[:rows].copy_(x[block]), wide_weight.t(), out=out[block])
    if bias is not None:
        out.add_(bias)


def shared_gate(call: Call) -> None:
    """``out = sigmoid(x . weight)`` in fp32: the factor on each token's shared expert (Qwen2-MoE)."""
    router(call)
    call["out"].sigmoid_()


def shared_gate_backward(call: Call) -> None:
    """Turn ``grad``, the gradient of these factors, into that of the product under the sigmoid, in place."""
    torch.ops.aten.sigmoid_backward.grad_input(call["grad"], call["gates"], grad_input=call["grad"])


def route(call: Call) -> None:
    """Turn logits into ``scores``, in place, and choose each token's experts and their probabilities."""
    scores, probs, chosen = call.matrix("scores"), call.matrix("probs"), call.matrix("experts")
    experts, scratch = experts_of(call), call.scratch()
    total = scratch.take(len(scores), 1)
    if experts.scores == "sigmoid":
        scores.sigmoid_()
    else:
        _softmax(scores, total, call.matrix("lse") if experts.z_loss else None)
    if experts.selection_bias or experts.groups > 1:
        _choose(call, experts, scratch)
    else:
        torch.topk(scores, probs.shape[1], dim=1, out=(probs, chosen))
    if experts.renormalize:
        torch.sum(probs, 1, keepdim=True, out=total)
        probs.div_(total.add_(LEAST_SUM) if experts.scores == "sigmoid" else total)
    if experts.scale != 1:
        probs.mul_(experts.scale)


def _softmax(scores: Tensor, total: Tensor, lse: Tensor | None) -> None:
    """Turn logits into their softmax, in place, and write their log-sum-exp; ``total`` is scratch of a number a row."""
    torch.amax(scores, 1, keepdim=True, out=total)
    if lse is not None:
        lse.copy_(total)
    scores.sub_(total).exp_()
    scores.div_(torch.sum(scores, 1, keepdim=True, out=total))
    if lse is not None:
        lse.add_(total.log_())


def _choose(call: Call, experts: Experts, scratch: Scratch) -> None:
    """Write the experts with the largest scores plus bias, from the groups with the best ones, and their scores.

    A group's score is the sum of its two largest (DeepSeek-V3, and ``modeling_deepseek_v3.py`` of transformers).
    """
    scores, probs, chosen, bias = call.matrix("scores"), call.matrix("probs"), call.matrix("experts"), call.get("bias")
    added = None if bias is None else scratch.take(experts.count).copy_(bias)
    count, groups = min(len(scores), NORM_ROWS), experts.groups
    rated, best = scratch.take(count, experts.count), scratch.take(count, experts.per_token)
    if groups > 1:
        pairs, where = scratch.take(count, groups, 2), scratch.take(count, groups, 2, dtype=torch.int64)
        sums, top = scratch.take(count, groups), scratch.take(count, experts.groups_per_token)
        kept = scratch.take(count, experts.groups_per_token, dtype=torch.int64)
    for block in blocks_of(len(scores)):
        rows = block.stop - block.start
        rating = rated[:rows].copy_(scores[block])
        if added is not None:
            rating.add_(added)
        if groups > 1:
            members, total = rating.view(rows, groups, -1), sums[:rows]
            torch.topk(members, 2, dim=2, out=(pairs[:rows], where[:rows]))
            torch.add(pairs[:rows, :, 0], pairs[:rows, :, 1], out=total)
            torch.topk(total, experts.groups_per_token, dim=1, out=(top[:rows], kept[:rows]))
            members.add_(total.fill_(-torch.inf).scatter_(1, kept[:rows], 0.0).unsqueeze(2))
        torch.topk(rating, experts.per_token, dim=1, out=(best[:rows], chosen[block]))
        torch.gather(scores[block], 1, chosen[block], out=probs[block])


def balance(call: Call) -> None:
    """Move the selection bias of each expert by a fixed step towards the mean load (DeepSeek-V3, section 2.1.2).

    ``grads`` has the rows that each expert got in the step, on all ranks. Their mean follows from the plan, so no rank
    needs the rows of other experts. The first moment gets the sign of the difference; the second is not used.
    """
    experts, decisions = experts_of(call), call.context.decisions
    params, master, sign = call["params"], call.get("master"), call["moment1"]
    mean = decisions.global_batch * decisions.seq_tokens * experts.per_token / experts.count
    updated = params if master is None else master
    updated.sub_(torch.sub(call["grads"], mean, out=sign).sign_(), alpha=experts.selection_rate)
    if master is not None:
        params.copy_(master)


def sort(call: Call) -> None:
    """Sort the slots by expert: ``order``, and the expert of each dispatched row, ``sorted``."""
    torch.sort(call["experts"].view(-1), stable=True, dim=0, out=(call["sorted"], call["order"]))


def places(call: Call) -> None:
    """Write the dispatched row of every slot (``places``), and where each expert's rows end (``ends``).

    Also add the experts' rows to those of earlier calls (``Context.rows``), and the fullest first (``Context.loads``).
    """
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
    call.context.rows[call.layer].add_(every.copy_(loads))
    torch.topk(loads, len(loads), out=(fullest, every))
    call.context.loads[call.layer].add_(every.copy_(fullest))


def sum_ends(call: Call) -> None:
    """``out``: the sum of all row blocks' ends in ``x``, which are those of all their rows."""
    torch.sum(call["x"].view(-1, len(call["out"])), 0, dtype=torch.int32, out=call["out"])


def route_backward(call: Call) -> None:
    """``out``: the gradient of the logits, from that of the probabilities and from the losses of the router.

    With s = softmax(logits) and g the gradient of s: out = s * (g - sum of g * s); with sigmoid out = g * s * (1 - s).
    A token's probabilities are p = c * v / sum of v for the chosen scores v and the scale c, or c * v, so
    g = (c * d - sum of d * p) / sum of v there, or c * d. The loss of the log-sum-exp z adds factor * z * s.

    ``loads``: the rows of each expert are added to it. ``all_ends``: the ends of all tokens' rows, where ``ends`` has
    those of one row block or subsequence; subsequences have a part of it each.
    """
    experts, scores, out = experts_of(call), call.matrix("scores"), call.matrix("out")
    grad, probs, chosen = call.matrix("grad"), call.matrix("probs"), call.matrix("experts")
    scratch, count = call.scratch(), min(len(scores), NORM_ROWS)
    product, picked = scratch.take(count, experts.count), scratch.take(count, experts.per_token)
    values, number = scratch.take(count, experts.per_token), scratch.take(count, 1)
    loads, z_factor = None, 2 * experts.z_loss / _tokens_of_step(call)
    if experts.balance or experts.selection_bias:
        counts, loads = scratch.take(experts.count, dtype=torch.int32), scratch.take(experts.count)
        _loads_of(call["ends"], counts, loads)
    if loads is not None and (summed := call.get("loads")) is not None:  # none where the bias is frozen
        summed.add_(loads)
    if loads is not None and (every := call.get("all_ends")) is not None:
        _loads_of(_summed(every, counts, product), counts, loads)
    for block in blocks_of(len(scores)):
        rows = block.stop - block.start
        given, sums = picked[:rows], number[:rows]
        if experts.renormalize:
            torch.mul(grad[block], probs[block], out=given)
            torch.sum(given, 1, keepdim=True, out=sums)
            torch.sub(torch.mul(grad[block], experts.scale, out=given), sums, out=given)
            torch.gather(scores[block], 1, chosen[block], out=values[:rows])
            given.div_(torch.sum(values[:rows], 1, keepdim=True, out=sums))
        else:
            torch.mul(grad[block], experts.scale, out=given)
        target, whole = out[block], product[:rows]
        if experts.balance and loads is not None:
            torch.mul(loads.expand_as(target), _balance_factor(call, experts), out=target)
        else:
            target.zero_()
        target.scatter_add_(1, chosen[block], given)
        torch.mul(target, scores[block], out=whole)
        if experts.scores == "sigmoid":
            torch.sub(whole, torch.mul(whole, scores[block], out=target), out=target)
            continue
        target.sub_(torch.sum(whole, 1, keepdim=True, out=sums)).mul_(scores[block])
        if experts.z_loss:
            target.add_(torch.mul(scores[block], call.matrix("lse")[block], out=whole), alpha=z_factor)


def _summed(every: Tensor, counts: Tensor, scratch: Tensor) -> Tensor:
    """Return the sum of the ends of all subsequences in ``every``, in scratch that has room for ``counts``."""
    total = scratch.view(-1)[: len(counts)].view(torch.int32)
    return torch.sum(every.view(-1, len(counts)), 0, dtype=torch.int32, out=total)


def _loads_of(ends: Tensor, counts: Tensor, out: Tensor) -> None:
    """Write the rows of each expert; ``counts`` is scratch of as many integers."""
    counts.copy_(ends)[1:].sub_(ends[:-1])
    out.copy_(counts)


def _tokens_of_step(call: Call) -> int:
    """Return the tokens of the global batch, counted on every rank of tensor parallelism that routes the same ones.

    A loss of the router is a mean over tokens, and these ranks, which have the same tokens, add their results up.
    """
    decisions = call.context.decisions
    return decisions.global_batch * decisions.seq_tokens * decisions.layout.expert_divided


def _balance_factor(call: Call, experts: Experts) -> float:
    """Return the gradient of the balance loss for a score, for each row of the expert.

    The loss of T tokens is coefficient x experts / (per_token x T**2) x sum over experts of (rows of the expert x sum
    of its scores). It counts as much in the step as these tokens do among all tokens of the global batch.
    """
    tokens = call.context.decisions.routed_tokens
    return experts.balance * experts.count / (experts.per_token * tokens * _tokens_of_step(call))


def router_dgrad(call: Call) -> None:
    """``out += grad @ weight``: the router's part of the gradient of its input."""
    grad, out = call.matrix("grad"), call.matrix("out")
    weight = call["weight"].view(grad.shape[1], out.shape[1])
    if out.dtype == grad.dtype:
        out.addmm_(grad, weight)
        return
    scratch, count = call.scratch(), min(len(out), NORM_ROWS)
    wide, wide_weight = scratch.take(count, out.shape[1]), scratch.take(*weight.shape).copy_(weight)
    for block in blocks_of(len(out)):
        rows = block.stop - block.start
        out[block].copy_(wide[:rows].copy_(out[block]).addmm_(grad[block], wide_weight))


def router_wgrad(call: Call) -> None:
    """``out += grad.T @ x``, where the product is in fp32; ``grad_bias`` += the sum of grad over rows."""
    grad, x = call.matrix("grad"), call.matrix("x")
    out = call["out"].view(grad.shape[1], x.shape[1])
    scratch, count = call.scratch(), min(len(x), NORM_ROWS)
    wide = None if x.dtype == grad.dtype else scratch.take(count, x.shape[1])
    total = out if out.dtype == grad.dtype else scratch.take(*out.shape).zero_()
    for block in blocks_of(len(x)):
        source = x[block] if wide is None else wide[: block.stop - block.start].copy_(x[block])
        total.addmm_(grad[block].t(), source)
    if total is not out:
        out.add_(scratch.take(*out.shape, dtype=out.dtype).copy_(total))
    if (bias := call.get("grad_bias")) is not None:
        summed = torch.sum(grad, 0, out=scratch.take(len(bias)))
        bias.add_(scratch.take(len(bias), dtype=bias.dtype).copy_(summed))


def blocks_of(rows: int) -> list[slice]:
    """Return the blocks of rows that kernels work on one after the other, as slices."""
    return [slice(first, min(rows, first + NORM_ROWS)) for first in range(0, rows, NORM_ROWS)]
