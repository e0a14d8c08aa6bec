"""Products of dispatched rows with the weights of their experts, and the activation between them.

The rows of an expert lie one after the other (``routing.py``); ``ends`` says where each expert's end, counted over all
dispatched rows. An operand may be a range of those rows, so its first row says which part of an expert's it has.

On the CPU every expert's product is a call of its own. On CUDA one kernel plays all of them (``torch._grouped_mm``),
because only the device knows the sizes; it returns its result in a new tensor, which the program declares as workspace.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memo_exec.kernels.call import Call, Scratch
from memo_exec.kernels.routing import blocks_of, experts_of
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.operators.workspaces import NORM_ROWS

aten = torch.ops.aten


GROUPED_BYTES = 16
"""torch._grouped_mm takes rows whose length is a multiple of so many bytes."""


def check_device(decisions: Decisions, device: torch.device) -> None:
    """Refuse experts that the device's product of several experts does not take.

    Raises:
        CannotRun: on CUDA, for another dtype than bf16, and for rows that are not aligned.
    """
    model, of = decisions.model, decisions.model.mixture
    if of is None or device.type == "cpu":
        return
    if decisions.dtype != "bf16":
        raise CannotRun(
            "the products of experts are in bf16 on a GPU",
            where="decisions.dtype",
            got=decisions.dtype,
            wanted="bf16",
            hint="make the plan with --dtype bf16",
        )
    widths, size = (model.hidden, of.hidden // decisions.layout.expert_divided), DTYPE_BYTES[decisions.dtype]
    if any(width * size % GROUPED_BYTES for width in widths):
        raise CannotRun(
            "torch's product of several experts takes rows of whole units alone",
            where="model.experts.hidden",
            got=f"rows of {widths[0]} and {widths[1]} features on a rank",
            wanted=f"multiples of {GROUPED_BYTES // size} features",
            hint="a smaller --tp",
        )


def in_one_call(rows: Tensor) -> bool:
    """Return whether one kernel multiplies the rows of all experts."""
    return rows.is_cuda


def linear(call: Call) -> None:
    """``out[row] = weight of the row's expert @ x[row]``."""
    x, out = call.matrix("x"), call.matrix("out")
    weight = _weights(call, out.shape[1], x.shape[1])
    if in_one_call(x):
        out.copy_(torch._grouped_mm(x, weight.transpose(1, 2), offs=_offsets(call)))
    else:
        for expert, rows in _runs(call):
            torch.mm(x[rows], weight[expert].t(), out=out[rows])
    _clear_empty_seats(call, out)


def linear_dgrad(call: Call) -> None:
    """``out[row] = grad[row] @ weight of the row's expert``: the gradient of the input."""
    grad, out = call.matrix("grad"), call.matrix("out")
    weight = _weights(call, grad.shape[1], out.shape[1])
    if in_one_call(grad):
        out.copy_(torch._grouped_mm(grad, weight, offs=_offsets(call)))
    else:
        for expert, rows in _runs(call):
            torch.mm(grad[rows], weight[expert], out=out[rows])
    _clear_empty_seats(call, out)


def _clear_empty_seats(call: Call, out: Tensor) -> None:
    """Zero the rows of no expert, where ranks divide experts and debug mode looks for NaN.

    Otherwise they keep what was there before. Row-wise kernels work on them too, and nothing reads what they make.
    """
    if call.context.debug and call.context.decisions.layout.ep > 1:
        first, count = _rows(call)
        out[max(0, int(call["ends"][-1]) - first) : count].zero_()


def linear_wgrad(call: Call) -> None:
    """``out of an expert += grad.T @ x`` over its rows: the gradient of its weight."""
    grad, x = call.matrix("grad"), call.matrix("x")
    out = call["out"].view(len(call["ends"]), grad.shape[1], x.shape[1])
    if in_one_call(grad):
        out.add_(torch._grouped_mm(grad.t(), x, offs=_offsets(call)))
        return
    if grad.dtype == out.dtype:
        for expert, rows in _runs(call):
            out[expert].addmm_(grad[rows].t(), x[rows])
        return
    scratch, count = Scratch(call.get("wide")), min(len(x), NORM_ROWS)
    wide_grad, wide_x = scratch.take(count, grad.shape[1]), scratch.take(count, x.shape[1])
    for expert, rows in _runs(call):
        for first in range(rows.start, rows.stop, count):
            block = slice(first, min(rows.stop, first + count))
            taken = block.stop - first
            left, right = wide_grad[:taken].copy_(grad[block]), wide_x[:taken].copy_(x[block])
            out[expert].addmm_(left.t(), right)


