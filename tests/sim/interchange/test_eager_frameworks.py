"""Exports to torchtitan, accelerate, TRL and DeepSpeed, read again, and files as users write them."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.documents import Documents
from memo_sim.contract.errors import BadInput, MemoError, UsageError
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.interchange.framework import Read, Source
from memo_sim.interchange.frameworks import FRAMEWORKS, framework_of
from memo_sim.interchange.job import Job
from memo_sim.interchange.launch import Launch
from memo_sim.interchange.model_names import same_shape
from memo_sim.interchange.plan_paths import differences
from memo_sim.interchange.python_recipe import functions_of, settings_of
from memo_sim.interchange.torchtitan import split_of
from memo_sim.program.lower import lower, program_sha256
from tests.refusals import check_fields
from tests.sim.interchange.eager_jobs import JOBS, SMALL_QWEN, TORCHTITAN, model

CASES = [(name, case) for name in JOBS for case in JOBS[name]]
PRICED = [(name, case) for name, case in CASES if JOBS[name][case].pins.dtype == "bf16"]
"""Those whose dtype the profile of the tests' cluster has rates of."""
EVERY = pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}-{case}" for name, case in CASES])
EAGER = tuple(JOBS)
ONE_NODE = Launch(1, 8)
CLUSTER, HARDWARE = load_cluster("h100-1x8")


def read_again(name: str, job: Job, launch: Launch = ONE_NODE) -> Read:
    """Write a job's files, and read them."""
    files = FRAMEWORKS[name].files(job, launch, ("a header",))
    sources = tuple(Source(file, text) for file, text in files.items())
    found = framework_of(sources)
    assert found.name == name
    return found.read(sources, {})


def check_same(job: Job, other: Job) -> None:
    """Compare two jobs field by field; a model that is listed by its shape has no name."""
    assert same_shape(job.model, other.model)
    for one in fields(job):
        if one.name != "model":
            assert getattr(job, one.name) == getattr(other, one.name), one.name


@EVERY
def test_an_exported_job_is_read_as_it_was(name: str, case: str) -> None:
    job = JOBS[name][case]
    found = read_again(name, job)
    check_same(job, found.job)
    assert found.devices == 8
    assert [text for text in found.assumed if "attention" not in text] == []


@pytest.mark.parametrize(("name", "case"), PRICED, ids=[f"{name}-{case}" for name, case in PRICED])
def test_a_plan_of_the_framework_comes_back(name: str, case: str) -> None:
    """What a framework says exactly is lost neither in what is exported nor in what is read."""
    framework = FRAMEWORKS[name]
    plan = JOBS[name][case].decisions(CLUSTER, HARDWARE, framework.system)
    job = framework.jobs(plan)[0]
    assert differences(plan, job.decisions(CLUSTER, HARDWARE, framework.system)) == []
    again = read_again(name, job).job.decisions(CLUSTER, HARDWARE, framework.system)
    assert differences(plan, again) == []


@pytest.mark.parametrize("name", EAGER)
def test_a_plan_of_the_framework_comes_back_with_its_hash(name: str) -> None:
    framework, job = FRAMEWORKS[name], replace(JOBS[name]["sharded"], model=SMALL_QWEN, seq_tokens=2048)
    plan = job.decisions(CLUSTER, HARDWARE, framework.system)
    again = read_again(name, framework.jobs(plan)[0]).job.decisions(CLUSTER, HARDWARE, framework.system)
    assert program_sha256(lower(again)) == program_sha256(lower(plan))


GOLDEN = [
    *(("torchtitan", "stages", file) for file in ("memo_plan.py", "train.sh")),
    *(("trl", "context", file) for file in ("sft.yaml", "accelerate.yaml", "train.sh")),
    *(("accelerate", "hybrid", file) for file in ("accelerate.yaml", "train.sh")),
    *(("deepspeed", "ulysses", file) for file in ("ds_config.json", "train.sh")),
]


@pytest.mark.parametrize(("name", "case", "file"), GOLDEN, ids=["-".join(golden) for golden in GOLDEN])
def test_files_are_as_they_were(name: str, case: str, file: str) -> None:
    """Golden files; MEMO_WRITE_GOLDEN=1 writes them again."""
    written = FRAMEWORKS[name].files(JOBS[name][case], ONE_NODE, ("Written by memo.",))[file]
    path = Path(__file__).parent / "golden" / f"{name}_{case}_{file.replace('.py', '.txt')}"
    if os.environ.get("MEMO_WRITE_GOLDEN"):
        path.write_text(written)
    assert path.read_text() == written


@pytest.mark.parametrize("name", EAGER)
def test_the_launcher_changes_nothing(name: str) -> None:
    job = JOBS[name]["sharded"]
    script = FRAMEWORKS[name].files(job, Launch(2, 4, "slurm"), ())["train.sh"]
    assert "#SBATCH --nodes=2" in script
    check_same(job, read_again(name, job, Launch(2, 4, "slurm")).job)


