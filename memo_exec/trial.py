"""A kernel tried on a few tokens before a run allocates anything: what is installed may still not run here.

A library built for another architecture, a cuDNN without this head size, a Triton without a compiler: all can be
imported. So a short causal call is played forward and backward and compared with attention by its definition

    out = softmax(q k^T / sqrt(d)) v,  dv = p^T do,  ds = p (do v^T - rowsum(do out)),  dq = ds k,  dk = ds^T q

which shows a wrong alignment or a NaN as well as an exception.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from memo_exec.kernels import KERNELS, Call, Context
from memo_exec.kernels.attention import BACKENDS
from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_sim.contract.catalog import load_model
from memo_sim.contract.hardware import DtypeName
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels, RowwiseKernel
from memo_sim.program.instruction import Instruction, Lane
from memo_sim.program.work import Rowwise

TOKENS = 256

TOLERANCE = 0.03
"""Relative error of a result, in the Euclidean norm: bf16 gives a half of a percent, a wrong mask a half of one."""

MOST_TEXT = 200
"""Characters of a library's own message that are passed on."""


@dataclass(frozen=True)
class Heads:
    """The heads that attention is tried with."""

    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: Model) -> Heads:
        """Return one group of a model's query heads with its key/value head."""
        return cls(model.heads // model.kv_heads, 1, model.head_dim)


def attention_fails(
    kernel: str, heads: Heads, dtype: DtypeName, device: torch.device, *, deterministic: bool = False
) -> str:
    """Return why an attention kernel cannot compute these heads on ``device``; "" when it can."""

    def play() -> str:
        backend = import_module(BACKENDS[kernel])
        generator = torch.Generator().manual_seed(0)
        width = heads.heads + 2 * heads.kv_heads
        packed = torch.randn(1, TOKENS, width, heads.head_dim, generator=generator).to(device, TORCH_DTYPES[dtype])
        parts = [heads.heads, heads.kv_heads, heads.kv_heads]
        q, k, v = torch.split(packed, parts, dim=2)
        grad = torch.randn(q.shape, generator=generator).to(device, packed.dtype)
        out, lse = torch.empty_like(grad), torch.empty(q.shape[:3], device=device)
        grads = torch.split(torch.empty_like(packed), parts, dim=2)
        backend.forward(q, k, v, out, lse, causal=True)
        backend.backward(grad, (q, k, v), out, lse, grads, causal=True, deterministic=deterministic)
        return _difference((out, lse, *grads), _definition(grad.float(), q.float(), k.float(), v.float()))

    return _tried(play)


def triton_fails(device: torch.device) -> str:
    """Return why Triton's kernels cannot be compiled and played on ``device``; "" when they can."""

    def play() -> str:
        results: list[Tensor] = []
        x = torch.linspace(-3, 3, TOKENS * 64).view(TOKENS, 64).to(device, torch.bfloat16)
        model = load_model("gpt-tiny")  # of which a kernel reads its kind of activation
        choices: tuple[RowwiseKernel, ...] = ("torch", "triton")
        for rowwise in choices:
            decisions = Decisions(model=model, seq_tokens=TOKENS, kernels=Kernels(rowwise=rowwise))
            instruction = Instruction("trial", "gelu", Lane.COMPUTE, Rowwise("gelu", TOKENS, 0, 0), ())
            results.append(torch.empty_like(x))
            KERNELS["gelu"](Call(instruction, Context(decisions, device), {"x": x, "out": results[-1]}))
        return _difference(results[1:], results[:1])

    return _tried(play)


def _tried(play: Callable[[], str]) -> str:
    """Return what ``play`` says, or the first line of what it raises."""
    try:
        with torch.inference_mode():
            return play()
    except Exception as error:  # whatever a library raises, it cannot be used
        first = (str(error).strip().splitlines() or [""])[0]
        return f"it was tried and failed: {type(error).__name__}: {first[:MOST_TEXT]}"


def _definition(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return output, log-sum-exp and the gradients of Q, K, V; all fp32, (1, tokens, heads, head_dim)."""
    shared, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    queries, incoming = (x[0].transpose(0, 1) for x in (q, grad))
    keys, values = (x[0].transpose(0, 1).repeat_interleave(shared, 0) for x in (k, v))
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=q.device).triu(1)
    scores = (queries @ keys.mT * scale).masked_fill(later, -torch.inf)
    weights = scores.softmax(-1)
    out = weights @ values
    slopes = weights * (incoming @ values.mT - (incoming * out).sum(-1, keepdim=True)) * scale
    dk, dv = (x.unflatten(0, (-1, shared)).sum(1) for x in (slopes.mT @ queries, weights.mT @ incoming))
    found = (out, scores.logsumexp(-1).unsqueeze(-1), slopes @ keys, dk, dv)
    out, lse, *grads = (x.transpose(0, 1).unsqueeze(0) for x in found)
    return [out, lse.squeeze(-1), *grads]


def _difference(found: tuple[Tensor, ...] | list[Tensor], wanted: list[Tensor]) -> str:
    """Return by how much results are not what they should be; "" when they are."""
    errors = [
        float((one.float() - true.float()).norm() / true.float().norm())
        for one, true in zip(found, wanted, strict=True)
    ]
    wrong = [error for error in errors if not error <= TOLERANCE]  # NaN is wrong, too
    return f"it was tried and computes something else: {wrong[0]:.1%} off" if wrong else ""
