"""Every form of the loss has plain autograd's loss and gradients, in whole models and in bf16 kernel by kernel."""

from __future__ import annotations

import pytest

from memo_exec.training import weights
from memo_exec.verification.autograd_model import AutogradModel
from memo_sim.contract.knobs import Loss
from memo_sim.program.operators import workspaces as table
from tests.exec_cpu.interpreter.replayed import assert_gradients_equal_autograds
from tests.exec_cpu.small import MODELS, batch, decide, gradients, play, scalars

ROUNDING = 2**-8
"""Half the distance of two bf16 numbers, relative: all forms compute in fp32 and round the gradient once."""
FORMS: tuple[Loss, ...] = (
    "blocks",
    "fused",
    "eager-fp32",
    "vocab-parallel",
    "checkpointed",
    "checkpointed-fp32",
    "linear",
)


@pytest.fixture(autouse=True)
def _tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let linear have three tiles, the last one of a single column."""
    monkeypatch.setattr(table, "LOSS_COLUMNS", 40)
    monkeypatch.setattr(table, "LOSS_COLUMNS_GRANULE", 16)


@pytest.mark.parametrize("chunk", [0, 48])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_equal_autograd(form: Loss, chunk: int) -> None:
    decisions = decide(MODELS["qwen2"], micro_batch=1, global_batch=2, loss=form, loss_chunk_tokens=chunk)
    assert_gradients_equal_autograds(decisions)


@pytest.mark.parametrize("form", FORMS)
def test_loss_equals_autograd(form: Loss) -> None:
    decisions = decide(MODELS["llama"], micro_batch=1, loss=form)
    batches = batch(decisions, ignored=0.2)
    with play(decisions) as interpreter:
        reference = AutogradModel(decisions.model, weights.named_parameters(interpreter))
        record = interpreter.run_step(batches, scalars(batches, lr=0.0))
    (ids, labels), scale = batches[0], scalars(batches).loss_scale
    wanted = reference.loss(ids.view(1, -1), labels.view(1, -1), scale).detach()
    assert record.loss == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize("chunk", [0, 48])
@pytest.mark.parametrize("form", FORMS)
def test_bf16_gradients_are_those_of_blocks(form: Loss, chunk: int) -> None:
    fields = {"micro_batch": 1, "dtype": "bf16", "loss_chunk_tokens": chunk}
    found = {}
    for one in ("blocks", form):
        decisions = decide(MODELS["llama"], loss=one, **fields)
        batches = batch(decisions, ignored=0.2)
        with play(decisions) as interpreter:
            record = interpreter.run_step(batches, scalars(batches, lr=0.0))
            found[one] = (record.loss, gradients(interpreter))
    (loss, mine), (wanted, theirs) = found[form], found["blocks"]
    # The logits of an fp32 product are not rounded to bf16, and neither is their gradient.
    apart = form == "checkpointed-fp32"
    assert loss == pytest.approx(wanted, rel=1e-4 if apart else 1e-5)
    for name, gradient in theirs.items():
        assert (mine[name] - gradient).norm() <= (2 if apart else 1) * ROUNDING * gradient.norm(), name
