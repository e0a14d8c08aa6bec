"""Row-wise operators as model code writes them: forward, and forward with backward, eager and compiled.

The formulas are those of public model code: Hugging Face's Llama (norm, rotary, SwiGLU), torchtitan's Llama (complex
rotary, ``nn.RMSNorm``), MPT-style GPT (LayerNorm in bf16 or in fp32, GELU), and the fp32 loss of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.frameworks.measure import Measured, measured

HEAD_DIM = 128
Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class Subject:
    """A function of tensors; ``tensors(count)`` of them are activations, the last ``weights`` are row vectors."""

    name: str
    forward: Forward
    activations: int = 1
    weights: int = 0


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm in the activations' dtype."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias)


def layer_norm_fp32(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm as autocast runs it: in fp32, between two casts."""
    return functional.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float()).to(x.dtype)


def rms_norm_written(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as Hugging Face's Llama writes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * wide.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as torch's module runs it."""
    return functional.rms_norm(x, (x.shape[-1],), weight)


def rotary_written(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding as Hugging Face writes it; ``cos`` and ``sin`` have one row per token."""
    heads = q.view(q.shape[0], -1, HEAD_DIM)
    half = torch.cat((-heads[..., HEAD_DIM // 2 :], heads[..., : HEAD_DIM // 2]), dim=-1)
    return (heads * cos[:, None] + half * sin[:, None]).view(q.shape)


def rotary_complex(q: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding as torchtitan writes it: complex products in fp32."""
    pairs = torch.view_as_complex(q.float().view(q.shape[0], -1, HEAD_DIM // 2, 2))
    return torch.view_as_real(pairs * angles[:, None]).view(q.shape).to(q.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's activation."""
    return functional.silu(gate) * up


SUBJECTS = (
    Subject("residual", torch.add, 2),
    Subject("gelu", functional.gelu),
    Subject("silu_mul", silu_mul, 2),
    Subject("layer_norm", layer_norm, 1, 2),
    Subject("layer_norm, fp32", layer_norm_fp32, 1, 2),
    Subject("rms_norm", rms_norm, 1, 1),
    Subject("rms_norm, written out", rms_norm_written, 1, 1),
)


def run(device: torch.device, tokens: int, features: int, *, compiled: bool) -> Iterator[Measured]:
    """Yield the figures of every subject at ``tokens`` x ``features`` in bf16."""
    shape = {"tokens": tokens, "features": features}

    def rows(*, grad: bool = True) -> Tensor:
        return torch.randn(tokens, features, device=device, dtype=torch.bfloat16).requires_grad_(grad)

    for subject in SUBJECTS:
        one = torch.ones(features, device=device, dtype=torch.bfloat16)
        tensors = [rows() for _ in range(subject.activations)]
        tensors += [one.clone().requires_grad_() for _ in range(subject.weights)]
        yield from _both(subject.name, subject.forward, tensors, shape, compiled=compiled)
    angle = torch.rand(tokens, HEAD_DIM, device=device, dtype=torch.bfloat16)
    yield from _both("rotary, written out", rotary_written, [rows(), angle, angle.clone()], shape, compiled=compiled)
    turns = torch.polar(torch.ones(tokens, HEAD_DIM // 2, device=device), angle[:, : HEAD_DIM // 2].float())
    # Inductor has no complex products; torchtitan leaves them to eager kernels too.
    yield from _both("rotary, complex", rotary_complex, [rows(), turns], shape, compiled=False)


def _both(
    name: str, forward: Forward, tensors: list[Tensor], shape: dict[str, int], *, compiled: bool
) -> Iterator[Measured]:
    device = tensors[0].device
    tokens, features = shape["tokens"], shape["features"]
    inputs = sum(t.numel() * t.element_size() for t in tensors)
    learned = [t for t in tensors if t.requires_grad]
    grad = torch.randn(tokens, features, device=device, dtype=torch.bfloat16)
    for library in ("eager", "compiled") if compiled else ("eager",):
        function = torch.compile(forward) if library == "compiled" else forward

        def once(function: Forward = function) -> None:
            with torch.no_grad():
                function(*tensors)

        def twice(function: Forward = function) -> None:
            torch.autograd.grad(function(*tensors), learned, grad)

        bytes_ = inputs + grad.numel() * grad.element_size()
        yield measured(f"{name}, forward", library, shape, once, device, ideal_bytes=bytes_)
        yield measured(f"{name}, forward and backward", library, shape, twice, device)


def loss(device: torch.device, tokens: int, vocab: int) -> Iterator[Measured]:
    """Yield the figures of the fp32 loss on bf16 logits: forward, and forward with backward."""
    logits = torch.randn(tokens, vocab, device=device, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), device=device)
    shape = {"tokens": tokens, "vocab": vocab}

    def once() -> None:
        with torch.no_grad():
            functional.cross_entropy(logits.float(), labels)

    def twice() -> None:
        torch.autograd.grad(functional.cross_entropy(logits.float(), labels), [logits])

    yield measured("cross_entropy, forward", "eager", shape, once, device, ideal_bytes=logits.numel() * 2)
    yield measured("cross_entropy, forward and backward", "eager", shape, twice, device, ideal_bytes=logits.numel() * 6)


def optimizer(device: torch.device, parameters: int) -> Iterator[Measured]:
    """Yield AdamW's step over fp32 parameters in 32 tensors, and the clipping of their gradients."""
    held = [torch.randn(parameters // 32, device=device).requires_grad_() for _ in range(32)]
    for parameter in held:
        parameter.grad = torch.randn_like(parameter)
    shape = {"parameters": parameters}
    # Reads parameter, gradient and two moments; writes parameter and moments: 28 bytes a parameter.
    for library in ("foreach", "fused"):
        adamw = torch.optim.AdamW(held, lr=1e-4, foreach=library == "foreach", fused=library == "fused")
        yield measured("adamw", library, shape, adamw.step, device, ideal_bytes=28 * parameters)
        del adamw
    clip = torch.nn.utils.clip_grad_norm_
    yield measured("clip", "foreach", shape, lambda: clip(held, 1.0, foreach=True), device, ideal_bytes=12 * parameters)
