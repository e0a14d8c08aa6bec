"""Models with experts on CUDA: losses near those of the CPU, gradients near those of keep. Not yet run on a GPU."""

from __future__ import annotations

import pytest
import torch

from memo_sim.contract.plan import Kernels
from tests.exec_cpu.small import EXPERT_MODELS, decide, one_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16_ROUNDING = 0.05
"""Of a loss: rounding may send a token to another expert than on the CPU."""
SPLIT_PRODUCTS = 0.01
"""Of a gradient: the rows of an expert that are cut are multiplied in two calls."""


@pytest.mark.parametrize("name", EXPERT_MODELS)
@pytest.mark.parametrize("policy", [("tokenwise", 128), ("tokenwise", 0), ("full", 256)], ids=str)
def test_a_policy_leaves_the_gradients_to_keep(name: str, policy: tuple[str, int]) -> None:
    fields = {"dtype": "bf16", "kernels": Kernels(attention="torch-flash")}
    exact = one_step(decide(EXPERT_MODELS[name]))[0].loss
    kept, wanted = one_step(decide(EXPERT_MODELS[name], **fields), device="cuda")
    chosen = decide(EXPERT_MODELS[name], **fields, recompute=policy[0], swapped_tokens=policy[1])
    record, found = one_step(chosen, device="cuda")
    assert kept.loss == pytest.approx(exact, rel=BF16_ROUNDING)
    assert record.loss == pytest.approx(kept.loss, rel=SPLIT_PRODUCTS)
    for key, gradient in wanted.items():
        assert (found[key] - gradient).norm() <= SPLIT_PRODUCTS * gradient.norm(), key
