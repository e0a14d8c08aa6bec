"""Each framework's own parser reads the files that memo exports, and finds in them what the plan says.

Not in the default run: ``tests/frameworks/make_venvs.sh DIR`` makes the environments, MEMO_FRAMEWORKS=DIR names them.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from memo_sim.interchange.framework import Framework
from memo_sim.interchange.frameworks import FRAMEWORKS
from memo_sim.interchange.job import Job
from memo_sim.interchange.launch import Launch
from memo_sim.interchange.shell_script import read_script
from memo_sim.interchange.torchtitan import stage_layers
from tests.sim.interchange.eager_jobs import JOBS

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
CASES = [(name, case) for name in ("torchtitan", "accelerate", "trl", "deepspeed") for case in JOBS[name]]


@pytest.fixture(scope="session")
def environments() -> Path:
    """The folder with the frameworks' environments."""
    folder = os.environ.get("MEMO_FRAMEWORKS")
    if not folder:
        pytest.fail("MEMO_FRAMEWORKS names no folder: run tests/frameworks/make_venvs.sh DIR first")
    return Path(folder)


def written(framework: Framework, job: Job, folder: Path) -> list[str]:
    """Write a job's files and return the command that they start."""
    devices = job.pins.tp or 1
    for name in ("cp", "ulysses", "pp", "dp"):
        devices *= getattr(job.pins, name) or 1
    files = framework.files(job, Launch(max(devices // 8, 1), min(devices, 8)), ("written by a test",))
    for name, text in files.items():
        (folder / name).write_text(text)
    script = files["train.sh"]
    commands = read_script(script, {}, where="train.sh").commands
    return next(words for words in commands if words[0] in ("torchrun", "accelerate"))


def parsed(python: Path, program: str, *words: str, **environment: str) -> dict[str, Any]:
    """Return the last line that a parser prints, as JSON."""
    ran = subprocess.run(
        [str(python), str(HERE / program), *words],
        env={**os.environ, "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}-{case}" for name, case in CASES])
def test_the_parser_finds_the_plan(name: str, case: str, environments: Path, tmp_path: Path) -> None:
    framework, job = FRAMEWORKS[name], JOBS[name][case]
    command = written(framework, job, tmp_path)
    if name == "torchtitan":
        found = parsed(environments / "torchtitan/bin/python", "parse_torchtitan.py", str(tmp_path))
        check_torchtitan(job, found)
        return
    pins = job.pins
    world = str((pins.dp or 1) * (pins.ulysses or 1))
    found = parsed(
        environments / "huggingface/bin/python",
        "parse_huggingface.py",
        *(name, str(tmp_path)),
        COMMAND=json.dumps(command),
        WORLD=world,
    )
    arguments = found["program"]["arguments"]
    check_arguments(job, arguments, optimizer=name != "deepspeed")
    said = found["program"] if name == "trl" else found["program"]["job"]
    assert said["max_length"] == job.seq_tokens
    implementation = {"flash2": "flash_attention_2", "flash3": "flash_attention_3", "plain": "eager"}
    assert said["attn_implementation"] == implementation.get(pins.attention or "", "sdpa")
    if name != "trl":
        assert said["loss_tokens"] == (pins.loss_chunk_tokens or 0)
        assert said["mlp_tokens"] == (pins.mlp_chunk_tokens or 0)
    if name == "deepspeed":
        check_deepspeed(job, found["deepspeed"])
    else:
        check_accelerate(job, found["accelerate"])
        assert said["dtype"] == ("bfloat16" if job.states == "pure-bf16" else "float32")
    if name == "trl":
        assert (said["packing"], said["activation_offloading"], said["loss_type"]) == (False, False, "nll")


def check_torchtitan(job: Job, found: dict[str, Any]) -> None:
    """Compare everything that a recipe says."""
    pins, training, parallel = job.pins, found["training"], found["parallelism"]
    staged = (pins.pp or 1) > 1
    assert training["seq_len"] == job.seq_tokens
    assert training["global_batch_size"] == job.global_batch
    assert (
        parallel["pipeline_parallel_microbatch_size"] if staged else training["local_batch_size"]
    ) == job.micro_batch
    assert parallel["tensor_parallel_degree"] == pins.tp
    assert parallel["enable_sequence_parallel"] == (pins.sequence_parallel or pins.tp == 1)
    assert parallel["context_parallel_degree"] == pins.cp
    assert parallel["pipeline_parallel_degree"] == pins.pp
    shard, replicate = parallel["data_parallel_shard_degree"], parallel["data_parallel_replicate_degree"]
    assert shard * replicate == pins.dp
    assert shard * pins.cp == (pins.zero_ranks or (pins.cp * pins.dp if pins.zero else 1))
    assert parallel["fsdp_reshard_after_forward"] == ("always" if pins.zero == 3 else "never")
    if staged:
        names = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}
        assert parallel["pipeline_parallel_schedule"] == names[pins.schedule]
        parts = parallel["module_fqns_per_model_part"]
        assert [sum(name.startswith("layers.") for name in part) for part in parts] == list(stage_layers(job))
    policies = {"full": "FullAC.Config", "operators": "SelectiveAC.Config", "none": "NoneType"}
    if pins.recompute_layers == "all":
        assert found["activation_checkpoint"] == policies[pins.recompute]
    else:
        word, _, number = str(pins.recompute_layers).partition("-")
        assert found["activation_checkpoint"] == "SomeLayersAC.Config"
        assert found["policy"][word] == int(number)
    chunk = pins.loss_chunk_tokens or 0
    local = job.micro_batch * job.seq_tokens // pins.cp
    assert found["num_chunks"] == (local // chunk if chunk else 1)
    assert found["compile"]["enable"] == (pins.rowwise == "compiled")
    assert found["compile"]["enable_async_tensor_parallel"] == (pins.tp_overlap == "chunked")
    assert found["implementation"] == ("fused_opt_states_bf16" if job.states == "bf16" else pins.adamw)
    assert training["dtype"] == ("bfloat16" if job.states == "pure-bf16" else "float32")
    assert training["enable_cpu_offload"] == (job.states == "host")
    assert training["disable_cuda_graphs"] == (not pins.cuda_graphs)
    assert found["deterministic"] == job.deterministic
    assert found["positions"] == job.seq_tokens
    assert found["theta"] == job.model.rope_theta
    for key, value in found["model"].items():
        assert value == getattr(job.model, key), key


def check_arguments(job: Job, found: dict[str, Any], *, optimizer: bool) -> None:
    """Compare ``TrainingArguments``."""
    pins = job.pins
    assert found["per_device_train_batch_size"] == job.micro_batch
    assert (
        found["per_device_train_batch_size"] * found["gradient_accumulation_steps"] * (pins.dp or 1) == job.global_batch
    )
    assert bool(found["gradient_checkpointing"]) == (pins.recompute == "full")
    kwargs = found["gradient_checkpointing_kwargs"] or {}
    assert bool(kwargs.get("offload")) == bool(pins.offload_inputs)
    assert f"every-{kwargs.get('every_n_layers', 1)}".replace("every-1", "all") == (pins.recompute_layers or "all")
    mixed = job.states != "pure-bf16" or (pins.ulysses is not None)
    assert found["bf16"] == (pins.dtype == "bf16" and mixed)
    assert found["torch_compile"] == (pins.rowwise == "compiled")
    if optimizer:
        names = {"foreach": "adamw_torch", "fused": "adamw_torch_fused"}
        assert str(found["optim"]).rpartition(".")[2].lower() == names[pins.adamw or "fused"]


def check_accelerate(job: Job, found: dict[str, Any]) -> None:
    """Compare accelerate's configuration, as its launcher and plugins understand it."""
    pins = job.pins
    tp, cp, dp = pins.tp or 1, pins.cp or 1, pins.dp or 1
    assert found["num_processes"] == tp * cp * dp
    assert found["mixed_precision"] == ("no" if job.states == "pure-bf16" or pins.dtype == "fp32" else pins.dtype)
    assert found["use_fsdp"] == bool(pins.zero)
    if pins.zero:
        plugin, mesh = found["fsdp"], found["mesh"]
        assert plugin["version"] == 2
        assert plugin["reshard_after_forward"] == (pins.zero == 3)
        assert plugin["offload"] == ("CPUOffloadPolicy" if job.states == "host" else "OffloadPolicy")
        assert not plugin["activation_checkpointing"]
        assert (mesh["tp"], mesh["cp"], mesh["total"]) == (tp, cp, tp * cp * dp)
        assert mesh["dp_replicate"] * mesh["dp_shard"] == dp
        assert mesh["dp_shard"] * cp == (pins.zero_ranks or cp * dp)
        assert mesh["strategy"] == ("allgather" if cp > 1 else None)


def check_deepspeed(job: Job, found: dict[str, Any]) -> None:
    """Compare DeepSpeed's configuration."""
    pins = job.pins
    assert found["train_batch_size"] == job.global_batch
    assert found["micro_batch"] == job.micro_batch
    assert found["gradient_accumulation_steps"] * job.micro_batch * (pins.dp or 1) == job.global_batch
    assert found["stage"] == pins.zero
    assert found["offload"] == ("cpu" if job.states == "host" else None)
    if pins.overlap is not None:
        assert found["overlap_comm"] == (pins.overlap == "gradients")
    assert found["bf16"] == (pins.dtype == "bf16")
    assert found["fp16"] == (pins.dtype == "fp16")
    assert found["pure"] == (job.states == "pure-bf16")
    assert bool(found["cpu_checkpointing"]) == bool(pins.offload_inputs)
    assert found["optimizer"] == ["adamw", pins.adamw == "foreach"]


def test_tiles_give_the_loss_and_gradients_of_the_whole(environments: Path, tmp_path: Path) -> None:
    written(FRAMEWORKS["deepspeed"], JOBS["deepspeed"]["tiled"], tmp_path)
    found = parsed(environments / "huggingface/bin/python", "run_tiles.py", str(tmp_path))
    assert len(found) == 6
    assert all(difference < 1e-5 for difference in found.values()), found


def test_all_environments_are_there(environments: Path) -> None:
    missing = [name for name in ("huggingface", "torchtitan") if not (environments / name / "bin/python").exists()]
    assert not missing
