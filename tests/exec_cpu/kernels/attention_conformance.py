"""The conformance test that an attention backend must pass before its first use, on any device.

It covers causal alignment, the log-sum-exp, lengths that are no multiple of the tile, grouped queries and head sizes.
As in the executor, forward and backward run on one group of heads in packed tensors: either Q, K and V together, or
queries separate from the KV cache. The results must be right, and all other heads must stay untouched.

Tolerances refer to the errors of plain products in the same dtype: at most twice their root mean square, and at most
three times their worst element (flash-attention's own factors; the worst of a few thousand elements varies). Every
backend sums the log-sum-exp in fp32, so it may differ by 1e-3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memo_exec.kernels.attention_backend import AttentionBackward, Mask
from tests.exec_cpu.kernels import attention_reference as reference

Triple = tuple[Tensor, Tensor, Tensor]
LSE_ERROR = 1e-3
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-9}
"""Rounding error that is always allowed, relative to the root mean square; plain products may show less by chance."""


@dataclass(frozen=True)
class Case:
    """One call: numbers of query and key tokens, heads of a group; ``groups`` are packed, and the last one runs."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    keys: int = 0
    """Number of key tokens; 0 means as many as queries, with a causal mask."""
    batch: int = 1
    groups: int = 2
    window: int = 0
    """How many keys a query sees at most; the queries belong to the last keys."""
    apart: bool = False
    """Whether queries are in a tensor separate from keys and values; calls without a mask always are."""

    @property
    def causal(self) -> bool:
        """Whether later keys are masked."""
        return not self.keys or bool(self.window)

    @property
    def mask(self) -> Mask:
        """The mask of the call."""
        return Mask(self.causal, self.window)


CASES = [
    Case(128, 2, 2, 64, batch=2),
    Case(200, 4, 2, 64),
    Case(333, 4, 1, 128, batch=2),
    Case(257, 2, 2, 256, groups=1),
    Case(384, 6, 2, 128, groups=3),
    Case(192, 4, 2, 128, keys=96),
    Case(130, 2, 1, 64, keys=65, batch=2),
    Case(96, 4, 2, 64, keys=288, batch=2),
    Case(200, 4, 2, 64, apart=True),
    Case(129, 2, 1, 128, keys=640),
]

WINDOWS = [
    Case(300, 4, 2, 64, window=7, batch=2),
    Case(513, 2, 1, 128, window=200),
    Case(200, 4, 2, 64, window=1000),
    Case(130, 2, 1, 64, keys=193, window=64, batch=2),
    Case(160, 2, 2, 64, keys=170, window=64),
]
"""Calls with a window, with the keys that precede the queries or without; windows longer than the keys too."""


@dataclass
class Operands:
    """Packed tensors, and views of the last group's heads as (batch, tokens, heads, head_dim)."""

    case: Case
    device: str
    dtype: torch.dtype

    def __post_init__(self) -> None:
        """Make random inputs, and results that are full of NaN."""
        case = self.case
        generator = torch.Generator(self.device).manual_seed(case.tokens)
        q_heads, kv_heads = case.heads * case.groups, case.kv_heads * case.groups
        rows = {"q": case.tokens, "kv": case.keys or case.tokens}
        self.results: list[Tensor] = []

        def made(rows: int, heads: int, *, random: bool) -> Tensor:
            shape = case.batch, rows, heads, case.head_dim
            if not random:
                self.results.append(torch.full(shape, torch.nan, dtype=self.dtype, device=self.device))
                return self.results[-1]
            return torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device)

        def packed(*, random: bool) -> Triple:
            if not case.keys and not case.apart:
                both = made(rows["q"], q_heads + 2 * kv_heads, random=random)
                q, k, v = torch.split(both, [q_heads, kv_heads, kv_heads], dim=2)
            else:
                q = made(rows["q"], q_heads, random=random)
                k, v = torch.split(made(rows["kv"], 2 * kv_heads, random=random), kv_heads, dim=2)
            return q[:, :, -case.heads :], k[:, :, -case.kv_heads :], v[:, :, -case.kv_heads :]

        self.qkv = packed(random=True)
        self.grads = packed(random=False)
        self.grad = made(rows["q"], q_heads, random=True)[:, :, -case.heads :]
        self.out = made(rows["q"], q_heads, random=False)[:, :, -case.heads :]
        self.all_lse = torch.full(
            (case.batch, case.tokens, q_heads), torch.nan, dtype=torch.float32, device=self.device
        )
        self.lse = self.all_lse[:, :, -case.heads :]

    def written(self) -> int:
        """Return the number of elements, in all results, that are no longer NaN."""
        return sum(int((~tensor.isnan()).sum()) for tensor in (*self.results, self.all_lse))

    def wanted_written(self) -> int:
        """Return the number of elements that the group's results have."""
        return sum(tensor.numel() for tensor in (*self.grads, self.out, self.lse))


def faults(
    backend: Any, case: Case, *, device: str = "cpu", dtype: torch.dtype = torch.float32, deterministic: bool = False
) -> list[str]:
    """Return the faults of ``backend`` in one case, as sentences."""
    operands = Operands(case, device, dtype)
    with torch.inference_mode():
        backend.forward(*operands.qkv, operands.out, operands.lse, mask=case.mask)
        wide = tuple(x.double() for x in operands.qkv)
        out, lse = reference.forward(*wide, causal=case.causal, window=case.window)
        plain_out, plain_lse = reference.forward(*operands.qkv, causal=case.causal, window=case.window)
        found = _beyond("out", operands.out, out, plain_out)
        if not (operands.lse - lse).abs().max() <= LSE_ERROR:
            found.append(f"lse: off by {(operands.lse - lse).abs().max():.3g}")
        operands.out.copy_(out)  # backward starts from correct values, so that only backward itself is tested
        operands.lse.copy_(lse)
        backend.backward(
            AttentionBackward(
                operands.grad,
                operands.qkv,
                operands.out,
                operands.lse,
                operands.grads,
                case.mask,
                deterministic=deterministic,
            )
        )
        wanted = reference.backward(operands.grad.double(), wide, out, lse, causal=case.causal, window=case.window)
        plain = reference.backward(
            operands.grad, operands.qkv, plain_out, plain_lse, causal=case.causal, window=case.window
        )
    for name, gradient, true, rough in zip(("dq", "dk", "dv"), operands.grads, wanted, plain, strict=True):
        found += _beyond(name, gradient, true, rough)
    if operands.written() != operands.wanted_written():
        found.append(f"{operands.written()} elements written, the group has {operands.wanted_written()}")
    return found


def _beyond(name: str, found: Tensor, wanted: Tensor, plain: Tensor) -> list[str]:
    """Return a fault if ``found`` is further from ``wanted`` than ``plain`` is, times the allowed factors."""
    errors, rough, least = found - wanted, plain - wanted, ROUNDING[found.dtype] * wanted.square().mean().sqrt()
    mean, mean_allowed = errors.square().mean().sqrt(), 2 * rough.square().mean().sqrt() + least
    worst, worst_allowed = errors.abs().max(), 3 * rough.abs().max() + least
    if mean <= mean_allowed and worst <= worst_allowed:
        return []
    return [f"{name}: off by {worst:.3g} (mean {mean:.3g}), allowed {worst_allowed:.3g} (mean {mean_allowed:.3g})"]
