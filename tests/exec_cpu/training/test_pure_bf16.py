"""States without master weights train as AdamW on a bf16 model; gradients are autograd's up to rounding."""

from __future__ import annotations

import msgspec
import pytest
import torch

from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_exec.training import weights
from memo_exec.verification.autograd_model import AutogradModel
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.kinds import FamilyKind
from memo_sim.program.lower import lower
from tests.exec_cpu.small import MODELS, batch, decide, gradients, play, scalars

ROUNDING = 2**-8
"""Half the distance of two bf16 numbers, relative."""


def pure(name: str, **changes: object) -> Decisions:
    return decide(MODELS[name], **{"dtype": "bf16", "states": "pure-bf16", "micro_batch": 1, **changes})


@pytest.mark.parametrize("name", MODELS)
def test_gradients_err_as_those_that_are_summed_in_fp32(name: str) -> None:
    """Against plain autograd in double precision; each of the two micro-batches' sums is rounded once more."""
    decisions = pure(name, global_batch=2)
    batches = batch(decisions, ignored=0.2)
    errors, squares = {}, 0.0
    for states in ("fp32", "pure-bf16"):
        with play(msgspec.structs.replace(decisions, states=states)) as interpreter:
            reference = AutogradModel(decisions.model, weights.named_parameters(interpreter))
            record = interpreter.run_step(batches, scalars(batches, lr=0.0))
            found = gradients(interpreter)
        for ids, labels in batches:
            reference.loss(ids.view(1, -1), labels.view(1, -1), scalars(batches).loss_scale).backward()
        wanted = {key: leaf.grad for key, leaf in reference.p.items() if leaf.grad is not None}
        errors[states] = {key: float((found[key] - grad).norm() / grad.norm()) for key, grad in wanted.items()}
        squares = sum(float(grad.square().sum()) for grad in wanted.values())
    assert {gradient.dtype for gradient in found.values()} == {torch.bfloat16}
    for key, error in errors["pure-bf16"].items():
        assert error <= 1.5 * errors["fp32"][key] + 2 * ROUNDING, key
    assert record.grad_norm == pytest.approx(squares**0.5, rel=0.02)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_three_steps_are_torchs_adamw(clip: float | None) -> None:
    decisions = pure("llama")
    batches = batch(decisions)
    with play(decisions) as interpreter:
        mine = weights.named_parameters(interpreter)
        theirs = {name: torch.nn.Parameter(value.clone()) for name, value in mine.items()}
        decayed = [p for p in theirs.values() if p.dim() > 1]
        others = [p for p in theirs.values() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
        for step in (1, 2, 3):
            record = interpreter.run_step(batches, scalars(batches, lr=1e-2, step=step, clip=clip))
            # The update scales clipped gradients in place, so these are already clipped.
            for name, gradient in gradients(interpreter).items():
                theirs[name].grad = gradient
            optimizer.step()
            assert record.loss > 0
        assert {p.dtype for p in mine.values()} == {torch.bfloat16}
        for name, value in theirs.items():
            # With clipping, the update divides before the gradient is rounded, so a step may round the other way.
            tolerance = 0.0 if clip is None else 3 * 2 * ROUNDING
            assert torch.allclose(mine[name], value.detach(), rtol=tolerance, atol=tolerance * 1e-2), name


SEVERAL_DTYPES = {
    "bf16 parameters and gradients, fp32 moments": {"states": "pure-bf16-fp32-moments"},
    "bf16 parameters, fp32 gradients and moments": {"states": "pure-bf16-fp32-moments", "grad_sums": "fp32"},
    "bf16 parameters and moments, fp32 gradients": {"states": "pure-bf16", "grad_sums": "fp32"},
    "fp32 master weights and moments, bf16 gradients": {"states": "fp32", "grad_sums": "params"},
    "fp32 master weights, bf16 gradients and moments": {"states": "bf16", "grad_sums": "params"},
}


@pytest.mark.parametrize("given", SEVERAL_DTYPES.values(), ids=SEVERAL_DTYPES)
def test_states_of_several_dtypes_are_adamw_in_fp32_rounded_to_nearest(given: dict[str, str]) -> None:
    """Against torch's AdamW on fp32 copies, whose results are rounded to the state's dtype after every step."""
    decisions = pure("llama", **given)
    batches = batch(decisions)
    kept = {family.kind: TORCH_DTYPES[family.dtype] for family in lower(decisions)[0].all_families}
    updated = kept.get(FamilyKind.MASTER, kept[FamilyKind.PARAMS])
    with play(decisions) as interpreter:
        mine = weights.named_parameters(interpreter)
        held = "master" if FamilyKind.MASTER in kept else "params"
        started = {each.name: each.view.float().clone() for each in weights.held_by(interpreter, held)}
        theirs = {name: torch.nn.Parameter(started[name].view_as(value)) for name, value in mine.items()}
        groups = [
            {"params": [p for p in theirs.values() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in theirs.values() if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
        for step in (1, 2, 3):
            interpreter.run_step(batches, scalars(batches, lr=1e-2, step=step, clip=None))
            found = gradients(interpreter)
            assert {gradient.dtype for gradient in found.values()} == {kept[FamilyKind.GRADS]}
            for name, gradient in found.items():
                theirs[name].grad = gradient.float().view_as(theirs[name])
            optimizer.step()
            for name, value in theirs.items():
                value.data = value.data.to(updated).float()
                for moment in ("exp_avg", "exp_avg_sq"):
                    state = optimizer.state[value]
                    state[moment] = state[moment].to(kept[FamilyKind.MOMENT1]).float()
                assert torch.equal(mine[name], value.detach().to(torch.bfloat16)), name
