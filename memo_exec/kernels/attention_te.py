"""``te-fused`` backend: cuDNN's fused attention through transformer-engine. It copies the library's results.

transformer-engine takes a layout's name and ignores strides. It would read views of the packed Q, K, V as if they were
contiguous, so this module copies operands that are not. Versions up to 2.15 take the gradients' dtype as an argument,
later versions take the layouts of the results. The cuDNN backend is passed explicitly, so no other one can run.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from memo_exec.kernels.attention_backend import AttentionBackward, Mask, scale_of

MODULE = "transformer_engine.pytorch.cpp_extensions.fused_attn"
LAYOUT, FORMAT = "bshd_bshd_bshd", "bshd"
BACKEND = "F16_arbitrary_seqlen"
LEAST_CAPABILITY = 8


def missing() -> str:
    """Return why this backend cannot run on this machine, or "" if it can."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "transformer-engine is not installed"
    try:
        library = import_module(MODULE)
        wanted = (library.fused_attn_fwd, library.fused_attn_bwd, library.FusedAttnBackend[BACKEND])
    except (ImportError, OSError, AttributeError, KeyError) as error:
        return f"transformer-engine's fused attention cannot be imported: {error}"
    if None in wanted:
        return "transformer-engine lacks its fused attention"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < LEAST_CAPABILITY:
        return f"transformer-engine's fused attention needs compute capability {LEAST_CAPABILITY}.0 or higher"
    return ""


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, mask: Mask, scale: float | None = None
) -> None:
    """Write the output and its log-sum-exp."""
    call = import_module(MODULE).fused_attn_fwd
    result, (logsumexp, *_), *_ = call(
        is_training=True,
        q=q.contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        **_shared(call, (q, k), mask, scale),
        **_known(call, o_format=FORMAT),
    )
    out.copy_(result.view(out.shape))
    lse.copy_(logsumexp.view(lse.transpose(1, 2).shape).transpose(1, 2))


def backward(operands: AttentionBackward) -> None:
    """Write the gradients of Q, K, V; the library asks for a random state but does not read it without dropout."""
    call = import_module(MODULE).fused_attn_bwd
    q, k, v = (x.contiguous() for x in operands.qkv)
    found = call(
        q=q,
        k=k,
        v=v,
        o=operands.out.contiguous(),
        d_o=operands.grad.contiguous(),
        aux_ctx_tensors=[
            operands.lse.transpose(1, 2).unsqueeze(-1).contiguous(),
            torch.zeros(2, dtype=torch.int64, device=q.device),
        ],
        deterministic=operands.deterministic,
        **_shared(call, (q, k), operands.mask, operands.scale),
        **_known(call, o_format=FORMAT, do_format=FORMAT, dqkv_layout=LAYOUT),
        **_gradient_dtype(call, q.dtype),
    )
    for target, result in zip(operands.grads, found[:3], strict=True):
        target.copy_(result.view(target.shape))


def _shared(call: Callable[..., Any], rows: tuple[Tensor, Tensor], mask: Mask, scale: float | None) -> dict[str, Any]:
    """Return the arguments that forward and backward share: lengths, layout, scale, mask."""
    q, k = rows
    causal = "causal_bottom_right" if mask.window else "causal"
    return {
        "max_seqlen_q": q.shape[1],
        "max_seqlen_kv": k.shape[1],
        "cu_seqlens_q": _starts(q),
        "cu_seqlens_kv": _starts(k),
        "fake_dtype": q.dtype,
        "fused_attention_backend": import_module(MODULE).FusedAttnBackend[BACKEND],
        "attn_scale": scale_of(q, scale),
        "dropout": 0.0,
        "qkv_layout": LAYOUT,
        "attn_bias_type": "no_bias",
        "attn_mask_type": causal if mask.causal else "no_mask",
        "window_size": (mask.sides[0], 0) if mask.causal else (-1, -1),
        **(_known(call, bottom_right_diagonal=True) if mask.window else {}),
    }


def _starts(x: Tensor) -> Tensor:
    """Return the first row of each sequence, followed by the end of the last sequence."""
    batch, tokens = x.shape[:2]
    return torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=x.device)


def _known(call: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return those of ``arguments`` that the installed version accepts."""
    parameters = inspect.signature(call).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def _gradient_dtype(call: Callable[..., Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the argument for the gradients' dtype in the installed version's form; empty if it takes none."""
    if "dqkv_dtype" not in inspect.signature(call).parameters:
        return {}
    return {"dqkv_dtype": import_module("transformer_engine.pytorch.constants").TE_DType[dtype]}
