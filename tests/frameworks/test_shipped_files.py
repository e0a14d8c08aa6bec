"""Unmodified files that TRL and torchtitan ship in their packages are imported as reading them by hand gives.

Not in the default run: ``tests/frameworks/make_venvs.sh DIR`` installs the packages, MEMO_FRAMEWORKS=DIR names them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from memo_sim.answers.import_job import read_files

pytestmark = [pytest.mark.frameworks]

TRL: dict[str, tuple[str, int, dict[str, Any]]] = {
    "fsdp1": ("trl", 8, {"zero": 3, "dp": 8, "sharding": "fsdp1"}),
    "fsdp2": ("trl", 8, {"zero": 3, "dp": 8, "sharding": None}),
    "multi_gpu": ("trl", 8, {"zero": 0, "dp": 8}),
    "single_gpu": ("trl", 1, {"zero": 0, "dp": 1}),
    "zero1": ("deepspeed", 8, {"zero": 1, "dp": 8}),
    "zero2": ("deepspeed", 8, {"zero": 2, "dp": 8}),
    "zero3": ("deepspeed", 8, {"zero": 3, "dp": 8}),
}
"""Of each file of ``trl/accelerate_configs``: who runs it, devices, and what it pins; all are in bf16."""
TORCHTITAN: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "llama3_8b": (8192, 1, 64, {"tp": 1, "dp": 64, "zero": 3, "recompute": "operators", "loss_chunk_tokens": 1024}),
    "llama3_70b": (8192, 8, 64, {"tp": 8, "dp": 8, "zero": 3, "recompute": "full", "loss_chunk_tokens": 8192}),
    "qwen3_0_6b": (4096, 4, 256, {"tp": 1, "dp": 64, "zero": 3, "recompute": "operators", "loss_chunk_tokens": 2048}),
    "qwen3_32b": (4096, 2, 128, {"tp": 1, "cp": 1, "pp": 1, "dp": 64, "recompute": "full", "loss_chunk_tokens": 1024}),
}
"""Of each recipe on 64 devices: tokens, micro-batch, batch, and what it pins."""


def package(environment: str, name: str) -> Path:
    """Return the folder of a package that an environment has."""
    folder = os.environ.get("MEMO_FRAMEWORKS")
    if not folder:
        pytest.fail("MEMO_FRAMEWORKS names no folder: run tests/frameworks/make_venvs.sh DIR first")
    (found,) = Path(folder, environment, "lib").glob(f"python3*/site-packages/{name}")
    return found


def check_pins(wanted: dict[str, Any], pins: object) -> None:
    """Compare the pins that a case names."""
    assert {name: getattr(pins, name) for name in wanted} == wanted


def test_every_file_of_trl_is_a_case() -> None:
    assert {path.stem for path in package("huggingface", "trl/accelerate_configs").glob("*.yaml")} == set(TRL)


@pytest.mark.parametrize("name", TRL)
def test_a_configuration_of_trl(name: str) -> None:
    framework, devices, pins = TRL[name]
    path = package("huggingface", "trl/accelerate_configs") / f"{name}.yaml"
    given = {"model": "qwen3-8b", "seq_len": "8k", "per_device_train_batch_size": "2"}
    of, read = read_files([str(path)], given, framework="trl")
    assert (of.name, read.devices, read.job.pins.dtype) == (framework, devices, "bf16")
    assert (read.job.seq_tokens, read.job.micro_batch, read.job.global_batch) == (8192, 2, 2 * devices)
    check_pins(pins, read.job.pins)
    assert all(option.why for option in read.ignored)


@pytest.mark.parametrize("name", TORCHTITAN)
def test_a_recipe_of_torchtitan(name: str) -> None:
    tokens, micro_batch, batch, pins = TORCHTITAN[name]
    path = package("torchtitan", f"torchtitan/models/{name.partition('_')[0]}") / "config_registry.py"
    of, read = read_files([str(path)], {"recipe": name, "devices": "64"})
    assert (of.name, read.devices) == ("torchtitan", 64)
    assert (read.job.seq_tokens, read.job.micro_batch, read.job.global_batch) == (tokens, micro_batch, batch)
    check_pins(pins, read.job.pins)
    assert all(option.why for option in read.ignored)
