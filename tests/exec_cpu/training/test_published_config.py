"""Trained weights are published with the config.json they began from; missing inputs stop a run at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memo_exec.commands.run import run
from memo_exec.commands.run_options import RunOptions
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.training import huggingface, weights
from memo_sim.contract.errors import BadInput
from memo_sim.contract.huggingface import model_from_config
from memo_sim.program.lower import lower
from tests.exec_cpu.plans import byte_decisions, write_plan
from tests.exec_cpu.small import llama
from tests.refusals import refused


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan of a Llama over bytes, and weights to begin from whose config says more than the shape."""
    folder = tmp_path_factory.mktemp("begun")
    decisions = byte_decisions(model=llama(vocab=256))
    write_plan(folder / "plan.json", decisions)
    with Interpreter(decisions, lower(decisions)[0]) as interpreter:
        weights.initialize(interpreter, seed=3)
        weights.save(interpreter, folder / "base")
    config = json.loads((folder / "base/config.json").read_text())
    config |= {"max_position_embeddings": 131072, "eos_token_id": 7, "torch_dtype": "bfloat16", "my_field": [1]}
    (folder / "base/config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))
    return folder


def test_every_field_of_the_source_is_published_also_after_a_resume(begun: Path) -> None:
    source = json.loads((begun / "base/config.json").read_text())
    run(begun / "plan.json", RunOptions(steps=1, weights=begun / "base", save=begun / "run"))
    first = json.loads((begun / "run/weights/config.json").read_text())
    run(begun / "plan.json", RunOptions(steps=2, save=begun / "run", resume=True))
    assert json.loads((begun / "run/weights/config.json").read_text()) == first
    source.pop("quantization_config")  # the trained weights have none
    assert first == {**source, "torch_dtype": "float32"}


def test_positions_grow_with_what_training_used_and_other_runs_have_no_source(begun: Path) -> None:
    config = json.loads((begun / "base/config.json").read_text())
    (begun / "base/config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    run(begun / "plan.json", RunOptions(steps=1, weights=begun / "base", save=begun / "longer"))
    assert json.loads((begun / "longer/weights/config.json").read_text())["max_position_embeddings"] == 256
    run(begun / "plan.json", RunOptions(steps=1, save=begun / "random"))
    assert "my_field" not in json.loads((begun / "random/weights/config.json").read_text())


PHI3 = {
    "model_type": "phi3",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    "own",
    [
        {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64, "max_position_embeddings": 128},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 128},
    ],
    ids=["longrope", "dynamic"],
)
def test_positions_stay_where_more_of_them_are_another_model(own: dict[str, Any]) -> None:
    source = {**PHI3, **own}
    model = model_from_config(source, where="here", name="phi3")
    assert huggingface.published(model, 1024, source, torch.float32) == source
    plain = model_from_config({**PHI3, "max_position_embeddings": 128}, where="here", name="phi3")
    longer = huggingface.published(plain, 1024, {**PHI3, "max_position_embeddings": 128}, torch.float32)
    assert longer["max_position_embeddings"] == 1024


@pytest.mark.parametrize(
    ("options", "where"),
    [({"data": Path("nofile")}, "nofile"), ({"weights": Path("none")}, "none/config.json")],
)
def test_missing_inputs_are_refused_before_anything_is_computed(
    begun: Path, options: dict[str, Path], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memo_exec.commands.run.preflight", None)
    with refused(BadInput, where=where, what="no such file"):
        run(begun / "plan.json", RunOptions(steps=1, **options))
