"""Gradients of low-rank adapters against plain autograd of W x + scale B A x, under every policy."""

from typing import Any

import pytest

from memo_exec.training import weights
from memo_exec.verification.autograd_model import AutogradModel
from tests.exec_cpu.small import (
    EXPERT_MODELS,
    MODELS,
    WINDOWED_MODELS,
    batch,
    decide,
    gradients,
    llama,
    play,
    scalars,
)

TOLERANCE = 1e-5
EVERY = "r=4,alpha=8,targets=qkv+proj+ffn"
SINKS = {"sinks": llama(window=64, sinks=True)}
BLOCKS: dict[str, Any] = {"recompute": "rowwise", "mlp_chunk_tokens": 128}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("qwen3", EVERY, {}),
    "gpt": ("gpt2", EVERY, {"recompute": "full"}),
    "some targets": ("llama-biased", "r=4,alpha=8,targets=q+v+up,rslora", {"recompute": "tokenwise"}),
    "half swapped": ("qwen3", "r=3,alpha=8,targets=k+gate+down", {"recompute": "tokenwise", "swapped_tokens": 128}),
    "down alone, kept": ("gpt-bare", "r=4,alpha=8,targets=down", {"recompute": "none", "swapped_tokens": 256}),
    "modules again": ("qwen2", "r=4,alpha=8,targets=qkv", {"recompute": "mlp"}),
    "norms again": ("llama", "r=4,alpha=8,targets=proj", {"recompute": "norms"}),
    "frozen sinks": ("sinks", EVERY, {"recompute": "tokenwise", "swapped_tokens": 128}),
    "norms behind": ("gemma3", EVERY, {"recompute": "tokenwise", "swapped_tokens": 128}),
    "some targets of Gemma 3": ("gemma3", "r=4,alpha=8,targets=q+down", {"recompute": "full"}),
    "attention beside experts": ("qwen3-moe", "r=4,alpha=8,targets=qkv+proj", {"recompute": "tokenwise"}),
    "row-wise": ("qwen2", EVERY, BLOCKS | {"swapped_tokens": 128}),
    "row-wise, some targets": ("qwen3", "r=4,alpha=8,targets=q+down", BLOCKS),
    "row-wise, other targets": ("llama", "r=4,alpha=8,targets=proj", BLOCKS),
    "row blocks": ("qwen2", EVERY, {"recompute": "full", "mlp_chunk_tokens": 128}),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_autograd(name: str) -> None:
    model, adapters, policy = CASES[name]
    models = MODELS | EXPERT_MODELS | WINDOWED_MODELS | SINKS
    decisions = decide(models[model], global_batch=4, adapters=adapters, **policy)
    batches = batch(decisions, ignored=0.2)
    with play(decisions) as interpreter:
        reference = AutogradModel(decisions.model, weights.named_parameters(interpreter), adapters=decisions.lora)
        record = interpreter.run_step(batches, scalars(batches, lr=0.0))
        found = gradients(interpreter)
    wanted = 0.0
    for ids, labels in batches:
        loss = reference.loss(ids.view(2, -1), labels.view(2, -1), scalars(batches).loss_scale)
        loss.backward()
        wanted += float(loss.detach())

    assert record.loss == pytest.approx(wanted, rel=1e-6)
    assert set(found) == set(reference.trained)
    norm = 0.0
    for key, leaf in reference.trained.items():
        assert leaf.grad is not None
        error = (found[key] - leaf.grad).abs().max() / leaf.grad.abs().max()
        assert error <= TOLERANCE, key
        norm += float(leaf.grad.square().sum())
    assert record.grad_norm == pytest.approx(norm**0.5, rel=1e-5)
