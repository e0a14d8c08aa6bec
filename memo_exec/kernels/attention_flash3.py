"""``flash3`` backend: flash-attn 3 (Hopper). It writes output and gradients into the plan's tensors.

We call the registered operators directly, as torch's own integration does. Two other ways in do not fit:

- ``flash_attn_interface._flash_attn_forward`` is a functional custom operator, so it may not return the output tensor
  that it was given.
- torch's registry (``activate_flash_attention_impl``) calls the same operators, but it switches the whole process and
  allocates the gradients that it returns.
"""

from __future__ import annotations

import importlib.util
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from memo_exec.kernels.attention_backend import AttentionBackward, Mask, Packing, packed_rows, scale_of

WINDOW = frozenset({"window_size_left", "window_size_right"})
FORWARD_ARGUMENTS = frozenset({"q", "k", "v", "out", "softmax_scale", "is_causal", "num_splits"}) | WINDOW
BACKWARD_ARGUMENTS = WINDOW | {
    *("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "softmax_scale", "is_causal", "deterministic")
}


def missing() -> str:
    """Return why this backend cannot run on this machine, or "" if it can."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        return "flash-attn 3 is not installed (its package is flash_attn_interface)"
    try:
        operators = _operators()
        for name, wanted in (("fwd", FORWARD_ARGUMENTS), ("bwd", BACKWARD_ARGUMENTS)):
            found = {argument.name for argument in getattr(operators, name).default._schema.arguments}
            if not wanted <= found:
                return f"flash-attn 3's {name} has no argument {', '.join(sorted(wanted - found))}"
    except (ImportError, OSError, AttributeError) as error:
        return f"flash-attn 3 cannot be imported: {error}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        return "flash-attn 3 needs compute capability 9.0"
    return ""


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, mask: Mask, scale: float | None = None
) -> None:
    """Write the output and its log-sum-exp; with a single split, so that the order of summation is fixed."""
    _, logsumexp, *_ = _operators().fwd(
        q, k, v, out=out, softmax_scale=scale_of(q, scale), is_causal=mask.causal, num_splits=1, **_window(mask)
    )
    lse.copy_(logsumexp.transpose(1, 2))


def backward(call: AttentionBackward) -> None:
    """Write the gradients of Q, K, V."""
    dq, dk, dv = call.grads
    _operators().bwd(
        call.grad,
        *call.qkv,
        call.out,
        call.lse.transpose(1, 2).contiguous(),
        dq=dq,
        dk=dk,
        dv=dv,
        softmax_scale=scale_of(call.out, call.scale),
        is_causal=call.mask.causal,
        deterministic=call.deterministic,
        **_window(call.mask),
    )


def forward_packed(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, packing: Packing, scale: float | None = None
) -> None:
    """Write the output and its log-sum-exp of packed documents, in one call. Not yet run on a GPU."""
    rows = packed_rows(q, k, v)
    _, logsumexp, *_ = _operators().fwd(
        *rows,
        out=out.flatten(0, 1),
        softmax_scale=scale_of(q, scale),
        is_causal=True,
        num_splits=1,
        **_varlen(packing),
    )
    lse.flatten(0, 1).copy_(logsumexp.transpose(0, 1))


def backward_packed(call: AttentionBackward, packing: Packing) -> None:
    """Write the gradients of Q, K, V of packed documents, in one call. Not yet run on a GPU."""
    dq, dk, dv = packed_rows(*call.grads)
    _operators().bwd(
        *packed_rows(call.grad, *call.qkv, call.out),
        call.lse.flatten(0, 1).transpose(0, 1).contiguous(),
        dq=dq,
        dk=dk,
        dv=dv,
        softmax_scale=scale_of(call.out, call.scale),
        is_causal=True,
        deterministic=call.deterministic,
        **_varlen(packing),
    )


def _varlen(packing: Packing) -> dict[str, Any]:
    """Return the arguments that say where documents end."""
    found: dict[str, Any] = {f"cu_seqlens_{side}": packing.ends for side in "qk"}
    return found | {f"max_seqlen_{side}": packing.longest for side in "qk"}


def _window(mask: Mask) -> dict[str, int]:
    """Return the arguments for a window; none without one."""
    left, right = mask.sides
    return {"window_size_left": left, "window_size_right": right} if mask.window else {}


def _operators() -> Any:
    """Return the namespace of flash-attn 3's operators; importing the package registers them."""
    import_module("flash_attn_interface")
    return torch.ops.flash_attn_3
