"""The table of eager kernels is what torch launches for model code as frameworks write it, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memo_sim.program.ir.work import Rowwise
from memo_sim.program.operators.framework_kernels import framework_kernels, launches
from tests.exec_cpu.kernels.test_eager_kernels import WITHOUT_KERNEL

ROWS, FEATURES = 512, 1024
VIEWS = WITHOUT_KERNEL | {"chunk", "squeeze", "split_with_sizes"}
SMALL = 0.02
"""Tensors below this part of an operator's own (vectors, one number a row) are not in the table."""


class Traffic(TorchDispatchMode):
    """Lists the bytes that each kernel reads and writes, without tensors that are small beside ``elements``."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.kernels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") not in VIEWS:
            self.kernels.append(sum(self._bytes(t) for t in tree_leaves((args, kwargs, results))))
        return results

    def _bytes(self, value: Any) -> int:
        if not isinstance(value, Tensor):
            return 0
        held = 1
        for size, stride in zip(value.shape, value.stride(), strict=True):
            held *= size if stride else 1
        return held * value.element_size() if held > SMALL * self.elements else 0


class LlamaRMSNorm(nn.Module):
    """As in transformers."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + 1e-6)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def counted(call: Callable[..., Tensor], *inputs: Tensor, elements: int) -> tuple[list[int], list[int]]:
    """Return the bytes of each kernel, forward and backward."""
    with Traffic(elements) as forward:
        out = call(*inputs)
    grad = torch.randn_like(out)
    with Traffic(elements) as backward:
        out.backward(grad)
    return forward.kernels, backward.kernels


def table(kind: str, elements: int, *, residual: bool = False) -> list[int]:
    """Return the table's bytes of each launch, for an operator in bf16."""
    written = (2 if residual else 1) * 2 * elements
    work = Rowwise(kind, ROWS, 0, written, elements=elements)
    found = framework_kernels(work, "eager")
    assert launches(work, "eager") == sum(kernel.launches for kernel in found)
    return [kernel.moved_bytes(work) // kernel.launches for kernel in found for _ in range(kernel.launches)]


def test_rms_norm() -> None:
    x, elements = leaf(ROWS, FEATURES), ROWS * FEATURES
    forward, backward = counted(LlamaRMSNorm(FEATURES), x, elements=elements)
    assert forward == table("rms_norm", elements)
    assert sum(forward) == 36 * elements
    assert sorted(backward) == sorted(table("rms_norm.bwd", elements))


def test_rms_norm_in_a_residual_branch_adds_the_gradients() -> None:
    elements = ROWS * FEATURES
    norm = LlamaRMSNorm(FEATURES)
    stream = leaf(ROWS, FEATURES)
    _, backward = counted(lambda x: norm(x) + x, stream, elements=elements)
    assert sorted(backward) == sorted(table("rms_norm.bwd", elements, residual=True))


@pytest.mark.parametrize(
    ("kind", "call", "inputs"),
    [
        ("gelu", F.gelu, 1),
        ("swiglu", lambda gate, up: F.silu(gate) * up, 2),
    ],
)
def test_activations(kind: str, call: Callable[..., Tensor], inputs: int) -> None:
    elements = ROWS * FEATURES
    given = [leaf(ROWS, FEATURES) for _ in range(inputs)]
    forward, backward = counted(call, *given, elements=elements)
    assert (forward, backward) == (table(kind, elements), table(f"{kind}.bwd", elements))


def test_rotary_embeddings_of_queries_and_of_keys() -> None:
    heads, head_dim, tokens = 64, 128, 128
    cos, sin = (torch.randn(1, tokens, head_dim, dtype=torch.bfloat16) for _ in range(2))
    elements = heads * tokens * head_dim
    forward, backward = counted(lambda x: rotated(x, cos, sin), leaf(heads, tokens, head_dim), elements=elements)
    both = 2 * elements
    assert sorted(2 * forward) == sorted(table("rotary", both))
    # slice_backward is one operator of two kernels: zeros, and a copy of the half, which is written twice.
    own = table("rotary.bwd", both)
    assert len(own) == 2 * (len(backward) + 2)
    assert sum(own) == 2 * (sum(backward) + 2 * elements)


def test_adamw_with_foreach_makes_eight_passes() -> None:
    weight = nn.Parameter(torch.randn(ROWS, FEATURES))
    optimizer = torch.optim.AdamW([weight], foreach=True)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    with Traffic(weight.numel()) as step:
        optimizer.step()
    update = [moved for moved in step.kernels if moved]
    own = table("adamw", weight.numel())[1:-1]  # gradients are clipped before it, parameters cast after it
    assert len(update) == len(own) == 8
    assert sum(own) == 80 * weight.numel()


def test_the_loss_in_fp32_casts_its_logits_there_and_back() -> None:
    vocab = 4096
    labels = torch.randint(0, vocab, (ROWS,))
    logits = leaf(ROWS, vocab)
    forward, backward = counted(lambda x: F.cross_entropy(x.float(), labels), logits, elements=ROWS * vocab)
    own = table("cross_entropy", ROWS * vocab)
    assert (forward[0], backward[-1]) == (own[0], own[-1]) == (6 * ROWS * vocab,) * 2
    # nll_loss is an operator forward, and zeros with one number a row backward.
    assert len(own) == len(forward) + len(backward) + 1


def test_a_plan_in_fp32_casts_nothing() -> None:
    work = Rowwise("rms_norm", ROWS, 0, 4 * ROWS, elements=ROWS, element_bytes=4)
    assert launches(work, "eager") == 6
