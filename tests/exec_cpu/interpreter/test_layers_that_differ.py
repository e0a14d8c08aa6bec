"""Models whose layers differ have the gradients of plain autograd, whatever is swapped or recomputed."""

from typing import Any

import pytest
import torch

from memo_exec.machine.rank_placement import first_fit_placement
from memo_exec.training import weights
from memo_exec.verification.autograd_model import AutogradModel
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import liveness
from memo_sim.program.arena.library_workspaces import without_library
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.lower import lower
from tests.exec_cpu.small import batch, decide, gpt, gradients, llama, play, scalars
from tests.pairs import covering

POLICIES: dict[str, dict[str, Any]] = {
    "keep": {},
    "swap": {"swapped_tokens": 256},
    "half swapped": {"swapped_tokens": 128},
    "full": {"recompute": "full"},
    "full in rounding buffers": {"recompute": "full", "swapped_tokens": 128, "rounding_buffers": True},
    "tokenwise": {"recompute": "tokenwise", "swapped_tokens": 128},
    "row-wise": {"recompute": "rowwise", "swapped_tokens": 128, "mlp_chunk_tokens": 128},
    "groups": {"recompute": "full", "recompute_layers": "groups-2"},
}


def of_widths(model: Model, *widths: int) -> Model:
    return model.of_layers([LayerShape(ffn_hidden=width) for width in widths])


DIFFERING = {
    "gpt": of_widths(gpt(), 256, 64, 128, 256, 64),
    "llama": of_widths(llama(qk_norm=True), 80, 160, 160, 80),
}


def compare(model: Model, policy: dict[str, Any], **options: Any) -> None:
    decisions = decide(model, **policy)
    batches = batch(decisions, ignored=0.2)
    if decisions.memory_policy == "planned" and options.pop("placed", False):
        (program,) = lower(decisions)
        columns = expand(program)
        lives = without_library(program, liveness(program, columns))
        options["placement"] = first_fit_placement(requests_of(program, columns, lives=lives))
    with play(decisions, **options) as interpreter:
        reference = AutogradModel(model, weights.named_parameters(interpreter))
        record = interpreter.run_step(batches, scalars(batches, lr=0.0))
        found = gradients(interpreter)
    ((ids, labels),) = batches
    loss = reference.loss(ids.view(2, -1), labels.view(2, -1), scalars(batches).loss_scale)
    loss.backward()
    assert record.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert set(found) == set(reference.p)
    for key, leaf in reference.p.items():
        assert leaf.grad is not None
        assert found[key].shape == leaf.grad.shape
        assert (found[key] - leaf.grad).abs().max() <= 1e-5 * leaf.grad.abs().max(), key
    assert torch.isfinite(torch.tensor(record.grad_norm))


@pytest.mark.parametrize(("name", "policy"), covering(DIFFERING, POLICIES))
def test_gradients_equal_autograd(name: str, policy: str) -> None:
    compare(DIFFERING[name], POLICIES[policy])


@pytest.mark.parametrize("policy", ["half swapped", "tokenwise"])
def test_debug_mode_finds_no_fault(policy: str) -> None:
    compare(DIFFERING["gpt"], POLICIES[policy], debug=True)


def test_they_run_in_a_planned_arena() -> None:
    compare(DIFFERING["llama"], POLICIES["tokenwise"], placed=True)