DEGREES = st.sampled_from([1, 2, 4])


@given(
    tp=DEGREES,
    cp=DEGREES,
    dp=DEGREES,
    level=st.sampled_from([0, 2, 3]),
    recompute=st.sampled_from(["none", "full", "operators"]),
    states=st.sampled_from(["fp32", "bf16", "pure-bf16", "host"]),
    micro_batch=st.integers(1, 3),
    steps=st.integers(1, 3),
    chunks=st.sampled_from([1, 2, 8]),
)
def test_any_torchtitan_job_is_read_as_it_was(level: int, steps: int, chunks: int, **drawn: Any) -> None:
    tp, cp, dp = (drawn.pop(name) for name in ("tp", "cp", "dp"))
    recompute, micro_batch = drawn.pop("recompute"), drawn["micro_batch"]
    zero = 0 if cp * dp == 1 else level or (3 if cp > 1 else 0)
    chunk = micro_batch * 8192 // cp // chunks if chunks > 1 else 0
    pins = replace(
        TORCHTITAN,
        tp=tp,
        sequence_parallel=tp > 1,
        cp=cp,
        dp=dp,
        zero=zero,
        recompute=recompute,
        loss_chunk_tokens=chunk,
    )
    job = Job(model=model("llama3-8b"), seq_tokens=8192, global_batch=micro_batch * dp * steps, pins=pins, **drawn)
    check_same(job, read_again("torchtitan", job).job)


@pytest.mark.parametrize("name", EAGER)
@settings(max_examples=12)
@given(
    layout=st.builds(
        Layout,
        tp=DEGREES,
        sequence_parallel=st.booleans(),
        cp=DEGREES,
        ulysses=DEGREES,
        metp=st.sampled_from([1, 2]),
        pp=st.sampled_from([1, 2]),
        schedule=st.sampled_from(["1f1b", "gpipe", "zero-bubble"]),
        dp=DEGREES,
        zero=st.integers(0, 3),
    ),
    recompute=st.sampled_from(["none", "full", "selective", "norms", "mlp", "operators", "tokenwise"]),
    states=st.sampled_from(["fp32", "bf16", "pure-bf16", "host"]),
    dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
)
def test_what_comes_near_to_any_plan_can_be_written_and_read(name: str, layout: Layout, **drawn: Any) -> None:
    decisions = Decisions(
        model=model("llama3-8b"), layout=layout, seq_tokens=65536, global_batch=layout.dp * layout.pp, **drawn
    )
    for job in FRAMEWORKS[name].jobs(decisions):
        found = read_again(name, job, Launch(1, layout.devices))
        assert found.devices == layout.devices
        check_same(job, found.job)


def test_torchtitan_may_cut_the_loss_where_a_plan_cannot_be_said_as_it_is() -> None:
    plan = Decisions(model=model("llama3-8b"), layout=Layout(tp=8, sequence_parallel=True), seq_tokens=65536)
    found = FRAMEWORKS["torchtitan"].jobs(plan)
    assert [job.pins.loss_chunk_tokens for job in found[:2]] == [0, 8192]


def test_torchtitan_checks_the_generation_of_the_gpu_that_its_attention_was_priced_for() -> None:
    """Varlen attention takes FlashAttention-3 on Hopper: a plan with it is exact there, and asked for."""
    plan = Decisions(
        model=model("llama3-8b"), layout=Layout(dp=8, zero=3), seq_tokens=8192, kernels=Kernels(attention="flash3")
    )
    job = FRAMEWORKS["torchtitan"].jobs(plan)[0]
    assert job.pins.attention == "flash3"
    recipe = FRAMEWORKS["torchtitan"].files(job, ONE_NODE, ())["memo_plan.py"]
    assert 'assert get_cuda_flash_attention_impl() == "FA3"' in recipe
    check_same(job, read_again("torchtitan", job).job)


@pytest.mark.parametrize("name", EAGER)
def test_a_model_that_it_does_not_have_is_refused(name: str) -> None:
    decisions = Decisions(model=model("gpt-7b"), seq_tokens=4096)
    with pytest.raises(UsageError) as refused:
        FRAMEWORKS[name].jobs(decisions)
    check_fields(refused.value, UsageError, hint="megatron-lm")


# -- what users write --------------------------------------------------------------------------------------------------

