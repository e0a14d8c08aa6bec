"""Linear layers: products with a weight of shape (out, in), and their gradients for input, weight and bias."""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.kernels.call import Call
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
    out = call["out"].view(grad.shape[1], x.shape[1])
    if grad.dtype == out.dtype:
        out.addmm_(grad.t(), x)
    elif grad.is_cuda:
        torch.ops.aten.addmm.dtype_out(out, grad.t(), x, torch.float32, out=out)
    else:
        scratch, rows = call.scratch(), min(len(x), NORM_ROWS)
        wide_grad, wide_x = scratch.take(rows, grad.shape[1]), scratch.take(rows, x.shape[1])
        for first in range(0, len(x), rows):
            count = min(rows, len(x) - first)
            wide_grad[:count].copy_(grad[first : first + count])
            wide_x[:count].copy_(x[first : first + count])
            out.addmm_(wide_grad[:count].t(), wide_x[:count])


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
