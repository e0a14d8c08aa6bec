"""Latent attention: gradients are those of transformers' DeepSeek-V3 and of plain autograd, whatever is kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from memo_exec.training import weights
from tests.exec_cpu.interpreter.replayed import TOLERANCE, assert_gradients_equal_autograds
from tests.exec_cpu.small import DEEPSEEK_MODEL, LATENT_MODELS, batch, decide, gradients, one_step, play, scalars
from tests.pairs import covering

POLICIES: dict[str, dict[str, Any]] = {
    "full recompute": {"recompute": "full"},
    "inputs swapped": {"recompute": "full", "swapped_tokens": 256},
    "selective recompute": {"recompute": "selective"},
    "half swapped, half kept": {"swapped_tokens": 128},
    "alpha of a half": {"recompute": "tokenwise", "swapped_tokens": 128},
    "heads rebuilt": {"rebuild_qkv": True},
    "heads rebuilt, norms again": {"rebuild_qkv": True, "recompute": "norms"},
    "heads rebuilt, all swapped": {"rebuild_qkv": True, "swapped_tokens": 256},
    "heads rebuilt, alpha of a half": {"rebuild_qkv": True, "recompute": "tokenwise", "swapped_tokens": 128},
}


QUICK = ("latent", "latent-lite-yarn")
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LATENT_MODELS]


@pytest.mark.parametrize(("policy", "name"), covering(POLICIES, LATENT_MODELS))
def test_gradients_are_bitwise_those_of_keep(policy: str, name: str) -> None:
    row_blocks = {"recompute": "tokenwise", "swapped_tokens": 128} if "alpha" in policy else {}
    kept, wanted = one_step(decide(LATENT_MODELS[name], **row_blocks))
    record, found = one_step(decide(LATENT_MODELS[name], **POLICIES[policy]))
    assert record.loss == kept.loss
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


@pytest.mark.parametrize("policy", ["alpha of a half", pytest.param("heads rebuilt", marks=pytest.mark.slow)])
def test_debug_mode_plays_latents(policy: str) -> None:
    """The queries' product writes a part of the packed rows, which the assembly then changes in place."""
    decisions = decide(LATENT_MODELS["latent"], **POLICIES[policy])
    record, found = one_step(decisions, debug=True)
    plain, wanted = one_step(decisions)
    assert record.loss == plain.loss
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", EACH)
def test_gradients_equal_autograd(name: str) -> None:
    fields: dict[str, Any] = {"recompute": "tokenwise", "swapped_tokens": 128, "micro_batch": 1, "seq_tokens": 256}
    assert_gradients_equal_autograds(decide(LATENT_MODELS[name], rebuild_qkv="yarn" in name, **fields))


@pytest.mark.parametrize("rebuilt", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_latents_go_with_experts(rebuilt: bool) -> None:
    fields: dict[str, Any] = {"recompute": "tokenwise", "swapped_tokens": 128, "micro_batch": 1, "seq_tokens": 256}
    assert_gradients_equal_autograds(decide(DEEPSEEK_MODEL, rebuild_qkv=rebuilt, **fields))


@pytest.mark.parametrize("name", EACH)
def test_a_whole_model_has_the_gradients_of_transformers(name: str, tmp_path: Path) -> None:
    """The file that memo writes is read as a dense DeepSeek-V3, with the same loss and gradients."""
    decisions = decide(LATENT_MODELS[name], recompute="tokenwise", swapped_tokens=128)
    batches = batch(decisions, ignored=0.2)
    with play(decisions) as interpreter:
        weights.save(interpreter, tmp_path)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").double()
        record = interpreter.run_step(batches, scalars(batches, lr=0.0))
        found = gradients(interpreter)
    ids, labels = (each.view(2, -1) for each in batches[0])
    logits = theirs(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (loss * scalars(batches).loss_scale).backward()
    assert type(theirs).__name__ == "DeepseekV3ForCausalLM"
    assert record.loss == pytest.approx(float(loss.detach() * scalars(batches).loss_scale), rel=1e-6)
    for layer in range(decisions.model.layers):
        at, ours = theirs.model.layers[layer], f"layer.{layer}/"
        attention = at.self_attn
        queries = [attention.q_a_proj.weight.grad] if decisions.model.latent.q_rank else []
        pairs = {
            "latent.weight": torch.cat([*queries, attention.kv_a_proj_with_mqa.weight.grad]),
            "q_up.weight": (attention.q_b_proj if queries else attention.q_proj).weight.grad,
            "kv_up.weight": attention.kv_b_proj.weight.grad,
            "proj.weight": attention.o_proj.weight.grad,
            "kv_latent_norm.weight": attention.kv_a_layernorm.weight.grad,
            "norm1.weight": at.input_layernorm.weight.grad,
            "ffn_up.weight": torch.cat([at.mlp.gate_proj.weight.grad, at.mlp.up_proj.weight.grad]),
        }
        for key, wanted in pairs.items():
            error = (found[ours + key] - wanted).abs().max() / wanted.abs().max()
            assert error <= TOLERANCE, ours + key