OLD_TOML = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "{mode}"
selective_ac_option = "{option}"
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
"""


@pytest.mark.parametrize(
    ("mode", "option", "recompute", "layers"),
    [
        ("selective", "op", "operators", "all"),
        ("selective", "2", "full", "every-2"),
        ("full", "2", "full", "all"),
        ("none", "2", "none", "all"),
    ],
)
def test_a_toml_file_of_earlier_versions(mode: str, option: str, recompute: str, layers: str) -> None:
    source = Source("llama3_8b.toml", OLD_TOML.format(mode=mode, option=option))
    found = framework_of([source]).read((source,), {"devices": "8"})
    pins = found.job.pins
    assert (pins.tp, pins.dp, pins.zero, pins.recompute, pins.recompute_layers) == (2, 4, 3, recompute, layers)
    assert found.job.global_batch == 4
    reasons = {option.key: option.why for option in found.ignored}
    assert "8-bit" in reasons["quantize.linear.float8.enable_fsdp_float8_all_gather"]
    assert reasons["training.steps"] == "memo does not read it, and prices nothing of it"


RECIPES = """
from torchtitan.trainer import Trainer
from . import model_registry

def llama3_8b() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        model_spec=model_spec,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()),
        training=TrainingConfig(local_batch_size=2, seq_len=8 * 1024, steps=1000),
        parallelism=ParallelismConfig(tensor_parallel_degree=4, pipeline_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
        checkpoint=CheckpointManager.Config(interval=500),
    )

def mine() -> Trainer.Config:
    config = llama3_8b()
    config.training.seq_len = 2**15
    config.parallelism = ParallelismConfig(context_parallel_degree=2)
    return config
"""


def test_a_recipe_that_changes_another_one() -> None:
    source = Source("config_registry.py", RECIPES)
    found = FRAMEWORKS["torchtitan"].read((source,), {"devices": "8", "recipe": "mine"})
    job, pins = found.job, found.job.pins
    assert (job.seq_tokens, job.micro_batch, job.global_batch) == (32768, 2, 8)
    assert (pins.tp, pins.cp, pins.pp, pins.dp, pins.recompute) == (1, 2, 1, 4, "full")
    assert pins.loss_chunk_tokens == 2 * 32768 // 2 // 8
    assert job.model.name == "llama3-8b"
    with pytest.raises(BadInput, match="several recipes"):
        FRAMEWORKS["torchtitan"].read((source,), {"devices": "8"})


def test_stages_are_divided_as_torchtitan_divides_them() -> None:
    source = Source("config_registry.py", RECIPES)
    found = FRAMEWORKS["torchtitan"].read((source,), {"devices": "8", "recipe": "llama3_8b"})
    assert (found.job.micro_batch, found.job.global_batch) == (1, 2)
    assert found.job.pins.pp_layers is None
    assert any("16, 16" in text for text in found.assumed)
    assert split_of(32, 4, 1, 1) == (8, 9, 8, 7)


@pytest.mark.parametrize(
    "text", ["def f(:", "x = 1", "def f(): return 0xfor x in y", "def f(): return 3", "def f(): return g(" + "(" * 300]
)
def test_a_python_file_that_is_no_recipe(text: str) -> None:
    with pytest.raises(MemoError):
        FRAMEWORKS["torchtitan"].read((Source("recipe.py", text),), {"devices": "8"})


def test_calls_of_a_recipe_become_names() -> None:
    text = "def f():\n    a = T.Config(b=U(1, c=-2), d=[x for x in y])\n    a.b.c = 4\n    a.e = None\n    return a"
    found = settings_of("f", functions_of(text, "recipe.py"))
    assert found == {"()": "T.Config", "b()": "U", "b.0": 1, "b.c": 4, "d": "[x for x in y]", "e": None}


ZERO_3 = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "stage3_max_live_parameters": 1e9,
    },
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
}
SFT = """
model_name_or_path: Qwen/Qwen3-8B
torch_dtype: bfloat16
attn_implementation: flash_attention_2
bf16: true
max_seq_length: 16384
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
gradient_checkpointing_kwargs:
  use_reentrant: false
