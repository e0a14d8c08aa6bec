"""Selects the torch attention backend that runs forward and backward of a shape fastest on this device."""

from __future__ import annotations

import time

import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from memo_sim.contract.errors import CannotRun
from memo_sim.contract.model import Model

TRIED_TOKENS = 8192
"""Most tokens with which backends are timed; rates hardly change above."""
TRIES = 3
FLASH_ELEMENTS = 2**31
"""Most elements for torch's flash backward, which indexes batch x heads x tokens x head_dim with 32 bits."""


def best_backend(model: Model, tokens: int, device: torch.device, dtype: torch.dtype) -> SDPBackend:
    """Return the fastest backend for a causal sequence of ``tokens``; on a CPU there is only one.

    Raises:
        CannotRun: if no backend runs.
    """
    if device.type == "cpu":
        return SDPBackend.FLASH_ATTENTION
    seconds: dict[SDPBackend, float] = {}
    reasons = []
    for backend in candidates(model, tokens):
        try:
            seconds[backend] = _seconds(model, min(tokens, TRIED_TOKENS), device, dtype, backend)
        except RuntimeError as error:  # torch has no narrower error for "no available kernel"
            reasons.append(f"{backend.name}: {error}")
    if not seconds:
        raise CannotRun("no fused attention backend runs for this shape", where=model.name, got="; ".join(reasons))
    torch.cuda.empty_cache()
    return min(seconds, key=lambda backend: seconds[backend])


def candidates(model: Model, tokens: int) -> list[SDPBackend]:
    """Return the backends that can run ``tokens`` tokens."""
    found = [SDPBackend.CUDNN_ATTENTION]
    if model.heads * -(-tokens // 128) * 128 * max(model.head_dim, 32) <= FLASH_ELEMENTS:
        found.append(SDPBackend.FLASH_ATTENTION)
    return found


def _seconds(model: Model, tokens: int, device: torch.device, dtype: torch.dtype, backend: SDPBackend) -> float:
    heads = (model.heads, model.kv_heads, model.kv_heads)
    q, k, v = (
        torch.randn(1, tokens, n, model.head_dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for n in heads
    )
    times = []
    for _ in range(TRIES + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with sdpa_kernel([backend]):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=model.heads != model.kv_heads)
        out.sum().backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])
