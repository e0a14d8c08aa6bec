"""Linear layers: products with a weight of shape (out, in), and their gradients for input, weight and bias.

And their low-rank adapters: ``scale (x A^T) B^T``, where A is (targets x rank, in) and B is (out of all targets, rank).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memo_exec.kernels.call import Call
from memo_sim.contract.adapters import Adapters
from memo_sim.program.ir.work import AdapterGemm
from memo_sim.program.operators.workspaces import NORM_ROWS


def linear(call: Call) -> None:
    """``out = x @ weight.T (+ bias)``."""
    x, out = call.matrix("x"), call.matrix("out")
    weight, bias = call["weight"].view(out.shape[1], x.shape[1]), call.get("bias")
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def linear_to_gate(call: Call) -> None:
    """``out = x @ weight.T (+ bias)``; ``gate`` gets the first half of its features."""
    linear(call)
    gate = call.matrix("gate")
    gate.copy_(call.matrix("out")[:, : gate.shape[1]])


def linear_from_gate(call: Call) -> None:
    """``out``: its first half is ``gate``, its second half ``x @ weight.T (+ bias)`` of the weight's second half."""
    x, out, gate = call.matrix("x"), call.matrix("out"), call.matrix("gate")
    kept, half = out[:, : gate.shape[1]], out[:, gate.shape[1] :]
    kept.copy_(gate)
    weight, bias = call["weight"].view(out.shape[1], x.shape[1])[gate.shape[1] :], call.get("bias")
    if bias is None:
        torch.mm(x, weight.t(), out=half)
    else:
        torch.addmm(bias[gate.shape[1] :], x, weight.t(), out=half)


def linear_add(call: Call) -> None:
    """``out += x @ weight.T``: one term of a sum of products."""
    x, out = call.matrix("x"), call.matrix("out")
    out.addmm_(x, call["weight"].view(out.shape[1], x.shape[1]).t())


def linear_dgrad(call: Call) -> None:
    """``out = grad @ weight``: the gradient of the input."""
    grad, out = call.matrix("grad"), call.matrix("out")
    torch.mm(grad, call["weight"].view(grad.shape[1], out.shape[1]), out=out)


def linear_dgrad_add(call: Call) -> None:
    """``out += grad @ weight``: one term of an input's gradient."""
    grad, out = call.matrix("grad"), call.matrix("out")
    out.addmm_(grad, call["weight"].view(grad.shape[1], out.shape[1]))


def linear_wgrad(call: Call) -> None:
    """``out += grad.T @ x``: the gradient of the weight, summed in the dtype of ``out`` (fp32, or that of ``grad``)."""
    add_weight_gradient(call, call.matrix("grad"), call.matrix("x"))


def add_weight_gradient(call: Call, grad: Tensor, x: Tensor) -> None:
    """Add the gradient of a weight to the call's ``out``, as ``linear_wgrad`` does."""
    add_products(call, grad, x, [(slice(None), slice(None), call["out"].view(grad.shape[1], x.shape[1]))])


def add_products(call: Call, grad: Tensor, x: Tensor, parts: list[tuple[slice, slice, Tensor]]) -> None:
    """Add ``grad.T @ x`` of some features of both to an output for each part, (features of grad, of x, output).

    Sums are in the dtype of the output.
    """
    if grad.dtype == parts[0][2].dtype:
        for of_grad, of_x, out in parts:
            out.addmm_(grad[:, of_grad].t(), x[:, of_x])
    elif grad.is_cuda:
        for of_grad, of_x, out in parts:
            torch.ops.aten.addmm.dtype_out(out, grad[:, of_grad].t(), x[:, of_x], torch.float32, out=out)
    else:
        scratch, rows = call.scratch(), min(len(x), NORM_ROWS)
        wide_grad, wide_x = scratch.take(rows, grad.shape[1]), scratch.take(rows, x.shape[1])
        for first in range(0, len(x), rows):
            count = min(rows, len(x) - first)
            wide_grad[:count].copy_(grad[first : first + count])
            wide_x[:count].copy_(x[first : first + count])
            for of_grad, of_x, out in parts:
                out.addmm_(wide_grad[:count, of_grad].t(), wide_x[:count, of_x])


def linear_wgrad_product(call: Call) -> None:
    """``out = grad.T @ x``: the gradient of the weight in a tensor of its own, as autograd makes it."""
    grad, x = call.matrix("grad"), call.matrix("x")
    torch.mm(grad.t(), x, out=call["out"].view(grad.shape[1], x.shape[1]))


def bias_backward(call: Call) -> None:
    """``out += sum of grad over rows``, where the sum over rows is in fp32."""
    grad, out = call.matrix("grad"), call["out"]
    scratch = call.scratch()
    total = scratch.take(grad.shape[1])
    if grad.dtype == total.dtype:
        torch.sum(grad, 0, out=total)
        out.add_(total)
        return
    rows = min(len(grad), NORM_ROWS)
    wide = scratch.take(rows, grad.shape[1])
    for block in torch.split(grad, rows):
        wide[: len(block)].copy_(block)
        torch.sum(wide[: len(block)], 0, out=total)
        out.add_(total)


def lora_a(call: Call) -> None:
    """``out = scale x @ weight.T``: the low-rank rows of all targets of a product, side by side."""
    x, out = call.matrix("x"), call.matrix("out")
    weight = call["weight"].view(out.shape[1], x.shape[1])
    torch.addmm(out, x, weight.t(), beta=0, alpha=_adapters(call).scale, out=out)


def lora_b(call: Call) -> None:
    """``out += x @ weight.T`` for each target, in its features of ``out``."""
    x, out = call.matrix("x"), call.matrix("out")
    for features, low, weight in _targets(call, call["weight"]):
        out[:, features].addmm_(x[:, low], weight.t())


def lora_b_dgrad(call: Call) -> None:
    """``out = scale grad @ weight`` for each target: the gradient of the low-rank rows."""
    grad, out = call.matrix("grad"), call.matrix("out")
    for features, low, weight in _targets(call, call["weight"]):
        into = out[:, low]
        torch.addmm(into, grad[:, features], weight, beta=0, alpha=_adapters(call).scale, out=into)


def lora_b_wgrad(call: Call) -> None:
    """``out += grad.T @ x`` for each target."""
    add_products(call, call.matrix("grad"), call.matrix("x"), list(_targets(call, call["out"])))


def _adapters(call: Call) -> Adapters:
    adapters = call.context.decisions.lora
    assert adapters is not None  # a program has adapters' products with adapters alone
    return adapters


def _targets(call: Call, flat: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield for each target its features of the product's result, those of the low-rank rows, and its rows of B."""
    rank, work, begun = _adapters(call).rank, call.instruction.work, 0
    assert isinstance(work, AdapterGemm)
    sides = flat.view(-1, rank)
    for number, (first, width) in enumerate(work.columns):
        rows = slice(begun, begun + width)
        yield slice(first, first + width), slice(number * rank, (number + 1) * rank), sides[rows]
        begun += width
