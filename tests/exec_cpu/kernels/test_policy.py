"""The objective of GRPO: values and gradients in every form of the loss, against plain autograd of TRL's formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memo_exec.kernels import StepScalars
from memo_exec.training import weights
from memo_exec.verification.autograd_model import AutogradModel
from memo_sim.contract.plan import Decisions
from memo_sim.program.analysis.columns import expand
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_program
from memo_sim.program.verify.values import check_values
from tests.exec_cpu.small import batch, counted, decide, gradients, llama, play

CLIPS: dict[str, Any] = {"clip_ratio": 0.1, "clip_ratio_high": 0.3}


def rollouts(model: AutogradModel, batches: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the micro-batches with log-probabilities near the model's own, so that some ratios are clipped."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for ids, labels in batches:
        logits = model.logits(ids.view(1, -1)).detach()[0]
        own = logits.log_softmax(-1).gather(1, labels.clamp_min(0).unsqueeze(1)).float()
        near = own + 0.3 * torch.randn(len(ids), 2, generator=generator)
        found.append((ids, labels, torch.cat([torch.randn(len(ids), 1, generator=generator), near], dim=1)))
    return found


def decisions_of(**changes: Any) -> Decisions:
    return decide(llama(), **{"objective": "grpo", "global_batch": 2, "micro_batch": 1, **changes})


FORMS = {
    "blocks": {},
    "blocks in chunks": {"loss_chunk_tokens": 64},
    "fused": {"loss": "fused", "loss_chunk_tokens": 96},
    "eager-fp32": {"loss": "eager-fp32"},
    "checkpointed": {"loss": "checkpointed", "loss_chunk_tokens": 64},
    "vocab-parallel": {"loss": "vocab-parallel"},
    "linear": {"loss": "linear", "loss_chunk_tokens": 64},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_losses_and_gradients_are_those_of_autograd(form: dict[str, Any]) -> None:
    decisions = decisions_of(**form)
    plain = batch(decisions, ignored=0.2)
    with play(decisions) as interpreter:
        reference = AutogradModel(decisions.model, weights.named_parameters(interpreter))
        batches = rollouts(reference, plain)
        scalars = StepScalars(lr=0.0, loss_scale=1 / counted(plain), kl_weight=0.05, **CLIPS)
        record = interpreter.run_step(batches, scalars)
        found = gradients(interpreter)
    loss = sum(
        reference.loss(ids.view(1, -1), labels.view(1, -1), scalars.loss_scale, rollout.unsqueeze(0), scalars)
        for ids, labels, rollout in batches
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    assert record.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, leaf in reference.p.items():
        assert leaf.grad is not None
        gap = (found[name].double().view_as(leaf) - leaf.grad).abs().max() / leaf.grad.abs().max()
        assert gap <= 1e-5, name


def test_tokens_whose_ratio_is_clipped_give_no_gradient() -> None:
    decisions = decisions_of(global_batch=1)
    plain = batch(decisions)
    with play(decisions) as interpreter:
        reference = AutogradModel(decisions.model, weights.named_parameters(interpreter))
        ((ids, labels, rollout),) = rollouts(reference, plain)
        far = rollout.clone()
        far[:, 1] -= 10 * far[:, 0].sign()  # a good token is far likelier than when drawn, a bad one far less likely
        interpreter.run_step([(ids, labels, far)], StepScalars(lr=0.0, loss_scale=1.0))
        assert all(not gradient.any() for gradient in gradients(interpreter).values())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_programs_pass_the_checks_and_count_the_rollouts_bytes(form: dict[str, Any]) -> None:
    decisions = decisions_of(**form)
    program = lower(decisions)[0]
    columns = expand(program)
    assert check_program(program, columns) == []
    assert check_values(program, columns, decisions) == []
    (family,) = (family for family in program.all_families if family.name == "input.rollout")
    assert (family.bytes, family.count) == (3 * 4 * decisions.seq_tokens, 2)


def test_a_step_without_the_rollout_is_refused() -> None:
    decisions = decisions_of(global_batch=1)
    with play(decisions) as interpreter, pytest.raises(ValueError, match=r"input\.rollout"):
        interpreter.run_step(batch(decisions), StepScalars())