def swiglu(call: Call) -> None:
    """``out = probability * silu(gate) * up``; the probability is that of the row's token for its expert."""
    x, out = call.matrix("x"), call.matrix("out")
    scratch, count = call.scratch(), min(len(out), NORM_ROWS)
    weights = _probabilities(call, scratch.take(len(out)))
    wide = None if out.dtype == torch.float32 else scratch.take(count, out.shape[1])
    for block in blocks_of(len(out)):
        gate, up = torch.split(x[block], out.shape[1], dim=1)
        aten.silu.out(gate, out=out[block])
        out[block].mul_(up)
        if wide is None:
            out[block].mul_(weights[block])
        else:
            out[block].copy_(wide[: len(gate)].copy_(out[block]).mul_(weights[block]))


def swiglu_backward(call: Call) -> None:
    """``grad_x``: the gradient of gate and up; ``grad_probs``: that of the probabilities, at each row's slot.

    With g the gradient of the weighted activation and p the row's probability: the activation's gradient is p * g, and
    the probability's is the sum of g * silu(gate) * up over the row. So the second product's result is not needed.
    """
    grad = call.matrix("grad")
    scratch, count = call.scratch(), min(len(grad), NORM_ROWS)
    weights, sums = _probabilities(call, scratch.take(len(grad))), scratch.take(len(grad), 1)
    wide, factor = scratch.take(count, grad.shape[1]), scratch.take(count, grad.shape[1])
    for block in blocks_of(len(grad)):
        gate, up = torch.split(call["x"][block], grad.shape[1], dim=1)
        grad_gate, grad_up = torch.split(call["grad_x"][block], grad.shape[1], dim=1)
        work, other, weight = wide[: len(gate)], factor[: len(gate)], weights[block]
        aten.silu.out(gate, out=grad_up)
        work.copy_(grad_up).mul_(other.copy_(grad[block]))
        torch.sum(other.copy_(up).mul_(work), 1, keepdim=True, out=sums[block])
        grad_up.copy_(work.mul_(weight))
        work.copy_(grad[block]).mul_(weight)
        grad_gate.copy_(other.copy_(up).mul_(work))
        aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
    _give_probabilities(call, sums)


CLAMP_LIMIT, CLAMP_SLOPE = 7.0, 1.702
"""GPT-OSS's activation: the largest gate, and the factor inside its sigmoid (config.json: ``swiglu_limit``, _alpha)."""


def clamped(call: Call) -> None:
    """``out = probability * (up + 1) * gate * sigmoid(1.702 * gate)``, with both halves clamped."""
    x, out = call.matrix("x"), call.matrix("out")
    scratch, count = call.scratch(), min(len(out), NORM_ROWS)
    weights = _probabilities(call, scratch.take(len(out)))
    wide, other = scratch.take(count, out.shape[1]), scratch.take(count, out.shape[1])
    for block in blocks_of(len(out)):
        gate, up = torch.split(x[block], out.shape[1], dim=1)
        work, factor = wide[: len(gate)], other[: len(gate)]
        work.copy_(gate).clamp_(max=CLAMP_LIMIT)
        work.mul_(torch.mul(work, CLAMP_SLOPE, out=factor).sigmoid_())
        work.mul_(factor.copy_(up).clamp_(-CLAMP_LIMIT, CLAMP_LIMIT).add_(1.0))
        out[block].copy_(work.mul_(weights[block]))


def clamped_backward(call: Call) -> None:
    """``grad_x`` and ``grad_probs`` of ``clamped``, as in ``swiglu_backward``; halves beyond a limit get no gradient.

    With a the clamped gate, u the clamped up and s = sigmoid(1.702 a): the activation's gradient for the gate is
    (u + 1) * (s + 1.702 a s (1 - s)), and for up it is a * s.
    """
    grad = call.matrix("grad")
    scratch, count = call.scratch(), min(len(grad), NORM_ROWS)
    weights, sums = _probabilities(call, scratch.take(len(grad))), scratch.take(len(grad), 1)
    every = [scratch.take(count, grad.shape[1]) for _ in range(5)]
    for block in blocks_of(len(grad)):
        gate, up = torch.split(call["x"][block], grad.shape[1], dim=1)
        grad_gate, grad_up = torch.split(call["grad_x"][block], grad.shape[1], dim=1)
        given, wide, slope, unit, work = (each[: len(gate)] for each in every)
        given.copy_(grad[block])
        wide.copy_(gate).clamp_(max=CLAMP_LIMIT)
        torch.mul(wide, CLAMP_SLOPE, out=slope).sigmoid_()
        unit.copy_(up).clamp_(-CLAMP_LIMIT, CLAMP_LIMIT).add_(1.0)
        torch.mul(wide, slope, out=work)  # a * s
        torch.sum(wide.copy_(work).mul_(unit).mul_(given), 1, keepdim=True, out=sums[block])
        given.mul_(weights[block])
        wide.copy_(up).abs_()
        grad_up.copy_(torch.mul(given, work, out=unit).mul_(torch.le(wide, CLAMP_LIMIT, out=wide)))
        # s + 1.702 a s (1 - s)
        work.mul_(CLAMP_SLOPE).addcmul_(work, slope, value=-1.0).add_(slope)
        unit.copy_(up).clamp_(-CLAMP_LIMIT, CLAMP_LIMIT).add_(1.0)
        given.mul_(work).mul_(unit)
        grad_gate.copy_(given.mul_(torch.le(wide.copy_(gate), CLAMP_LIMIT, out=wide)))
    _give_probabilities(call, sums)