use_peft: true
learning_rate: 2.0e-05
"""
FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD, fsdp_offload_params: false}
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""


def test_a_configuration_of_deepspeed_alone() -> None:
    source = Source("zero3.json", json.dumps(ZERO_3))
    of = framework_of([source])
    assert of.name == "deepspeed"
    with pytest.raises(BadInput) as refused:
        of.read((source,), {"devices": "8"})
    check_fields(refused.value, BadInput, hint="--set model=")
    with pytest.raises(BadInput, match="how long a sequence is"):
        of.read((source,), {"devices": "8", "model": "llama3-8b"})
    found = of.read((source,), {"devices": "8", "model": "llama3-8b", "seq_len": "64k", "bf16": "true"})
    job, pins = found.job, found.job.pins
    assert (job.micro_batch, job.global_batch, job.states, job.seq_tokens) == (2, 64, "host", 65536)
    assert (pins.zero, pins.dp, pins.recompute, pins.offload_inputs) == (3, 8, "full", True)
    reasons = {option.key: option.why for option in found.ignored}
    assert "parameters on the device" in reasons["zero_optimization.offload_param.device"]
    assert set(reasons) == {"zero_optimization.offload_param.device", "zero_optimization.stage3_max_live_parameters"}


def test_arguments_of_trl_with_accelerate() -> None:
    sources = (Source("sft.yaml", SFT), Source("fsdp.yaml", FSDP))
    of = framework_of(sources)
    assert of.name == "trl"
    found = of.read(sources, {})
    job, pins = found.job, found.job.pins
    assert (job.model.name, job.seq_tokens, job.global_batch, job.states) == ("qwen3-8b", 16384, 32, "fp32")
    assert (pins.dp, pins.zero, pins.zero_ranks, pins.attention, pins.recompute) == (16, 3, 8, "flash2", "full")
    assert job.adapters == "r=16,alpha=32,targets=q+v"
    assert "gradient_checkpointing is on, TRL's default" in found.assumed


def test_deepspeed_below_trl_is_deepspeeds_job() -> None:
    sources = (
        Source("sft.yaml", SFT),
        Source(
            "zero3.yaml",
            "distributed_type: DEEPSPEED\nnum_processes: 8\n"
            "deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}\nmixed_precision: bf16\n",
        ),
    )
    found = framework_of(sources).read(sources, {})
    assert found.framework == "deepspeed"
    assert (found.job.pins.zero, found.job.states, found.job.pins.dp) == (3, "host", 8)


SCRIPT = """
#!/bin/bash
MODEL=${1:-Qwen/Qwen3-8B}
# accelerate launch old.py
accelerate launch --config_file fsdp.yaml --num_processes 8 \\
    train.py --model_name_or_path "$MODEL" --max_seq_length 8192 --bf16 \\
    --per_device_train_batch_size=4 --learning_rate 1e-5
"""


def test_a_command_says_more_than_its_configuration() -> None:
    sources = (Source("fsdp.yaml", FSDP), Source("run.sh", SCRIPT))
    found = framework_of(sources).read(sources, {"1": "Qwen/Qwen3-8B"})
    job = found.job
    assert (job.model.name, job.seq_tokens, job.micro_batch, job.global_batch) == ("qwen3-8b", 8192, 4, 32)
    assert (found.devices, found.job.pins.recompute) == (8, "none")


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("a.yaml", "distributed_type: [", "a.yaml"),
        ("a.yaml", "distributed_type: FSDP\nnum_processes: many", "num_processes"),
        ("a.json", '{"zero_optimization": ', "a.json"),
        ("a.json", '{"zero_optimization": {"stage": "three"}, "train_batch_size": 8}', "stage"),
        ("a.toml", "[parallelism", "a.toml"),
        (
            "a.toml",
            "[parallelism]\ntensor_parallel_degree = -3\n[model]\nname='llama3'\nflavor='8B'",
            "tensor_parallel",
        ),
        (
            "sft.yaml",
            "per_device_train_batch_size: {}\nmodel_name_or_path: Qwen/Qwen3-8B\nmax_length: 10",
            "per_device",
        ),
    ],
)
def test_what_is_wrong_is_named(name: str, text: str, where: str) -> None:
    source = Source(name, text)
    with pytest.raises(BadInput) as refused:
        framework_of([source]).read((source,), {"devices": "8", "model": "llama3-8b", "seq_len": "4k"})
    assert where in str(refused.value)


BESIDE = {
    "trl": [
        replace(JOBS["trl"]["kept"], documents=Documents(lengths=((512, 1),))),
        replace(JOBS["trl"]["kept"], adapters="r=8,alpha=8,targets=q"),
    ]
}
"""Jobs that are written besides; documents are data, which is not read again from a job's file."""


def test_the_options_in_the_tables_are_those_that_are_written() -> None:
    """A key of a table stands in the files of some job; keys of Python recipes are dotted."""
    for name in EAGER:
        framework = FRAMEWORKS[name]
        written = "\n".join(
            text
            for job in (*JOBS[name].values(), *BESIDE.get(name, ()))
            for file, text in framework.files(job, Launch(1, 8), ()).items()
            if file != "config.json"
        )
        for path, saying in framework.sayings.items():
            for key in saying.keys:
                assert key == "config.json" or key.rpartition(".")[2] in written, (name, path, key)


def test_a_shape_is_kept_by_every_framework() -> None:
    tied = msgspec.structs.replace(model("qwen3-8b"), tied_embeddings=True, layers=4, hidden=512, heads=8, kv_heads=2)
    for name in EAGER:
        job = replace(JOBS[name]["sharded"], model=tied)
        assert same_shape(tied, read_again(name, job).job.model), name
