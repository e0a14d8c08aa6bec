"""Experts in bf16 are compared with autograd that goes to the same experts, as rounding moves tokens between them."""

from __future__ import annotations

import pytest

from memo_exec.kernels import KERNELS
from memo_exec.kernels.call import Call
from memo_exec.verification.reduction import reduced
from memo_exec.verification.verify import AUTOGRAD, CPU_ATTENTION, judge, play_here, plays_of
from memo_sim.contract.catalog import load_model
from memo_sim.contract.plan import Decisions, Kernels
from memo_sim.contract.verdict import Against, Verdict


def verdict_of(model: str, *, worst: bool = False) -> Verdict:
    """Return the verdict on a plan in bf16; ``worst``: whether its router chooses the experts with the least scores."""
    plan = Decisions(
        model=load_model(model),
        seq_tokens=1024,
        dtype="bf16",
        recompute="tokenwise",
        swapped_tokens=256,
        kernels=Kernels(attention="flash2"),
    )
    here = reduced(plan, layers=2, attention=CPU_ATTENTION, dtype="bf16")
    kernels = {**KERNELS, "experts.route": _worst} if worst else KERNELS
    plays = plays_of(here, seed=0, steps=1, kernels=kernels)
    return judge(plan, plays, play_here(plays))


def _worst(call: Call) -> None:
    KERNELS["experts.route"](call)
    scores, probs, experts = call.matrix("scores"), call.matrix("probs"), call.matrix("experts")
    probs_, chosen = scores.topk(probs.shape[1], dim=1, largest=False)
    probs.copy_(probs_ / probs_.sum(1, keepdim=True))
    experts.copy_(chosen)


def against_autograd(verdict: Verdict) -> Against:
    """Return what was compared with autograd."""
    return next(each for each in verdict.against if each.reference == AUTOGRAD)


@pytest.mark.parametrize("model", ["qwen3-moe-tiny", "deepseek-tiny"])
def test_tokens_that_rounding_moves_do_not_count_as_faults(model: str) -> None:
    verdict = verdict_of(model)
    found = against_autograd(verdict)
    assert verdict.verified, [each for each in found.compared if not each.fine]
    assert "of which rounding moved" in found.why
    (experts,) = [each for each in found.compared if each.what == "experts"]
    assert experts.difference is not None
    assert experts.difference < 0.01


def test_a_router_that_chooses_wrong_is_found_although_autograd_goes_to_its_experts() -> None:
    verdict = verdict_of("mixtral-tiny", worst=True)
    assert not verdict.verified
    wrong = {each.what for each in against_autograd(verdict).compared if not each.fine}
    assert "experts" in wrong
