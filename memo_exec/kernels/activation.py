"""Activations of the feed-forward block: GELU (exact or tanh), and SwiGLU and GeGLU over packed [gate; up] columns."""

from __future__ import annotations

import torch

from memo_exec.kernels.call import Call

aten = torch.ops.aten


def _approximate(call: Call) -> str:
    return "tanh" if call.context.model.activation == "gelu_tanh" else "none"


def gelu(call: Call) -> None:
    """``out = gelu(x)``."""
    aten.gelu.out(call["x"], approximate=_approximate(call), out=call["out"])


def gelu_backward(call: Call) -> None:
    """``grad_x = grad * gelu'(x)``."""
    aten.gelu_backward.grad_input(call["grad"], call["x"], approximate=_approximate(call), grad_input=call["grad_x"])


def swiglu(call: Call) -> None:
    """``out = silu(gate) * up``."""
    out = call.matrix("out")
    gate, up = torch.split(call["x"], out.shape[1], dim=1)
    aten.silu.out(gate, out=out)
    out.mul_(up)


def swiglu_backward(call: Call) -> None:
    """``grad_gate = grad * up * silu'(gate)``, ``grad_up = grad * silu(gate)``."""
    grad = call.matrix("grad")
    gate, up = torch.split(call["x"], grad.shape[1], dim=1)
    grad_gate, grad_up = torch.split(call["grad_x"], grad.shape[1], dim=1)
    torch.mul(grad, up, out=grad_gate)
    aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
    aten.silu.out(gate, out=grad_up)
    grad_up.mul_(grad)


def geglu(call: Call) -> None:
    """``out = gelu(gate) * up``, with the tanh approximation."""
    out = call.matrix("out")
    gate, up = torch.split(call["x"], out.shape[1], dim=1)
    aten.gelu.out(gate, approximate="tanh", out=out)
    out.mul_(up)


def geglu_backward(call: Call) -> None:
    """``grad_gate = grad * up * gelu'(gate)``, ``grad_up = grad * gelu(gate)``."""
    grad = call.matrix("grad")
    gate, up = torch.split(call["x"], grad.shape[1], dim=1)
    grad_gate, grad_up = torch.split(call["grad_x"], grad.shape[1], dim=1)
    torch.mul(grad, up, out=grad_up)
    aten.gelu_backward.grad_input(grad_up, gate, approximate="tanh", grad_input=grad_gate)
    aten.gelu.out(gate, approximate="tanh", out=grad_up)
    grad_up.mul_(grad)
