"""What ``memory/huggingface.py`` says that autograd saves is what torch's autograd saves for the modules' code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
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


def test_experts_save_dispatched_rows_and_the_results_of_both_products() -> None:
    """As ``program/layers/huggingface_experts.py`` says; gate and up are one tensor."""
    modules = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    from transformers import Qwen3MoeConfig

    width, chosen = 48, 2
    config = Qwen3MoeConfig(hidden_size=FEATURES, moe_intermediate_size=width, num_experts=4)
    config._experts_implementation = "grouped_mm"
    experts = modules.Qwen3MoeExperts(config).to(torch.bfloat16)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    index = torch.randint(0, 4, (ROWS, chosen))
    weights = torch.rand(ROWS, chosen, dtype=torch.bfloat16, requires_grad=True)
    found = saved(lambda x, *_: experts(x, index, weights), rows(), *experts.parameters())
    dispatched = ROWS * chosen
    # The first product's result is saved as its two halves, which share one storage.
    counts = {(features * dispatched, torch.bfloat16): n for features, n in ((FEATURES, 2), (width, 3))}
    assert {key: n for key, n in found.items() if key[0] > dispatched and key[1] == torch.bfloat16} == counts
