"""Windows, sinks and Gemma 3's layers: gradients equal plain autograd's and those of transformers' own modules."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from memo_exec.training import huggingface, weights
from memo_exec.verification.autograd_model import AutogradModel
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Layout
from tests.exec_cpu.interpreter.replayed import assert_gradients_equal_autograds
from tests.exec_cpu.small import WINDOWED_MODELS, batch, decide, gradients, llama, of_kinds, one_step, play, scalars

TOLERANCE = 1e-5
HALF: dict[str, Any] = {"micro_batch": 1, "seq_tokens": 256, "recompute": "tokenwise", "swapped_tokens": 128}
POLICIES: dict[str, dict[str, Any]] = {
    "keep": {"micro_batch": 1},
    "alpha of a half": HALF,
    "alpha of a half, planned": HALF | {"memory_policy": "planned"},
    "swap": {"micro_batch": 1, "swapped_tokens": 128},
    "full": {"micro_batch": 1, "recompute": "full"},
    "full without early stop": {"micro_batch": 1, "recompute": "full", "early_stop": False},
}
LONG = [policy for policy in POLICIES if policy not in ("alpha of a half", "full")]


@pytest.mark.parametrize("name", WINDOWED_MODELS)
@pytest.mark.parametrize(
    "policy", [*(p for p in POLICIES if p not in LONG), *(pytest.param(p, marks=pytest.mark.slow) for p in LONG)]
)
def test_gradients_equal_autograd(policy: str, name: str) -> None:
    assert_gradients_equal_autograds(decide(WINDOWED_MODELS[name], **POLICIES[policy]))


@pytest.mark.parametrize("name", ["window", "sinks"])
def test_row_wise_recompute_keeps_attention_with_its_window_and_sinks(name: str) -> None:
    rowwise = HALF | {"recompute": "rowwise", "mlp_chunk_tokens": 128}
    assert_gradients_equal_autograds(decide(WINDOWED_MODELS[name], **rowwise))


@pytest.mark.parametrize("window", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_subsequences_read_the_keys_of_a_window(window: int) -> None:
    """A window of 200 reaches over the subsequence before, which has 128 tokens."""
    model = llama(window=window, sinks=True)
    layout = Layout(subsequences=4)
    assert_gradients_equal_autograds(decide(model, micro_batch=1, seq_tokens=512, layout=layout))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"recompute": "operators"}, {"recompute": "norms"}, {"recompute": "mlp"}])
def test_sinks_and_windows_under_other_policies(changes: dict[str, Any]) -> None:
    assert_gradients_equal_autograds(decide(WINDOWED_MODELS["sinks"], micro_batch=1, **changes))


@pytest.mark.slow
def test_several_sequences_of_a_micro_batch_have_windows_of_their_own() -> None:
    """Two micro-batches of one sequence give the gradients of one of two."""
    model = WINDOWED_MODELS["gemma3"]
    together, alone = decide(model), decide(model, micro_batch=1, global_batch=2)
    found = []
    for decisions in (together, alone):
        batches = batch(together)
        if decisions is alone:
            ids, labels = batches[0]
            batches = list(zip(ids.split(128), labels.split(128), strict=True))
        with play(decisions) as interpreter:
            interpreter.run_step(batches, scalars(batches, lr=0.0))
            found.append(gradients(interpreter))
    for key, value in found[0].items():
        assert (value - found[1][key]).abs().max() <= TOLERANCE * value.abs().max(), key


TRANSFORMERS = {
    "gemma3": WINDOWED_MODELS["gemma3"],
    "mistral": WINDOWED_MODELS["window"],
    "qwen2": of_kinds(llama(qkv_bias=True), (0, 0.0), (20, 0.0), (20, 0.0)),
    "qwen3": of_kinds(llama(qk_norm=True, head_dim=32), (20, 0.0), (0, 0.0), (20, 0.0)),
}


@pytest.mark.parametrize("name", ["gemma3", *(pytest.param(n, marks=pytest.mark.slow) for n in [*TRANSFORMERS][1:])])
def test_a_whole_model_has_the_gradients_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = quiet()
    model = TRANSFORMERS[name]
    decisions = decide(model, **(HALF | {"micro_batch": 2, "seq_tokens": 128}))
    batches = batch(decisions, ignored=0.2)
    with play(decisions) as interpreter:
        weights.save(interpreter, tmp_path)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").double()
        record = interpreter.run_step(batches, scalars(batches, lr=0.0))
        found = gradients(interpreter)
    assert theirs.config.model_type == {"gemma3": "gemma3_text"}.get(name, name)
    ids, labels = (each.view(2, -1) for each in batches[0])
    logits = theirs(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (loss * scalars(batches).loss_scale).backward()
    assert record.loss == pytest.approx(float(loss.detach() * scalars(batches).loss_scale), rel=1e-5)
    named = dict(theirs.named_parameters())
    entries = huggingface.entries(model)
    assert {part for entry in entries for part, _ in entry.parts} == set(named)
    for entry in entries:
        wanted = torch.cat([named[part].grad for part, _ in entry.parts])
        error = (found[entry.ours] - wanted).abs().max() / wanted.abs().max()
        assert error <= TOLERANCE, entry.ours


def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@pytest.mark.parametrize("layer", [0, 1])
def test_attention_with_sinks_is_that_of_gpt_oss(layer: int) -> None:
    """The layer's attention in plain autograd, the reference above, against GptOssAttention: output and gradients."""
    quiet()
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

    model: Model = WINDOWED_MODELS["sinks"]
    config = GptOssConfig(
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        num_hidden_layers=2,
        sliding_window=20,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
    )
    config._attn_implementation = "eager"
    assert (config.layer_types[layer] == "sliding_attention") == bool(model.layer(layer).window)
    with play(decide(model, micro_batch=1)) as interpreter:
        ours = AutogradModel(model, weights.named_parameters(interpreter))
    theirs, at = GptOssAttention(config, layer).double(), f"layer.{layer}/"
    widths = [model.q_width, model.kv_width, model.kv_width]
    with torch.no_grad():
        for kind in ("weight", "bias"):
            for name, part in zip("qkv", torch.split(ours.p[f"{at}qkv.{kind}"], widths), strict=True):
                getattr(theirs.get_submodule(f"{name}_proj"), kind).copy_(part)
            getattr(theirs.o_proj, kind).copy_(ours.p[f"{at}proj.{kind}"])
        theirs.sinks.copy_(ours.p[f"{at}sinks"])
    x = torch.randn(1, 64, model.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = [x.clone().requires_grad_() for _ in range(2)]
    positions = GptOssRotaryEmbedding(config)(x.float(), torch.arange(64)[None])
    at_key, key = torch.arange(64)[:, None], torch.arange(64)[None]
    seen = (key <= at_key) & (key > at_key - (model.layer(layer).window or 64))
    mask = torch.zeros(64, 64, dtype=torch.float64).masked_fill(~seen, -torch.inf)[None, None]
    wanted, _ = theirs(given[0], tuple(each.double() for each in positions), mask)
    found = ours._attention(given[1], at, model.layer(layer))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    for out in (found, wanted):
        (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)).sum().backward()
    pairs = [(given[1].grad, given[0].grad), (ours.p[f"{at}sinks"].grad, theirs.sinks.grad)]
    pairs.append((ours.p[f"{at}proj.bias"].grad, theirs.o_proj.bias.grad))
    for one, other in pairs:
        assert one is not None
        assert other is not None
        assert (one - other).abs().max() <= TOLERANCE * other.abs().max()


def test_what_is_moved_to_the_host_has_the_inputs_of_norms_behind() -> None:
    """Two more rows of a token's features are kept, and two statistics."""
    plain, gemma = (WINDOWED_MODELS["gemma3"], llama(qk_norm=True, head_dim=32, activation="silu"))
    moved = [
        one_step(decide(model, micro_batch=1, swapped_tokens=128, seq_tokens=128))[0].moved.d2h
        for model in (plain, gemma)
    ]
    rows = moved[0] - moved[1]
    assert rows % (128 * 4 * (2 * 64 + 2)) == 0
    assert rows > 0
