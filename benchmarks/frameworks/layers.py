"""Whole layers as frameworks run them: forward and backward of a stack, with and without checkpointing.

Every kernel's device time is put into one of four kinds, so that a layer's time divides into products, attention,
row-wise kernels and the gaps between kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.frameworks.measure import Kernel, busy_seconds, host_seconds, kernels_of
from benchmarks.frameworks.rowwise import rms_norm, rms_norm_written, rotary_written

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
GEMM_NAMES = ("gemm", "nvjet", "cutlass", "xmma", "wgmma")
ATTENTION_NAMES = ("flash", "fmha", "cudnn", "sdpa", "attention")


@dataclass(frozen=True)
class Shape:
    """One layer's sizes and the way it runs."""

    family: str
    """``gpt``: LayerNorm, GELU, biases. ``llama``: RMSNorm written out, rotary, SwiGLU, grouped queries."""
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    seq: int
    sequences: int
    attention: str = "flash"
    compiled: bool = False
    checkpointed: bool = False
    layers: int = 4


class Layer(nn.Module):
    """A transformer layer in bf16, without dropout."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        head_dim = shape.hidden // shape.heads
        self.head_dim = head_dim
        gpt = shape.family == "gpt"
        linear = partial(nn.Linear, bias=gpt, device=device, dtype=torch.bfloat16)
        self.qkv = linear(shape.hidden, (shape.heads + 2 * shape.kv_heads) * head_dim)
        self.out = linear(shape.hidden, shape.hidden)
        self.up = linear(shape.hidden, shape.ffn if gpt else 2 * shape.ffn)
        self.down = linear(shape.ffn, shape.hidden)
        self.norms = nn.ParameterList(
            torch.ones(shape.hidden, device=device, dtype=torch.bfloat16) for _ in range(4 if gpt else 2)
        )
        angle = torch.rand(shape.seq * shape.sequences, head_dim, device=device, dtype=torch.bfloat16)
        self.cos, self.sin = angle.cos(), angle.sin()

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output; x: (sequences * seq, hidden)."""
        x = x + self.out(self._attention(self._norm(x, 0)))
        return x + self._mlp(self._norm(x, 1))

    def _norm(self, x: Tensor, which: int) -> Tensor:
        if self.shape.family == "gpt":
            return functional.layer_norm(x, (x.shape[-1],), self.norms[2 * which], self.norms[2 * which + 1])
        return rms_norm_written(x, self.norms[which]) if not self.shape.compiled else rms_norm(x, self.norms[which])

    def _attention(self, x: Tensor) -> Tensor:
        shape = self.shape
        q, k, v = self.qkv(x).split(
            [shape.heads * self.head_dim, shape.kv_heads * self.head_dim, shape.kv_heads * self.head_dim], dim=-1
        )
        if shape.family == "llama":
            q, k = (rotary_written(t.contiguous(), self.cos, self.sin) for t in (q, k))
        q, k, v = (t.reshape(shape.sequences, shape.seq, -1, self.head_dim).transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(BACKENDS[shape.attention]):
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=shape.kv_heads != shape.heads
            )
        return out.transpose(1, 2).reshape(x.shape)

    def _mlp(self, x: Tensor) -> Tensor:
        up: Tensor = self.up(x)
        if self.shape.family == "gpt":
            active = functional.gelu(up)
        else:
            gate, value = up.chunk(2, dim=-1)
            active = functional.silu(gate) * value
        down: Tensor = self.down(active)
        return down


def kind_of(kernel: Kernel) -> str:
    """Return gemm, attention, copy or rowwise for a kernel, by its name."""
    name = kernel.name.lower()
    if any(word in name for word in ATTENTION_NAMES):
        return "attention"
    if any(word in name for word in GEMM_NAMES):
        return "gemm"
    return "memory" if "memcpy" in name or "memset" in name else "rowwise"


def run(shape: Shape, device: torch.device, span_s: float) -> dict[str, object]:
    """Return seconds of one layer (forward and backward), the host's seconds, and device seconds by kind of kernel."""
    step, layers = _step(shape, device)
    seconds = busy_seconds(step, device, span_s)
    host_s = host_seconds(step, device)
    kernels = kernels_of(step, device)
    by_kind: dict[str, float] = {}
    for kernel in kernels:
        kind = kind_of(kernel)
        by_kind[kind] = by_kind.get(kind, 0.0) + kernel.launches * kernel.seconds / layers
    return {
        **{name: getattr(shape, name) for name in Shape.__dataclass_fields__},
        "layer_s": seconds / layers,
        "host_s": host_s / layers,
        "launches": sum(kernel.launches for kernel in kernels) / layers,
        "device_s": by_kind,
        "kernels": [
            [kernel.name[:100], kind_of(kernel), kernel.launches / layers, kernel.seconds] for kernel in kernels[:40]
        ],
    }


def _step(shape: Shape, device: torch.device) -> tuple[Callable[[], None], int]:
    layers: list[Callable[..., Tensor]] = []
    parameters: list[Tensor] = []
    for _ in range(shape.layers):
        layer = Layer(shape, device)
        parameters += layer.parameters()
        layers.append(torch.compile(layer) if shape.compiled else layer)
    x = torch.randn(shape.seq * shape.sequences, shape.hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn_like(x) * 1e-3

    def step() -> None:
        y = x
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=False, preserve_rng_state=False) if shape.checkpointed else layer(y)
        torch.autograd.backward(y, grad, inputs=[x, *parameters])
        for parameter in (x, *parameters):
            parameter.grad = None

    return step, shape.layers
