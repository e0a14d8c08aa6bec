"""Memory-bound kernels: copies on the device and between device and host, zeroing, the residual sum."""

from __future__ import annotations

import torch

from memo_exec.kernels.call import Call


def copy(call: Call) -> None:
    """``target = source`` on the device."""
    call["target"].copy_(call["source"])
    if call.context.fp8 is not None:
        call.context.fp8.carry(call["source"], call["target"])


def transfer(call: Call) -> None:
    """``target = source`` between device and host; asynchronous if the host tensor is pinned."""
    call["target"].copy_(call["source"], non_blocking=True)
    if call.context.fp8 is not None:
        call.context.fp8.carry(call["source"], call["target"])


def zero(call: Call) -> None:
    """``target = 0``."""
    call["target"].zero_()


def residual_add(call: Call) -> None:
    """``out = x + y (+ bias)``."""
    out, bias = call["out"], call.get("bias")
    torch.add(call["x"], call["y"], out=out)
    if bias is not None:
        out.add_(bias)
