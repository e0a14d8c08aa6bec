"""Checks that a layer works row by row outside attention, before its gradients depend on it.

The layer runs on a few tokens with a made-up attention output. The gradient of one half of the rows with respect to the
other half must then be zero, exactly: an entry that is not zero is a dependency between tokens. A layer that draws
random numbers is found too, because recompute would draw others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from memo_exec.decoder_layers.attention_calls import AttentionCall, handled_by
from memo_sim.contract.errors import CannotRun

TOKENS = 8


def refuse_dropout(layer: nn.Module, where: str) -> None:
    """Refuse a layer with dropout modules.

    Raises:
        CannotRun: when there is one whose probability is not 0.
    """
    for name, module in layer.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise CannotRun(
                "token-wise alpha cannot play dropout: recompute would draw other numbers",
                where=f"{where}.{name}",
                got=f"p = {module.p:g}",
                wanted="p = 0",
            )


def check_rows(layer: nn.Module, forward: Callable[..., Any], x: Tensor, named: Mapping[str, Any], where: str) -> None:
    """Check one layer on an input of a few tokens (batch, tokens, hidden).

    Raises:
        CannotRun: when row blocks cannot play the layer, with the reason.
    """
    modes = {module: module.training for module in layer.modules()}
    layer.train()
    try:
        with torch.enable_grad():
            _check_rows(forward, x, named, where)
    finally:
        for module, mode in modes.items():
            module.training = mode


def _check_rows(forward: Callable[..., Any], x: Tensor, named: Mapping[str, Any], where: str) -> None:
    calls: list[AttentionCall] = []
    given: list[Tensor] = []

    def attention(call: AttentionCall) -> Tensor:
        calls.append(call)
        batch, heads, tokens, _ = call.q.shape
        given.append(_made_up((batch, tokens, heads, call.v.shape[-1]), call.q))
        return given[-1]

    rows, half = x.shape[1], x.shape[1] // 2
    x = _made_up(tuple(x.shape), x)
    before = _random_state(x.device)
    with handled_by(attention):
        found = forward(x, **named)
    if not torch.equal(before, _random_state(x.device)):
        raise _refuse("it draws random numbers, and recompute would draw others", where)
    if len(calls) != 1:
        also = "; linear attention and state spaces mix tokens in other ways" if not calls else ""
        raise _refuse(f"it calls transformers' attention functions {len(calls)} times, wanted once{also}", where)
    if calls[0].named.get("dropout"):
        raise _refuse("attention has dropout: set the configuration's attention_dropout to 0", where)
    if calls[0].q.shape[2] != rows or calls[0].k.shape[2] != rows:
        raise _refuse("its attention reads keys that are not those of its own tokens", where)
    out = found[0] if isinstance(found, tuple) else found
    results = [(out, 1)] + [(tensor, 2) for tensor in (calls[0].q, calls[0].k, calls[0].v)]
    for mine, other in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
        parts = [tensor.narrow(dim, *_span(mine, rows)) for tensor, dim in results if tensor.requires_grad]
        total = torch.stack([_weighted(part) for part in parts]).sum()
        gradients = torch.autograd.grad(total, [x, given[0]], retain_graph=True, allow_unused=True)
        if any(gradient is not None and gradient[:, other].count_nonzero() for gradient in gradients):
            raise _refuse("a token's result depends on other tokens outside attention", where)


def _span(rows: slice, tokens: int) -> tuple[int, int]:
    first, end, _ = rows.indices(tokens)
    return first, end - first


def _weighted(tensor: Tensor) -> Tensor:
    return (tensor.float() * torch.linspace(1, 2, tensor.numel(), device=tensor.device).view(tensor.shape)).sum()


def _made_up(shape: Iterable[int], like: Tensor) -> Tensor:
    """Return numbers that differ from each other, without drawing any."""
    size = torch.Size(shape)
    values = torch.sin(torch.arange(size.numel(), device=like.device, dtype=torch.float32) * 0.7).view(size)
    return values.to(like.dtype).requires_grad_()


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _refuse(what: str, where: str) -> CannotRun:
    return CannotRun(f"token-wise alpha cannot play this layer: {what}", where=where)
