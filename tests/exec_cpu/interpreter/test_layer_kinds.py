"""A layer kind that only tests register runs in the executor, with the gradients of plain autograd.

The reference is the whole model with a second MLP product of zeros: its MLP adds nothing, and passes no gradient on.
"""

from typing import Any

import pytest
import torch

from memo_exec.training import weights
from memo_exec.verification.autograd_model import AutogradModel
from memo_sim.program.layers.kinds import registered
from tests.exec_cpu.small import batch, decide, gpt, gradients, llama, play, scalars
from tests.sim.program.layers.attention_only import ATTENTION_ONLY, NAME

POLICIES: list[dict[str, Any]] = [
    {},
    {"swapped_tokens": 256},
    {"recompute": "full"},
    {"recompute": "tokenwise", "swapped_tokens": 128},
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", [gpt(name=NAME), llama(name=NAME)], ids=["gpt", "llama"])
def test_gradients_equal_autograd(model: Any, policy: dict[str, Any]) -> None:
    decisions = decide(model, **policy)
    batches = batch(decisions, ignored=0.2)
    with registered(ATTENTION_ONLY), play(decisions) as interpreter:
        parameters = {name: value.clone() for name, value in weights.named_parameters(interpreter).items()}
        record = interpreter.run_step(batches, scalars(batches, lr=0.0))
        found = gradients(interpreter)
    for name, value in parameters.items():
        if "ffn_down" in name:
            value.zero_()
    reference = AutogradModel(model, parameters)
    ((ids, labels),) = batches
    loss = reference.loss(ids.view(2, -1), labels.view(2, -1), scalars(batches).loss_scale)
    loss.backward()

    assert record.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    for key, leaf in reference.p.items():
        assert leaf.grad is not None
        if "ffn" in key or "norm2" in key:
            assert not found[key].any(), key
            continue
        error = (found[key] - leaf.grad).abs().max() / leaf.grad.abs().max()
        assert error <= 1e-5, key
    assert torch.isfinite(torch.tensor(record.grad_norm))
