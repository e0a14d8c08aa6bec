"""``flash4`` backend: flash-attn 4 (CuTe DSL). It writes output and gradients into the plan's tensors.

All arguments are passed by name, because their positions changed between beta releases. The return value of forward
changed too, so it is ignored. The library compiles a kernel at its first call for each class of shapes.
"""

from __future__ import annotations

import importlib.util
import inspect
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from memo_exec.kernels.attention_backend import AttentionBackward, Mask, scale_of

MODULE = "flash_attn.cute.interface"
WINDOW = frozenset({"window_size_left", "window_size_right"})
FORWARD_ARGUMENTS = frozenset({"q", "k", "v", "softmax_scale", "causal", "return_lse", "out", "lse"}) | WINDOW
BACKWARD_ARGUMENTS = WINDOW | {
    *("q", "k", "v", "out", "dout", "lse", "softmax_scale", "causal", "deterministic", "dq", "dk", "dv")
}
CAPABILITIES = (9, 10, 11, 12)
"""Major compute capabilities for which the library has a backward kernel."""


def missing() -> str:
    """Return why this backend cannot run on this machine, or "" if it can."""
    try:
        if importlib.util.find_spec(MODULE) is None:
            return "flash-attn-4 is not installed"
        interface = _interface()
        for name, wanted in (("_flash_attn_fwd", FORWARD_ARGUMENTS), ("_flash_attn_bwd", BACKWARD_ARGUMENTS)):
            found = inspect.signature(getattr(interface, name)).parameters.keys()
            if not wanted <= found:
                return f"flash-attn-4's {name} has no argument {', '.join(sorted(wanted - found))}"
    except ModuleNotFoundError as error:
        return f"flash-attn-4 is not installed: {error}"
    except (ImportError, OSError, AttributeError) as error:
        return f"flash-attn-4 cannot be imported: {error}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in CAPABILITIES:
        return "flash-attn-4 needs compute capability 9.0 or higher"
    return ""


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, mask: Mask, scale: float | None = None
) -> None:
    """Write the output and its log-sum-exp; the library wants the log-sum-exp of one head's rows contiguous."""
    batch, tokens, heads, _ = q.shape
    logsumexp = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    _interface()._flash_attn_fwd(
        q=q,
        k=k,
        v=v,
        softmax_scale=scale_of(q, scale),
        return_lse=True,
        out=out,
        lse=logsumexp,
        **_masked(mask),
    )
    lse.copy_(logsumexp.transpose(1, 2))


def backward(call: AttentionBackward) -> None:
    """Write the gradients of Q, K, V."""
    q, k, v = call.qkv
    dq, dk, dv = call.grads
    _interface()._flash_attn_bwd(
        q=q,
        k=k,
        v=v,
        out=call.out,
        dout=call.grad,
        lse=call.lse.transpose(1, 2).contiguous(),
        softmax_scale=scale_of(call.out, call.scale),
        deterministic=call.deterministic,
        dq=dq,
        dk=dk,
        dv=dv,
        **_masked(call.mask),
    )


def _masked(mask: Mask) -> dict[str, Any]:
    """Return the arguments for a mask; a window is given by its two sides alone."""
    if not mask.window:
        return {"causal": mask.causal}
    left, right = mask.sides
    return {"causal": False, "window_size_left": left, "window_size_right": right}


def _interface() -> Any:
    return import_module(MODULE)