def _give_probabilities(call: Call, sums: Tensor) -> None:
    """Write the gradient of each row's probability to its slot, or (rows of several ranks) as they go back there."""
    if "order" in call.tensors:
        call["grad_probs"].view(-1).index_copy_(0, call["order"], sums.view(-1))
    else:
        call["grad_probs"].copy_(sums.view(-1))


def bias(call: Call) -> None:
    """``x[row] += bias of the row's expert``."""
    x = call.matrix("x")
    biases = call["bias"].view(-1, x.shape[1])
    scratch, count = call.scratch(), min(len(x), NORM_ROWS)
    numbers, experts = scratch.take(count, dtype=torch.int32), scratch.take(count, dtype=torch.int64)
    picked = scratch.take(count, x.shape[1], dtype=x.dtype)
    for block in blocks_of(len(x)):
        rows = block.stop - block.start
        _experts_of(call, call.first("x") + block.start, numbers[:rows], experts[:rows])
        torch.index_select(biases, 0, experts[:rows], out=picked[:rows])
        x[block].add_(picked[:rows])


def bias_backward(call: Call) -> None:
    """``out of an expert += sum of grad over its rows``, as a product with a one for every row at its expert."""
    grad, count = call.matrix("grad"), min(len(call["grad"]), NORM_ROWS)
    out = call["out"].view(len(call["ends"]), grad.shape[1])
    scratch, widened = call.scratch(), grad.dtype != out.dtype and not grad.is_cuda
    numbers, experts = scratch.take(count, dtype=torch.int32), scratch.take(count, dtype=torch.int64)
    ones = scratch.take(count, len(out), dtype=out.dtype if widened else grad.dtype)
    seats = call.context.decisions.layout.ep > 1
    wide = scratch.take(count, grad.shape[1], dtype=ones.dtype) if widened or seats else None
    empty = scratch.take(count, dtype=torch.bool) if seats else None
    for block in blocks_of(len(grad)):
        rows = block.stop - block.start
        _experts_of(call, call.first("grad") + block.start, numbers[:rows], experts[:rows])
        chosen = ones[:rows].zero_().scatter_(1, experts[:rows].unsqueeze(1), 1.0)
        given = grad[block] if wide is None else wide[:rows].copy_(grad[block])
        if empty is not None:
            torch.ge(numbers[:rows], call["ends"][-1], out=empty[:rows])
            given.masked_fill_(empty[:rows].unsqueeze(1), 0.0)
        if given.dtype == out.dtype:
            out.addmm_(chosen.t(), given)
        else:
            aten.addmm.dtype_out(out, chosen.t(), given, torch.float32, out=out)


def _experts_of(call: Call, first: int, numbers: Tensor, out: Tensor) -> None:
    """Write the expert of each of the dispatched rows from ``first`` on (empty seats: the last), and their numbers."""
    torch.arange(first, first + len(out), out=numbers)
    torch.searchsorted(call["ends"], numbers, right=True, out=out).clamp_(max=len(call["ends"]) - 1)


def out_bias(call: Call) -> None:
    """``out[token] +=`` the sum of its experts' probabilities times their biases; ranks of tp add equal parts.

    Slots without a seat (``expert_exchange.py``) count as zero, here and in both gradients.
    """
    out = call.matrix("out")
    every, biases, scratch = _all_probabilities(call)
    wide = None if out.dtype == torch.float32 else scratch.take(len(every), out.shape[1])
    seated = _Seated(call, scratch)
    for block in blocks_of(len(out)):
        rows = block.stop - block.start
        probs, share = seated.scattered(every, block), 1 / call.context.decisions.layout.expert_divided
        if wide is None:
            out[block].addmm_(probs, biases, alpha=share)
        else:
            out[block].copy_(wide[:rows].copy_(out[block]).addmm_(probs, biases, alpha=share))


