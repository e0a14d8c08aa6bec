"""Tests weights: every policy draws the same ones, and Hugging Face directories give equal logits both ways."""

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.kernels import KERNELS, Call, StepScalars
from memo_exec.training import huggingface, weights
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.huggingface import model_from_config
from memo_sim.contract.model import Model
from memo_sim.program.lower import lower
from tests.exec_cpu.small import MODELS, decide, gpt, llama, play, states
from tests.refusals import refused

os.environ["HF_HUB_OFFLINE"] = "1"
SEQ_TOKENS = 64
TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
GPT2: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 131, "n_positions": SEQ_TOKENS, **TOKENS}
LLAMA: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 131,
    **TOKENS,
}
ROPE: dict[str, Any] = {
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 500.0,
    },
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 100.0,
        "beta_fast": 4.0,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
        "rope_theta": 10000.0,
    },
}
PHI3 = {**LLAMA, "pad_token_id": 0, "max_position_embeddings": 128}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2 untied, exact gelu": ("GPT2", {**GPT2, "tie_word_embeddings": False, "activation_function": "gelu"}),
    "llama": ("Llama", LLAMA),
    "llama with biases": ("Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama 3 frequencies": ("Llama", {**LLAMA, "rope_parameters": ROPE["llama3"]}),
    "linear frequencies": ("Llama", {**LLAMA, "rope_parameters": ROPE["linear"]}),
    "yarn": ("Llama", {**LLAMA, "rope_parameters": ROPE["yarn"]}),
    "dynamic frequencies": ("Llama", {**LLAMA, "max_position_embeddings": 32, "rope_parameters": ROPE["dynamic"]}),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": None}),
    "phi3": ("Phi3", PHI3),
    "phi3, longrope": ("Phi3", {**PHI3, "original_max_position_embeddings": 32, "rope_parameters": ROPE["longrope"]}),
    "qwen2": ("Qwen2", LLAMA),
    "qwen3 tied": ("Qwen3", {**LLAMA, "head_dim": 32, "tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def theirs(transformers: Any, name: str) -> Any:
    """Return a Hugging Face model with random weights."""
    prefix, fields = CONFIGS[name]
    head = "LMHeadModel" if prefix == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, prefix + head)(getattr(transformers, f"{prefix}Config")(**fields)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.15)
    return model


def interpreter_of(model: Model) -> Interpreter:
    decisions = decide(model, seq_tokens=SEQ_TOKENS)
    return Interpreter(decisions, lower(decisions)[0])


def logits(interpreter: Interpreter, ids: Tensor) -> Tensor:
    """Play a step and return the classifier's output."""
    found = []

    def keep(call: Call) -> None:
        KERNELS["linear"](call)
        if call.instruction.name.startswith("fwd/classifier"):
            found.append(call["out"].clone())

    interpreter.kernels = {**KERNELS, "linear": keep}
    interpreter.run_step([(ids, ids)], StepScalars())
    return torch.cat(found)


def assert_logits_agree(interpreter: Interpreter, model: Any) -> None:
    ids = torch.randint(0, 131, (2, SEQ_TOKENS), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = model(ids).logits.flatten(0, 1)
    assert wanted.abs().max() > 0.3
    torch.testing.assert_close(logits(interpreter, ids), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_agree_with_transformers_both_ways(transformers: Any, name: str, tmp_path: Path) -> None:
    hugging_face = theirs(transformers, name)
    hugging_face.save_pretrained(tmp_path / "theirs")
    fields = json.loads((tmp_path / "theirs/config.json").read_text())
    model = model_from_config(fields, where="config.json", name=name)
    with interpreter_of(model) as interpreter:
        weights.load(interpreter, tmp_path / "theirs")
        assert_logits_agree(interpreter, hugging_face)
        for value in weights.named_parameters(interpreter).values():
            value.mul_(1.5)
        own = fields["model_type"] not in ("mistral", "phi3")  # without its source, a model of this shape is a Llama
        weights.save(interpreter, tmp_path / "ours", source=None if own else fields)
        back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
        assert type(back) is type(hugging_face)
        assert_logits_agree(interpreter, back)


@pytest.mark.parametrize("name", ["gpt2", "llama-biased", "qwen2", "qwen3"])
def test_saved_weights_are_loaded_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    with interpreter_of(model) as one, interpreter_of(model) as two:
        weights.initialize(one, seed=5)
        weights.save(one, tmp_path)
        weights.load(two, tmp_path)
        wanted, found = weights.named_parameters(one), weights.named_parameters(two)
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_large_models_are_saved_in_several_files(
    transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 100_000)
    hugging_face = theirs(transformers, "llama")
    hugging_face.save_pretrained(tmp_path / "theirs")
    model = model_from_config(hugging_face.config.to_dict(), where="config.json", name="llama")
    with interpreter_of(model) as interpreter:
        weights.load(interpreter, tmp_path / "theirs")
        weights.save(interpreter, tmp_path / "ours")
        assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 2
        back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
        assert_logits_agree(interpreter, back)
        weights.load(interpreter, tmp_path / "ours")


def test_the_draw_does_not_depend_on_policy_dtype_or_states() -> None:
    drawn = []
    policies: list[dict[str, Any]] = [{}, {"swapped_tokens": 256}, {"states": "host"}, {"dtype": "bf16"}]
    for changes in policies:
        decisions = decide(llama(), **changes)
        with Interpreter(decisions, lower(decisions)[0]) as interpreter:
            weights.initialize(interpreter, seed=7)
            drawn.append({name: value.clone() for name, value in weights.named_parameters(interpreter).items()})
    for other in drawn[1:3]:
        assert all(torch.equal(other[name], drawn[0][name]) for name in drawn[0])
    assert all(torch.equal(drawn[3][name], drawn[0][name].bfloat16()) for name in drawn[0])


def test_the_draw_is_gpt2s() -> None:
    with interpreter_of(gpt(hidden=128, ffn_hidden=512, heads=8, kv_heads=8)) as interpreter:
        weights.initialize(interpreter, seed=7)
        named = {name: value.clone() for name, value in weights.named_parameters(interpreter).items()}
        weights.initialize(interpreter, seed=8)
        assert not torch.equal(named["layer.1/qkv.weight"], weights.named_parameters(interpreter)["layer.1/qkv.weight"])
    assert float(named["layer.1/qkv.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(named["layer.1/proj.weight"].std()) == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert not torch.equal(named["layer.0/qkv.weight"], named["layer.1/qkv.weight"])
    assert (named["layer.2/norm1.weight"] == 1).all()
    assert not named["layer.2/ffn_up.bias"].any()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with interpreter_of(llama()) as interpreter:
        weights.initialize(interpreter)
        weights.save(interpreter, tmp_path)
    return tmp_path


def spoil_config(directory: Path) -> None:
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | {"rms_norm_eps": 0.1}))


def spoil_tensors(directory: Path, **changes: Tensor | None) -> None:
    tensors = load_file(directory / "model.safetensors")
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, directory / "model.safetensors")


SPOILERS = {
    "another model": (spoil_config, {"where": "config.json: norm_eps", "got": "0.1", "wanted": "1e-05"}),
    "no config": (lambda d: (d / "config.json").unlink(), {"where": "config.json", "what": "no such file"}),
    "garbled config": (
        lambda d: (d / "config.json").write_text('{"model_type": '),
        {"where": "config.json", "got": "ends too early"},
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), {"got": None, "wanted": "model.safetensors"}),
    "cut short": (
        lambda d: os.truncate(d / "model.safetensors", 1000),
        {"where": "model.safetensors", "got": "header"},
    ),
    "missing": (lambda d: spoil_tensors(d, model__norm__weight=None), {"wanted": "model.norm.weight", "got": None}),
    "misshapen": (
        lambda d: spoil_tensors(d, model__norm__weight=torch.ones(5)),
        {"where": "model.norm.weight", "got": "(5,)", "wanted": "(64,)"},
    ),
    "unknown": (
        lambda d: spoil_tensors(d, model__extra=torch.ones(5)),
        {"got": "model.extra", "wanted": None},
    ),
}


@pytest.mark.parametrize("spoiler", SPOILERS)
def test_wrong_directories_change_nothing(spoiler: str, saved: Path) -> None:
    spoil, fields = SPOILERS[spoiler]
    spoil(saved)
    with interpreter_of(llama()) as interpreter:
        with refused(BadInput, **fields) as error:
            weights.load(interpreter, saved)
        assert str(error.value.where).startswith(str(saved))
        assert not any(value.any() for value in states(interpreter).values())


def test_models_that_hugging_face_has_not_are_refused(tmp_path: Path) -> None:
    with (
        interpreter_of(MODELS["gpt-bare"]) as interpreter,
        refused(UsageError, got="gpt-small", wanted=("GPT-2", "Qwen3")),
    ):
        weights.save(interpreter, tmp_path)
    assert not any(tmp_path.iterdir())


def test_saved_weights_may_be_read_by_whom_the_umask_lets(saved: Path) -> None:
    weights_file, config = saved / "model.safetensors", saved / "config.json"
    assert weights_file.stat().st_mode == config.stat().st_mode
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]


def test_a_directory_that_cannot_be_written_is_refused(saved: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    shutil.copy(saved / "config.json", blocked)
    with interpreter_of(llama()) as interpreter, refused(UsageError, where=str(blocked), got="File exists"):
        weights.save(interpreter, blocked)


def test_a_rank_reads_the_tensors_that_it_holds(tmp_path: Path) -> None:
    """With ZeRO 3 or stages a rank holds some tensors; the others in the folder belong to the model all the same."""
    with play(decide(MODELS["llama"])) as interpreter:
        weights.save(interpreter, tmp_path)
        wanted = weights.named_parameters(interpreter)["layer.1/qkv.weight"].clone()
    ((name, value),) = huggingface.read(tmp_path, MODELS["llama"], ["layer.1/qkv.weight"])
    assert name == "layer.1/qkv.weight"
    assert torch.equal(value, wanted)
