"""Compares the loss and every gradient of whole models with plain autograd in double precision."""

import pytest
import torch

from memo_exec.training import weights
from memo_exec.verification.autograd_model import AutogradModel
from tests.exec_cpu.small import MODELS, batch, decide, gradients, play, scalars

TOLERANCE = 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_autograd(name: str) -> None:
    model = MODELS[name]
    decisions = decide(model, global_batch=4)
    batches = batch(decisions, ignored=0.2)
    with play(decisions) as interpreter:
        reference = AutogradModel(model, weights.named_parameters(interpreter))
        record = interpreter.run_step(batches, scalars(batches, lr=0.0))
        found = gradients(interpreter)
    wanted = torch.zeros((), dtype=torch.float64)
    for ids, labels in batches:
        loss = reference.loss(ids.view(2, -1), labels.view(2, -1), scalars(batches).loss_scale)
        loss.backward()
        wanted += loss.detach()

    assert record.loss == pytest.approx(float(wanted), rel=1e-6)
    assert set(found) == set(reference.p)
    for key, leaf in reference.p.items():
        assert leaf.grad is not None
        error = (found[key] - leaf.grad).abs().max() / leaf.grad.abs().max()
        assert error <= TOLERANCE, key
    norm = torch.stack([leaf.grad.square().sum() for leaf in reference.p.values() if leaf.grad is not None]).sum()
    assert record.grad_norm == pytest.approx(float(norm.sqrt()), rel=1e-5)
