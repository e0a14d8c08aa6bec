"""Runs that train adapters: they resume where they stopped, on the same frozen weights, and save adapters alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memo_exec.commands.run import run
from memo_exec.commands.run_options import RunOptions
from memo_exec.training import checkpoint, peft_folder
from memo_exec.training.checkpoint_metadata import read_metadata
from memo_sim.contract.errors import UsageError
from tests.exec_cpu.plans import byte_decisions, write_plan
from tests.exec_cpu.small import llama

MODEL, TEXT = llama(vocab=256, layers=2), "r=4,alpha=8,targets=qkv+proj+ffn"


def played(plan: Path, **options: Any) -> list[float]:
    outcome = run(plan, RunOptions(hyperparameters={"learning_rate": 1e-2}, **options))
    assert outcome is not None
    return outcome.comparison.losses


@pytest.fixture(name="base", scope="module")
def _base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of weights that a run of the whole model has saved."""
    folder = tmp_path_factory.mktemp("base")
    played(write_plan(folder / "plan.json", byte_decisions(model=MODEL)), steps=2, save=folder / "out")
    return folder / "out" / "weights"


def test_a_run_of_adapters_resumes_and_saves_them_alone(tmp_path: Path, base: Path) -> None:
    plan, out = write_plan(tmp_path / "plan.json", byte_decisions(model=MODEL, adapters=TEXT)), tmp_path / "out"
    whole = played(plan, steps=4, weights=base)
    first = played(plan, steps=2, weights=base, save=out)
    with pytest.raises(UsageError, match="other frozen weights"):
        played(plan, steps=4, save=out, resume=True)
    assert played(plan, steps=4, weights=base, save=out, resume=True) == whole
    assert whole[:2] == first
    assert whole[3] < whole[0]

    saved = checkpoint.latest(out)
    assert saved is not None
    names = read_metadata(saved / checkpoint.STATE_DIRECTORY).state_dict_metadata
    assert names
    assert all(name.endswith((".lora_a", ".lora_b")) for name in names)
    config = json.loads((out / "adapters" / peft_folder.CONFIG).read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert not (out / "weights").exists()

    after = played(plan, steps=1, weights=base, adapters=out / "adapters")
    assert after[0] < whole[0]


def test_adapters_need_a_plan_with_them(tmp_path: Path, base: Path) -> None:
    plan = write_plan(tmp_path / "plan.json", byte_decisions(model=MODEL))
    with pytest.raises(UsageError, match="the plan trains no adapters"):
        played(plan, steps=1, adapters=tmp_path)
    folder = tmp_path / "adapters"
    folder.mkdir()
    (folder / peft_folder.CONFIG).write_text("{}")
    with pytest.raises(UsageError, match="--weights names a folder of adapters"):
        played(plan, steps=1, weights=folder)