def out_bias_dgrad(call: Call) -> None:
    """``out``, the gradients of the probabilities, ``+=`` grad x bias of the chosen experts; ranks add equal parts."""
    grad, out, experts = call.matrix("grad"), call.matrix("out"), call.matrix("experts")
    every, biases, scratch = _all_probabilities(call)
    wide = None if grad.dtype == torch.float32 else scratch.take(len(every), grad.shape[1])
    picked = scratch.take(len(every), out.shape[1])
    seated = _Seated(call, scratch)
    for block in blocks_of(len(out)):
        rows = block.stop - block.start
        given = grad[block] if wide is None else wide[:rows].copy_(grad[block])
        torch.mm(given, biases.t(), out=every[:rows])
        torch.gather(every[:rows], 1, experts[block], out=picked[:rows])
        out[block].add_(seated.cleared(picked[:rows], block), alpha=1 / call.context.decisions.layout.expert_divided)


def out_bias_wgrad(call: Call) -> None:
    """``out of an expert +=`` the sum of grad over its tokens, each times its probability."""
    grad, scratch = call.matrix("grad"), call.scratch()
    out, count = call["out"].view(experts_of(call).count, grad.shape[1]), min(len(grad), NORM_ROWS)
    every = scratch.take(count, len(out))
    wide = None if grad.dtype == torch.float32 else scratch.take(count, grad.shape[1])
    total = out if out.dtype == torch.float32 else scratch.take(*out.shape).zero_()
    cast = None if total is out else scratch.take(*out.shape, dtype=out.dtype)
    seated = _Seated(call, scratch)
    for block in blocks_of(len(grad)):
        given = grad[block] if wide is None else wide[: block.stop - block.start].copy_(grad[block])
        total.addmm_(seated.scattered(every, block).t(), given)
    if cast is not None:
        out.add_(cast.copy_(total))


def _all_probabilities(call: Call) -> tuple[Tensor, Tensor, Scratch]:
    """Return scratch for a block's probabilities of all experts, the biases in fp32, and the scratch that is left."""
    scratch, count, given = call.scratch(), experts_of(call).count, call["bias"]
    biases = given.view(count, -1)
    every = scratch.take(min(len(call["experts"]), NORM_ROWS), count)
    return every, biases if given.dtype == torch.float32 else scratch.take(*biases.shape).copy_(biases), scratch


class _Seated:
    """The slots of tokens that have a seat: all, unless ranks divide experts."""

    def __init__(self, call: Call, scratch: Scratch) -> None:
        self.call, self.seats = call, call.matrix("seats") if "seats" in call.tensors else None
        if self.seats is None:
            return
        count, slots = min(len(self.seats), NORM_ROWS), self.seats.shape[1]
        self.missing, self.probs = scratch.take(count, slots, dtype=torch.bool), scratch.take(count, slots)

    def cleared(self, values: Tensor, block: slice) -> Tensor:
        """Zero what a block's slots without a seat have in ``values`` (tokens, per_token)."""
        if self.seats is None:
            return values
        missing = self.missing[: len(values)]
        return values.masked_fill_(torch.eq(self.seats[block], len(self.call["sent"]), out=missing), 0.0)

    def scattered(self, every: Tensor, block: slice) -> Tensor:
        """Write the probabilities of a block of tokens at the columns of their experts, and 0 elsewhere."""
        rows, probs = every[: block.stop - block.start].zero_(), self.call.matrix("probs")[block]
        if self.seats is not None:
            probs = self.cleared(self.probs[: len(rows)].copy_(probs), block)
        return rows.scatter_(1, self.call.matrix("experts")[block], probs)


def _probabilities(call: Call, out: Tensor) -> Tensor:
    """Write the probability of every dispatched row; return them as one column. Rows of several ranks bring theirs."""
    if (gates := call.get("gates")) is not None:
        return gates.view(-1, 1)
    torch.index_select(call["probs"].view(-1), 0, call["order"], out=out)
    return out.unsqueeze(1)


def _weights(call: Call, n: int, k: int) -> Tensor:
    """Return the weights of all experts, each ``n`` output features by ``k`` input features."""
    return call["weight"].view(len(call["ends"]), n, k)


def _rows(call: Call) -> tuple[int, int]:
    """Return the first dispatched row of the operands, and how many they have."""
    role = "x" if "x" in call.tensors else "grad"
    return call.first(role), len(call[role])


def _runs(call: Call) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows in the operands, and these rows."""
    first, count = _rows(call)
    begin = 0
    for expert, end in enumerate(call["ends"].tolist()):
        rows = slice(max(begin, first) - first, min(end, first + count) - first)
        if rows.start < rows.stop:
            yield expert, rows
        begin = end


def _offsets(call: Call) -> Tensor:
    """Return where each expert's rows end in the operands, on the device."""
    first, count = _rows(call)
    return (call["ends"] - first).clamp_(0, count)
