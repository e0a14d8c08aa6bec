"""Experts, latent attention, windows and sinks in Megatron's options, to and fro."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from memo_sim.answers.export_plan import export_plan
from memo_sim.answers.import_job import decisions_of
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.layer_shape import LayerRun
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels, Layout, Plan, Provenance
from memo_sim.interchange import megatron_bridge, megatron_lm
from memo_sim.interchange.framework import FALLBACK, Framework, Read, Source
from memo_sim.interchange.launch import launch_of
from memo_sim.interchange.megatron_layers import pattern_text
from memo_sim.interchange.plan_paths import differences

CLUSTER, HARDWARE = load_cluster("h100-2x8")
each = pytest.mark.parametrize("framework", [megatron_lm.FRAMEWORK, megatron_bridge.FRAMEWORK], ids=["lm", "bridge"])


def with_experts(model: Model, **changes: Any) -> Model:
    """Return the model with experts of another kind."""
    assert model.experts is not None
    return replace(model, experts=replace(model.experts, **changes))


MIXTRAL = load_model("mixtral-tiny")
DEEPSEEK = load_model("deepseek-tiny")
MODELS = {
    "mixtral": MIXTRAL,
    "qwen3-moe": load_model("qwen3-moe-tiny"),
    "probabilities of all": with_experts(MIXTRAL, renormalize=False, balance=0.01, z_loss=0.001),
    "shared with a gate": with_experts(MIXTRAL, shared=64, shared_gate=True),
    "latents": load_model("mla-tiny"),
    "deepseek-v3": load_model("deepseek-v3"),
    "gpt-oss": load_model("gpt-oss-20b"),
    "dense window": replace(load_model("llama-tiny"), window=256),
}
LAYOUTS = {
    "ep": Layout(tp=2, sequence_parallel=True, cp=2, dp=4, ep=4, zero=1),
    "dp": Layout(dp=16, zero=1),
}


def there_and_back(framework: Framework, plan: Decisions) -> tuple[Decisions, Decisions, Read]:
    """Return a plan as the framework runs it, as its files are read, and what was read."""
    (job,) = framework.jobs(plan)
    files = framework.files(job, launch_of(16, 8, "torchrun"), ())
    found = framework.read(tuple(Source(name, text) for name, text in files.items()), {})
    decisions, _ = decisions_of(job, CLUSTER, HARDWARE, framework.predicted_by(job))
    again, _ = decisions_of(found.job, CLUSTER, HARDWARE, framework.predicted_by(found.job))
    return decisions, again, found


@each
@pytest.mark.parametrize("name", MODELS)
def test_files_come_back_as_the_same_plan(framework: Framework, name: str) -> None:
    model = MODELS[name]
    biased = model.mixture is not None and model.mixture.bias  # there Megatron has no tp
    layout = replace(LAYOUTS["dp"], ep=4) if biased else LAYOUTS["ep" if model.mixture else "dp"]
    plan = Decisions(
        model=model,
        layout=layout,
        seq_tokens=4096,
        global_batch=16,
        recompute="mlp" if model.mixture else "norms",
        rebuild_qkv=model.latent is not None,
        expert_capacity=1.5 if layout.ep > 1 else 0.0,
        kernels=Kernels(attention="flash2" if name != "gpt-oss" else "flash3"),
    )
    decisions, again, read = there_and_back(framework, plan)
    assert not differences(again, decisions)
    assert not {"model.experts", "model.latent", "layout.ep", "decisions.recompute"} & set(differences(plan, decisions))
    assert not [option for option in read.ignored if "moe" in option.key or "window" in option.key]


@each
def test_whole_experts_come_back(framework: Framework) -> None:
    layout = replace(LAYOUTS["ep"], ep=4, expert_tp=1)
    model = next(model for model in MODELS.values() if model.mixture is not None and not model.mixture.bias)
    plan = Decisions(model=model, layout=layout, seq_tokens=4096, global_batch=16, kernels=Kernels(attention="flash2"))
    decisions, again, _ = there_and_back(framework, plan)
    assert not differences(again, decisions)
    assert (again.layout.ep, again.layout.expert_tp) == (4, 1)


@each
@pytest.mark.parametrize("given", [True, False])
def test_experts_are_in_fp8_wherever_products_are(framework: Framework, given: bool) -> None:
    plan = Decisions(model=MIXTRAL, layout=LAYOUTS["dp"], seq_tokens=4096, global_batch=16, fp8="tensor")
    if framework is megatron_bridge.FRAMEWORK:
        with pytest.raises(UsageError, match="mixed-precision recipe"):
            framework.jobs(plan)
        return
    decisions, again, _ = there_and_back(framework, replace(plan, fp8_experts=given))
    assert not differences(again, decisions)
    assert decisions.fp8_experts
    assert ("decisions.fp8_experts" in differences(replace(plan, fp8_experts=given), decisions)) == (not given)


def test_experts_are_exported_with_a_prediction_by_own_operators() -> None:
    layout = Layout(cp=2, dp=4, ep=4, zero=1)
    plan = Decisions(model=MIXTRAL, layout=layout, seq_tokens=4096, global_batch=4, memory_policy="caching")
    cluster, hardware = load_cluster("h100-1x8")
    given = Plan(decisions=plan, program_sha256="0" * 64, provenance=Provenance(system="megatron-layouts"))
    exported = export_plan(given, megatron_lm.FRAMEWORK, cluster, hardware)
    assert exported.document.system == "megatron-layouts"
    assert any("of experts" in note and "own operators" in note for note in exported.document.notes)
    assert exported.document.there.layout.ep == 4
    assert b"--num-experts 4" in exported.files["train.sh"]


@pytest.mark.parametrize(
    ("model", "changes", "where"),
    [
        (DEEPSEEK, {}, "model.experts.groups"),
        (load_model("sinks-tiny"), {}, "model.proj_bias"),
        (load_model("gemma3-tiny"), {}, "model"),
        (load_model("gpt-oss-tiny"), {"layout": Layout(tp=2)}, "layout.tp"),
        (with_experts(MIXTRAL, selection_bias=True), {}, "model.experts.selection_bias"),
        (with_experts(MIXTRAL, scores="sigmoid", renormalize=False), {}, "model.experts.renormalize"),
        (with_experts(MIXTRAL, per_token=1), {}, "model.experts.renormalize"),
        (with_experts(MIXTRAL, bias=True), {}, "model.experts.bias"),
        (replace(load_model("mla-tiny"), latent=None, head_dim=32, kv_heads=4, window=0), {}, ""),
    ],
)
def test_what_megatron_cannot_say_is_refused_by_name(model: Model, changes: dict[str, Any], where: str) -> None:
    plan = Decisions(model=model, seq_tokens=4096, **changes)
    if not where:
        assert megatron_lm.FRAMEWORK.jobs(plan)
        return
    with pytest.raises(UsageError, match="cannot say these layers") as refused:
        megatron_lm.FRAMEWORK.jobs(plan)
    assert refused.value.where == where


SCRIPT = """\
torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 6 --hidden-size 512 --ffn-hidden-size 1024 --seq-length 4096 \\
    --num-attention-heads 8 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 8 --bf16 --swiglu \\
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --padded-vocab-size 32000 \\
    --position-embedding-type rope --num-experts 16 --moe-router-topk 4 --moe-grouped-gemm"""


def read(options: str) -> Read:
    """Return what is read of the script with more options."""
    return megatron_lm.FRAMEWORK.read((Source("train.sh", f"{SCRIPT} {options}\n"),), {FALLBACK: "8"})


@pytest.mark.parametrize(
    ("options", "experts", "windows"),
    [
        ("", "111111", "000000"),
        ("--moe-layer-freq 2", "101010", "000000"),
        ("--moe-layer-freq '([0]*1+[1]*2)*2'", "011011", "000000"),
        ("--moe-layer-freq '[0,0,1,1,1,1]' --window-size 127,0", "001111", "111111"),
        ("--window-size '(127,0)' --window-attn-skip-freq 3", "111111", "110110"),
        ("--window-size 127,0 --window-attn-skip-freq '([1]*1+[0]*1)*3'", "111111", "101010"),
    ],
)
def test_patterns_of_layers(options: str, experts: str, windows: str) -> None:
    model = read(options).job.model
    shapes = [model.layer(number) for number in range(6)]
    assert "".join(str(int(shape.experts is not None)) for shape in shapes) == experts
    assert "".join(str(int(shape.window > 0)) for shape in shapes) == windows
    assert {shape.window for shape in shapes} <= {0, 128}


@pytest.mark.parametrize("pattern", ["[1]*9**9", "__import__('os')", "[1]*7", "([0]*", "0x3"])
def test_a_pattern_that_is_none_of_the_models_layers_is_refused(pattern: str) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read(f'--moe-layer-freq "{pattern}"')


def test_what_is_assumed_of_experts_is_said() -> None:
    text = "--expert-model-parallel-size 4 --moe-router-score-function sigmoid --moe-router-load-balancing-type"
    found = read(f"{text} seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-router-enable-expert-bias")
    told = " ".join(found.assumed)
    of = found.job.model.mixture
    assert of is not None
    assert (of.balance, of.selection_rate, found.job.pins.ep) == (0.0, 0.001, 4)
    for words in ("memo's own capacity", "not by the dispatcher allgather", "in fp32", "losses of the router"):
        assert words in told
    limited = read("--expert-model-parallel-size 4 --moe-expert-capacity-factor 1.25 --fp8-format e4m3")
    assert limited.job.expert_capacity == 1.25
    assert (limited.job.fp8, limited.job.fp8_experts) == ("delayed", True)


def test_an_overlap_of_exchanges_that_is_not_priced_is_said() -> None:
    found = read("--moe-shared-expert-intermediate-size 512 --moe-shared-expert-overlap --moe-permute-fusion")
    why = {option.key: option.why for option in found.ignored}
    assert "priced without" in why["--moe-shared-expert-overlap"]
    assert "priced without" not in why["--moe-permute-fusion"]


def test_experts_that_tp_does_not_divide_are_refused() -> None:
    with pytest.raises(BadInput, match="cannot be read") as refused:
        read("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1")
    assert "1 with expert parallelism" in str(refused.value.wanted)
    with pytest.raises(BadInput, match="model cannot be"):
        read("--moe-router-topk 32")


def test_text_of_a_pattern() -> None:
    assert pattern_text([0] * 3 + [1] * 58) == "([0]*3+[1]*58)"
    assert pattern_text([1, 0] * 12) == "([1]*1+[0]*1)*12"


def test_a_pattern_that_is_written_otherwise_comes_back_shorter() -> None:
    runs = tuple(LayerRun(shape=run.shape, times=1) for run in MODELS["gpt-oss"].layer_pattern * 12)
    plan = Decisions(model=replace(MODELS["gpt-oss"], layer_pattern=runs), seq_tokens=4096)
    (job,) = megatron_lm.FRAMEWORK.jobs(plan)
    assert job.model.layer_pattern == MODELS["gpt-oss"].layer_pattern
