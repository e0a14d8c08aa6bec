"""Adapters as folders of PEFT: written, read again, refused; and loaded by PEFT itself where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.training import peft_folder, weights
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.plan import Decisions
from tests.exec_cpu.small import MODELS, batch, decide, gradients, play, scalars

TEXT = "r=4,alpha=8,targets=qkv+proj+ffn"


def adapted(name: str = "llama", text: str = TEXT, **changes: Any) -> Decisions:
    return decide(MODELS[name], adapters=text, **changes)


def saved(interpreter: Interpreter, directory: Path) -> dict[str, torch.Tensor]:
    weights.save(interpreter, directory, base=Path("base"))
    return load_file(directory / peft_folder.TENSORS)


@pytest.mark.parametrize("text", [TEXT, "r=3,alpha=6,targets=q+v+up,rslora"])
def test_a_folder_has_the_modules_of_the_targets(tmp_path: Path, text: str) -> None:
    decisions = adapted(text=text)
    with play(decisions) as interpreter:
        stored = saved(interpreter, tmp_path)
        own = weights.named_parameters(interpreter)
    config = json.loads((tmp_path / peft_folder.CONFIG).read_text())
    assert decisions.lora is not None
    rank, modules = decisions.lora.rank, config["target_modules"]
    assert (config["r"], config["peft_type"], config["use_rslora"]) == (rank, "LORA", decisions.lora.rslora)
    assert len(stored) == 2 * len(modules) * decisions.model.layers
    q = stored["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    assert torch.equal(q, own["layer.1/qkv.lora_b"][:64])
    v = stored["base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"]
    assert torch.equal(v, own["layer.1/qkv.lora_a"][-rank:])
    up = stored["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"]
    assert torch.equal(up, own["layer.0/ffn_up.lora_b"][-160:])


def test_what_was_written_is_read(tmp_path: Path) -> None:
    with play(adapted()) as first:
        saved(first, tmp_path)
        wanted = {name: value.clone() for name, value in weights.named_parameters(first).items()}
    with play(adapted()) as second:
        weights.initialize(second, seed=9)
        weights.load_adapters(second, tmp_path)
        for name, value in weights.named_parameters(second).items():
            assert torch.equal(value, wanted[name]) == weights.is_adapter(name), name


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"r": 8}, "not those of the plan"),
        ({"lora_alpha": 4}, "not those of the plan"),
        ({"use_rslora": True}, "not those of the plan"),
        ({"use_dora": True}, "no adapters of this kind"),
        ({"rank_pattern": {"q_proj": 8}}, "no adapters of this kind"),
        ({"modules_to_save": ["lm_head"]}, "no adapters of this kind"),
        ({"bias": "all"}, "no biases"),
        ({"peft_type": "IA3"}, "not adapters of low rank"),
    ],
)
def test_other_adapters_are_refused(tmp_path: Path, changed: dict[str, Any], match: str) -> None:
    with play(adapted()) as interpreter:
        saved(interpreter, tmp_path)
        path = tmp_path / peft_folder.CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
        with pytest.raises(BadInput, match=match):
            weights.load_adapters(interpreter, tmp_path)


def test_adapters_of_other_targets_are_refused(tmp_path: Path) -> None:
    with play(adapted()) as interpreter:
        saved(interpreter, tmp_path)
    fewer, refused = (
        adapted(text="r=4,alpha=8,targets=qkv+proj"),
        pytest.raises(BadInput, match="no adapter of the plan"),
    )
    with play(fewer) as interpreter, refused:
        weights.load_adapters(interpreter, tmp_path)


def test_a_packed_model_has_no_such_folder(tmp_path: Path) -> None:
    with play(adapted("gpt2")) as interpreter, pytest.raises(UsageError, match="one adapter for Q, K and V of gpt2"):
        weights.save(interpreter, tmp_path)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_peft_computes_the_same_gradients(tmp_path: Path, name: str) -> None:
    """PEFT loads both folders, and transformers' modules with PEFT's layers have our loss and gradients."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    decisions = adapted(name)
    with play(decisions) as interpreter:
        plain = msgspec.structs.replace(decisions, adapters="none")
        base = {k: v for k, v in weights.named_parameters(interpreter).items() if not weights.is_adapter(k)}
        with play(plain) as whole:
            weights.save(whole, tmp_path / "base", named=base)
        saved(interpreter, tmp_path / "adapters")
        batches = batch(decisions)
        record = interpreter.run_step(batches, scalars(batches, lr=0.0))
        found = gradients(interpreter)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapters", is_trainable=True)
    (ids, labels) = batches[0]
    logits = model(ids.view(2, -1)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels)
    loss.backward()
    assert record.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    theirs = {key.replace(".default", ""): p.grad for key, p in model.named_parameters() if p.requires_grad}
    assert decisions.lora is not None
    for ours, stored in peft_folder.entries(decisions.model, decisions.lora).items():
        wanted = torch.cat([theirs.pop(part) for part, _ in stored])
        assert (found[ours] - wanted).abs().max() <= 1e-5 * wanted.abs().max(), ours
    assert not theirs
