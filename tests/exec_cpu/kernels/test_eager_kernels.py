"""Autograd launches about two kernels per instruction of a program, as the cost model of an eager host assumes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memo_sim.contract.plan import Decisions
from memo_sim.memory.eager_framework import KERNELS
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.lower import lower
from tests.exec_cpu.small import gpt

TOKENS = 128
WITHOUT_KERNEL = {
    *("view", "_unsafe_view", "permute", "transpose", "t", "split", "slice", "select", "expand", "detach", "alias"),
    *("unsqueeze", "empty", "empty_like", "empty_strided", "new_empty_strided", "ones_like"),
}
"""Operators that only make views or memory, and those with which backward starts."""


class Kernels(TorchDispatchMode):
    """Counts the operators that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in WITHOUT_KERNEL:
            self.launched.append(name)
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    """A GPT layer with rotary positions in plain PyTorch."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        packed = self.qkv(self.norm1(x)).view(len(x), self.heads, -1).transpose(0, 1)
        q, k, v = packed.chunk(3, -1)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x = x + self.proj(attended.transpose(0, 1).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def test_autograd_launches_about_two_kernels_for_an_instruction() -> None:
    model = gpt(max_positions=0)
    layer = Layer(model.hidden, model.heads, model.ffn_hidden).to(torch.bfloat16)
    x = torch.randn(TOKENS, model.hidden, dtype=torch.bfloat16, requires_grad=True)
    table = torch.randn(TOKENS, model.head_dim, dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    with Kernels() as eager:
        checkpoint(layer, x, table, table, use_reentrant=True).backward(grad)
    (program,) = lower(Decisions(model=model, seq_tokens=TOKENS, recompute="full"))
    templates = {t.name: t for t in program.templates}
    instructions = sum(
        i.lane == Lane.COMPUTE for name in ("layer.fwd", "layer.bwd") for i in templates[name].instructions
    )
    assert instructions == 39
    # The first step stores gradients, later steps add them; that is one kernel more per parameter.
    later = len(eager.launched) + len(list(layer.parameters()))
    assert KERNELS == round(len(eager.launched) / instructions) == round(later / instructions)
