"""What ``memory/huggingface.py`` says that autograd saves is what torch's autograd saves for the modules' code."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tests.exec_cpu.kernels.test_framework_kernels import LlamaRMSNorm

ROWS, FEATURES = 64, 32
SMALL = ROWS
"""Elements of a vector of one number a row, and more than those of a weight."""


def saved(play: Callable[..., Tensor], *inputs: Tensor) -> dict[tuple[int, torch.dtype], int]:
    """Return how many tensors that are not inputs autograd saves, by elements and dtype."""
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        play(*inputs)
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    counts: dict[tuple[int, torch.dtype], int] = {}
    for storage, tensor in found.items():
        if storage not in given and tensor.numel() > SMALL:
            key = (tensor.numel(), tensor.dtype)
            counts[key] = counts.get(key, 0) + 1
    return counts


def rows(features: int = FEATURES) -> Tensor:
    return torch.randn(ROWS, features, dtype=torch.bfloat16, requires_grad=True)


def test_a_norm_saves_an_fp32_copy_and_the_normalised_rows_but_not_its_input() -> None:
    norm, x = LlamaRMSNorm(FEATURES), rows()
    assert saved(norm, x) == {(ROWS * FEATURES, torch.float32): 1, (ROWS * FEATURES, torch.bfloat16): 1}
    kept: set[int] = set()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (kept.add(t.untyped_storage().data_ptr()), t)[1], lambda t: t
    ):
        norm(x)
    assert x.untyped_storage().data_ptr() not in kept


def test_swiglu_saves_the_result_of_silu_beside_both_halves() -> None:
    assert saved(lambda gate, up: F.silu(gate) * up, rows(), rows()) == {(ROWS * FEATURES, torch.bfloat16): 1}
