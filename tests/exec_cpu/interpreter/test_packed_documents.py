"""Packed documents: the executor's gradients are those of separate sequences, and of transformers' own mask."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from memo_exec.kernels.attention import BACKENDS
from memo_exec.training import weights
from memo_exec.verification.autograd_model import AutogradModel
from memo_exec.verification.verify import verify
from memo_sim.contract.documents import Documents
from memo_sim.contract.errors import CannotRun, UsageError
from memo_sim.contract.plan import Decisions
from memo_sim.contract.rope_scaling import RopeScaling
from tests.exec_cpu.kernels import fake_libraries
from tests.exec_cpu.small import (
    CPU_KERNELS,
    EXPERT_MODELS,
    LATENT_MODELS,
    MODELS,
    WINDOWED_MODELS,
    batch,
    decide,
    gradients,
    play,
    scalars,
)

DOCUMENTS = Documents(lengths=((7, 3), (20, 2), (60, 2)))
ENDS = ((5, 6, 70, 128), (128,))
"""Where the documents of two sequences end: one has a single token, one is a whole sequence."""
TOLERANCE = 1e-5
HALF = {"recompute": "tokenwise", "swapped_tokens": 128}
EVERY_MODEL = MODELS | WINDOWED_MODELS | LATENT_MODELS
CASES: dict[str, dict[str, Any]] = {
    "llama": HALF,
    "window": HALF,
    "sinks": {},
    "gemma3": HALF,
    "gpt2": {"recompute": "full"},
    "qwen3": {"recompute": "selective"},
    "llama-biased": {},
    "latent": HALF | {"rebuild_qkv": True},
}


def packing(name: str, **changes: Any) -> Decisions:
    return decide(changes.pop("model", EVERY_MODEL[name]), **({"documents": DOCUMENTS} | changes))


def separate_loss(model: AutogradModel, pair: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """Return the loss of a micro-batch whose documents are sequences of their own."""
    ids, labels = (each.view(2, -1) for each in pair)
    every = [
        model.loss(ids[row, None, first:end], labels[row, None, first:end], scale)
        for row, ends in enumerate(ENDS)
        for first, end in pairwise((0, *ends))
    ]
    return torch.stack(every).sum()


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_separate_sequences(name: str) -> None:
    decisions = packing(name, **CASES[name])
    batches = batch(decisions, ignored=0.2)
    with play(decisions) as interpreter:
        reference = AutogradModel(decisions.model, weights.named_parameters(interpreter))
        record = interpreter.run_step(batches, scalars(batches, lr=0.0), [ENDS])
        found = gradients(interpreter)
    loss = separate_loss(reference, batches[0], scalars(batches).loss_scale)
    loss.backward()
    assert record.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    for key, leaf in reference.p.items():
        assert leaf.grad is not None
        assert (found[key] - leaf.grad).abs().max() <= TOLERANCE * leaf.grad.abs().max(), key


@pytest.mark.slow
def test_gradients_are_those_of_transformers_with_a_mask_and_restarted_positions(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    decisions = packing("llama", **HALF)
    batches = batch(decisions, ignored=0.2)
    with play(decisions) as interpreter:
        weights.save(interpreter, tmp_path)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").double()
        record = interpreter.run_step(batches, scalars(batches, lr=0.0), [ENDS])
        found = gradients(interpreter)
    ids, labels = (each.view(2, -1) for each in batches[0])
    mask = torch.full((2, 1, 128, 128), -torch.inf, dtype=torch.float64)
    positions = torch.zeros(2, 128, dtype=torch.int64)
    for row, ends in enumerate(ENDS):
        for first, end in pairwise((0, *ends)):
            seen = torch.ones(end - first, end - first, dtype=torch.bool).tril()
            mask[row, 0, first:end, first:end].masked_fill_(seen, 0.0)
            positions[row, first:end] = torch.arange(end - first)
    logits = theirs(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (loss * scalars(batches).loss_scale).backward()
    assert record.loss == pytest.approx(float(loss.detach() * scalars(batches).loss_scale), rel=1e-6)
    at = theirs.model.layers[0]
    pairs = {
        "layer.0/proj.weight": at.self_attn.o_proj.weight.grad,
        "layer.0/ffn_down.weight": at.mlp.down_proj.weight.grad,
        "layer.0/norm1.weight": at.input_layernorm.weight.grad,
        "embed/tokens.weight": theirs.model.embed_tokens.weight.grad,
    }
    for key, wanted in pairs.items():
        assert (found[key] - wanted).abs().max() <= TOLERANCE * wanted.abs().max(), key


@pytest.mark.parametrize("name", ["flash2", "flash3"])
def test_one_varlen_call_does_what_a_call_for_each_document_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backends' whole calls of a rank's own rows, with fakes of their libraries, in head groups."""
    kernels = msgspec.structs.replace(CPU_KERNELS, head_groups=2)
    decisions = packing("llama", kernels=kernels, **HALF)
    batches = batch(decisions, ignored=0.2)

    def played() -> dict[str, Tensor]:
        with play(decisions) as interpreter:
            interpreter.run_step(batches, scalars(batches, lr=0.0), [ENDS])
            ends = interpreter.buffer("input.documents")
            assert ends[:6].tolist() == [0, 5, 6, 70, 128, 256]
            return gradients(interpreter)

    wanted = played()
    with getattr(fake_libraries, name)():
        monkeypatch.setitem(BACKENDS, "torch-flash-cpu", BACKENDS[name])
        found = played()
    for key, value in wanted.items():
        assert (found[key] - value).abs().max() <= TOLERANCE * value.abs().max(), key


def test_planned_memory_and_debug_mode_play_documents() -> None:
    verdict = verify(decide(MODELS["llama"], seq_tokens=2048, micro_batch=1, documents=DOCUMENTS), steps=2)
    assert verdict.verified
    assert ("tokens of a document", "26 (mean)") in [(each.what, each.plan) for each in verdict.reductions]
    decisions = packing("llama", **HALF)
    batches = batch(decisions)
    with play(decisions, debug=True) as interpreter:
        interpreter.run_step(batches, scalars(batches, lr=0.0), [ENDS])


@pytest.mark.slow
def test_row_wise_recompute_plays_documents() -> None:
    rowwise = {"recompute": "rowwise", "mlp_chunk_tokens": 512, "swapped_tokens": 512}
    decisions = decide(MODELS["llama"], seq_tokens=2048, micro_batch=1, documents=DOCUMENTS, **rowwise)
    assert verify(decisions, steps=2).verified


@pytest.mark.slow
def test_experts_play_documents() -> None:
    decisions = decide(EXPERT_MODELS["mixtral"], seq_tokens=2048, micro_batch=1, documents=DOCUMENTS)
    assert verify(decisions).verified


def test_a_step_with_too_many_documents_is_refused() -> None:
    decisions = decide(MODELS["llama"], documents=msgspec.structs.replace(DOCUMENTS, most=3))
    batches = batch(decisions)
    with play(decisions) as interpreter, pytest.raises(UsageError, match="more documents than the plan has room for"):
        interpreter.run_step(batches, scalars(batches), [ENDS])


def test_scaling_by_the_length_of_a_sequence_is_refused() -> None:
    model = msgspec.structs.replace(MODELS["llama"], rope_scaling=RopeScaling(kind="dynamic", factor=2.0))
    with pytest.raises(CannotRun, match="scaled by the sequence's length"):
        play(packing("llama", model=model))
