"""Megatron-LM: exported files, the round trip, and scripts as they are published."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memo_sim.answers.import_job import decisions_of
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import BadInput, Infeasible, UsageError
from memo_sim.contract.knobs import Fp8Recipe, Recompute
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.contract.rope_scaling import RopeScaling
from memo_sim.interchange import megatron_bridge
from memo_sim.interchange.framework import FALLBACK, Framework, Read, Source
from memo_sim.interchange.frameworks import framework_of
from memo_sim.interchange.job import Job
from memo_sim.interchange.launch import launch_of
from memo_sim.interchange.megatron_lm import FRAMEWORK, arguments, option_of
from memo_sim.interchange.megatron_words import FP8, nearest_jobs, stages_text
from memo_sim.interchange.plan_paths import differences
from memo_sim.planning.question import Question
from memo_sim.planning.space import candidates
from memo_sim.program.lower import lower, program_sha256

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
CLUSTER, HARDWARE = load_cluster("h100-2x8")
SMALL = replace(load_model("llama3-8b"), layers=4, hidden=1024, heads=16, kv_heads=8, head_dim=64, ffn_hidden=2048)


def read(text: str, name: str = "train.sh", **given: str) -> Read:
    """Return what Megatron-LM's reader finds in one file."""
    return FRAMEWORK.read((Source(name, text),), {FALLBACK: "16", **given})


def written(job: Job, devices: int = 16, header: tuple[str, ...] = ()) -> str:
    """Return the script of a job."""
    return FRAMEWORK.files(job, launch_of(devices, 8, "torchrun"), header)["train.sh"]


@st.composite
def plans(draw: st.DrawFn) -> Decisions:
    """Draw a plan that Megatron can run."""
    tp, cp, ulysses, pp = (draw(st.sampled_from([1, 1, 2])) for _ in range(4))
    dp = 16 // (tp * cp * ulysses * pp)
    interleaved = pp > 1 and draw(st.booleans())
    uneven = pp > 1 and not interleaved and draw(st.booleans())
    layout = Layout(
        tp=tp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        cp=cp,
        cp_exchange=draw(st.sampled_from(["ring", "all_gather"])) if cp > 1 else "ring",
        ulysses=ulysses,
        pp=pp,
        pp_layers=(1, 3) if uneven else (),
        schedule="interleaved" if interleaved else "1f1b",
        virtual_stages=2 if interleaved else 1,
        dp=dp,
        zero=draw(st.sampled_from([0, 1, 1] if pp > 1 else [0, 1, 2, 3])),
    )
    if layout.zero and layout.replicas > 2:
        layout = replace(layout, zero_ranks=draw(st.sampled_from([0, 2])))
    model = replace(
        SMALL,
        tied_embeddings=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        rope_scaling=draw(st.sampled_from([None, RopeScaling(kind="llama3", factor=4.0)])),
    )
    if draw(st.booleans()):
        rotary = {"max_positions": draw(st.sampled_from([0, 4096])), "rope_scaling": None, "qk_norm": False}
        gpt: dict[str, Any] = {"family": "gpt", "activation": draw(st.sampled_from(["gelu", "gelu_tanh"])), **rotary}
        model = replace(model, **gpt, linear_bias=draw(st.booleans()), qkv_bias=True)
    recompute: Recompute = draw(st.sampled_from(["none", "full", "selective", "norms", "mlp"]))
    some = recompute == "full" and layout.zero < 3
    return Decisions(
        model=model,
        layout=layout,
        seq_tokens=4096,
        micro_batch=draw(st.sampled_from([1, 2])),
        global_batch=2 * dp * pp * 2,
        recompute=recompute,
        recompute_layers=draw(st.sampled_from(["all", "groups-2", "first-1"])) if some else "all",
        states=draw(st.sampled_from(["fp32", "bf16", "host"])),
        overlap=draw(st.sampled_from(["none", "gradients", "both"])),
        loss=draw(st.sampled_from(["auto", "fused"])),
        deterministic=draw(st.booleans()),
        kernels=Kernels(attention=draw(st.sampled_from(["flash2", "flash3", "te-fused"]))),
    )


@pytest.mark.parametrize("framework", [FRAMEWORK, megatron_bridge.FRAMEWORK], ids=["megatron-lm", "megatron-bridge"])
@settings(max_examples=12, deadline=None)
@given(plans())
def test_files_come_back_as_the_same_plan(framework: Framework, plan: Decisions) -> None:
    (job,) = framework.jobs(plan)
    files = framework.files(job, launch_of(16, 8, "slurm"), ())
    found = framework.read(tuple(Source(name, text) for name, text in files.items()), {})
    back = found.job
    assert found.devices == 16
    try:
        decisions, _ = decisions_of(job, CLUSTER, HARDWARE, FRAMEWORK.system)
    except (Infeasible, UsageError) as error:
        with pytest.raises(type(error)):
            decisions_of(back, CLUSTER, HARDWARE, FRAMEWORK.system)
        return
    again, _ = decisions_of(back, CLUSTER, HARDWARE, FRAMEWORK.system)
    assert not differences(again, decisions)


def test_a_plan_of_the_framework_comes_back_with_its_hash() -> None:
    cluster, hardware = load_cluster("a800-1x8")
    model = load_model("llama-tiny")
    question = Question(model=model, cluster=cluster, hardware=hardware, seq_tokens=4096, system="megatron-core")
    found, _ = candidates(replace_batch(question, 8))
    plans = [one.base for one in found]
    assert len(plans) > 20
    for plan in plans[::7]:
        (job,) = FRAMEWORK.jobs(plan)
        back = read(written(job, plan.layout.devices)).job.decisions(cluster, hardware, FRAMEWORK.system)
        assert not differences(back, plan)
        assert program_sha256(lower(back)) == program_sha256(lower(plan))


def replace_batch(question: Question, batch: int) -> Question:
    """Return the question with another global batch."""
    from dataclasses import replace as changed

    return changed(question, global_batch=batch)


_RECOMPUTED = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 4096 --micro-batch-size 1"
_FULL = "--recompute-granularity full --recompute-method"
_PART = "--recompute-granularity selective"


@pytest.mark.parametrize(
    ("options", "recompute", "layers"),
    [
        (f"{_FULL} block --recompute-num-layers 3", "full", "first-3"),
        (f"{_FULL} uniform --recompute-num-layers 2", "full", "groups-2"),
        (f"{_FULL} uniform --recompute-num-layers 1", "full", "all"),
        (_PART, "selective", "all"),
        (f"{_PART} --recompute-modules layernorm", "norms", "all"),
        (f"{_PART} --recompute-modules mlp", "mlp", "all"),
    ],
)
def test_partial_recompute_is_a_policy_and_comes_back(options: str, recompute: str, layers: str) -> None:
    text = f"torchrun --nproc-per-node 8 pretrain_gpt.py {_RECOMPUTED} --global-batch-size 16 --bf16 {options}"
    found = read(f"{text} --padded-vocab-size 32000 --max-position-embeddings 4096\n").job
    plan = found.decisions(CLUSTER, HARDWARE, FRAMEWORK.system)
    assert (plan.recompute, plan.recompute_layers) == (recompute, layers)
    (job,) = FRAMEWORK.jobs(plan)
    back = read(written(job, plan.layout.devices)).job.decisions(CLUSTER, HARDWARE, FRAMEWORK.system)
    assert program_sha256(lower(back)) == program_sha256(lower(plan))


PLANS = {
    "stages": Decisions(
        model=replace(load_model("llama3-8b"), rope_scaling=RopeScaling(kind="llama3", factor=8.0)),
        layout=Layout(tp=2, sequence_parallel=True, cp=2, pp=2, pp_layers=(15, 17), dp=2, zero=1),
        seq_tokens=131072,
        global_batch=4,
        recompute="full",
        recompute_layers="first-8",
        states="bf16",
        overlap="both",
    ),
    "sharded": Decisions(
        model=load_model("gpt-7b"),
        layout=Layout(cp=2, ulysses=2, dp=4, zero=3),
        seq_tokens=65536,
        global_batch=4,
        recompute="norms",
        states="host",
    ),
    "experts": Decisions(
        model=load_model("deepseek-v3"),
        layout=Layout(tp=2, sequence_parallel=True, cp=2, ep=4, pp=2, pp_layers=(30, 31), dp=2, zero=1),
        seq_tokens=8192,
        global_batch=4,
        recompute="mlp",
        rebuild_qkv=True,
        expert_capacity=1.5,
    ),
    "sinks": Decisions(
        model=load_model("gpt-oss-20b"), layout=Layout(dp=16, ep=4, zero=1), seq_tokens=8192, global_batch=16
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_script_is_the_golden_one(name: str) -> None:
    (job,) = FRAMEWORK.jobs(PLANS[name])
    path = GOLDEN / f"megatron_lm_{name}.sh"
    text = written(job, PLANS[name].layout.devices, ("Written by memo.",))
    if os.environ.get("MEMO_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", PLANS)
def test_the_recipe_is_the_golden_one(name: str) -> None:
    framework = megatron_bridge.FRAMEWORK
    (job,) = framework.jobs(PLANS[name])
    path = GOLDEN / f"megatron_bridge_{name}.txt"  # a recipe imports what is not installed here
    text = framework.files(job, launch_of(16, 8, "torchrun"), ("Written by memo.",))["recipe.py"]
    if os.environ.get("MEMO_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    compile(text, "recipe.py", "exec")


# Two recipes of one file as in src/megatron/bridge/recipes/llama/h100/llama3.py (NVIDIA-NeMo/Megatron-Bridge).
RECIPES = """\
LENGTH_128K: int = 131072

def small_pretrain_2gpu_h100_bf16_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Llama-3.2-1B").get_model_config()
    return cfg

def llama3_8b_pretrain_64gpu_h100_bf16_128k_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").get_model_config()
    cfg.dataset.seq_length = LENGTH_128K
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.virtual_pipeline_model_parallel_size = None
    cfg.model.context_parallel_size = 4
    cfg.model.sequence_parallel = True
    cfg.train.global_batch_size = 512
    cfg.train.micro_batch_size = 1
    cfg.optimizer.exp_avg_dtype = torch.float32
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True, tp_comm_overlap_cfg=some_buffers)
    cfg.mixed_precision = bf16_mixed()
    return cfg
"""
OVERRIDES = """\
torchrun --nproc_per_node=8 --nnodes=4 scripts/training/run_recipe.py \\
    --recipe llama3_8b_pretrain_64gpu_h100_bf16_128k_config --mode pretrain --dataset mock -cp 2 \\
    model.recompute_granularity=full model.recompute_method=block model.recompute_num_layers=4 logger.log_interval=1
"""


def test_a_recipe_with_overrides_of_a_script() -> None:
    sources = (Source("llama3.py", RECIPES), Source("run.sh", OVERRIDES))
    assert framework_of(sources) is megatron_bridge.FRAMEWORK
    found = megatron_bridge.FRAMEWORK.read(sources, {})
    pins = found.job.pins
    assert (found.devices, pins.tp, pins.pp, pins.cp, pins.dp) == (32, 4, 2, 2, 2)
    assert (found.job.model.name, found.job.seq_tokens, found.job.global_batch) == ("llama3-8b", 131072, 512)
    assert (pins.recompute_layers, pins.tp_overlap, pins.overlap, found.job.loss) == (
        "first-4",
        "chunked",
        "both",
        "fused",
    )
    assert any("as the common recipe has it" in text for text in found.assumed)
    with pytest.raises(BadInput, match="several recipes"):
        megatron_bridge.FRAMEWORK.read(sources[:1], {})
    with pytest.raises(BadInput, match="--set model="):
        megatron_bridge.FRAMEWORK.read(sources[:1], {"recipe": "small_pretrain_2gpu_h100_bf16_config"})


def test_a_plan_that_swaps_has_several_that_come_near() -> None:
    plan = replace(PLANS["sharded"], recompute="tokenwise", states="pure-bf16", layout=Layout(metp=8))
    found = FRAMEWORK.jobs(plan)
    assert {job.pins.recompute for job in found} == {"full", "none", "selective", "norms", "mlp"}
    assert {(job.pins.tp, job.pins.metp, job.states) for job in found} == {(8, None, "bf16")}


def test_ranks_of_tp_hold_equal_rows_of_the_vocabulary() -> None:
    plan = replace(PLANS["sharded"], layout=Layout(tp=8, sequence_parallel=True, dp=2))
    assert FRAMEWORK.jobs(plan)[0].model.vocab == 50264


# Arrays, positional arguments and comments as in examples/gpt3/train_gpt3_175b_distributed.sh (NVIDIA/Megatron-LM).
ARRAYS = """\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=2
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=$1 #<Specify path>
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
GPT_MODEL_ARGS=(
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
TRAINING_ARGS=( --micro-batch-size 1 --global-batch-size 64 --fp16 --lr 6.0e-5 )
MODEL_PARALLEL_ARGS=(
\t--tensor-model-parallel-size 2
\t--pipeline-model-parallel-size 4
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} \\
    ${MODEL_PARALLEL_ARGS[@]} \\
    --vocab-file $2 --merge-file $3 --save $CHECKPOINT_PATH
"""

# Conditions, quoted options and arrays that grow as in examples/llama/train_llama3_8b_h100_fp8.sh of that repository.
GROWING = """\
TOKENIZER_ARG=${1:-"MOCK"}
DTYPE="fp8"
MODEL_ARGS=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-backend fused)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
    )
fi
DATA=()
if [[ "$TOKENIZER_ARG" == "MOCK" ]] || [[ -z "$TOKENIZER_ARG" ]]; then
    DATA+=("--mock-data" "--vocab-size 128256" "--split '99,1,0'")
else
    DATA+=("--vocab-size 1000")
fi
if [ ! -f pretrain_gpt.py ]; then
    echo "not found"
    exit 1
fi
DDP=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
MODEL_ARGS+=("${DDP[@]}")
torchrun --nproc_per_node 8 "pretrain_gpt.py" ${MODEL_ARGS[@]} --bf16 --sequence-parallel ${DTYPE_ARGS[@]} ${DATA[@]}
"""

# One text with continued lines, run by eval under SLURM, as in many recipes of others.
TEXT = """\
#SBATCH --nodes=4 --ntasks-per-node=1
#SBATCH --gres=gpu:a100:8
TP=${TP_SIZE:-4}
options=" \\
    --tensor-model-parallel-size ${TP} \\
    --num-layers 40 --hidden-size 5120 --num-attention-heads 40 --ffn-hidden-size 13824 --swiglu \\
    --seq-length ${SEQ_LEN} --max-position-embeddings ${SEQ_LEN} --use-rotary-position-embeddings \\
    --normalization RMSNorm --no-position-embedding --disable-bias-linear --micro-batch-size 1 \\
    --make-vocab-size-divisible-by 1 --vocab-size 32000 --untie-embeddings-and-output-weights \\
    --use-flash-attn --bf16 --recompute-activations --distributed-timeout-minutes 60"
run_cmd="python -u ${DIR}/pretrain_gpt.py $@ ${options}"
srun -l sh -c "${run_cmd}"
set +x
"""


def test_arrays_and_positional_arguments() -> None:
    found = read(ARRAYS)
    job = found.job
    assert (found.devices, job.pins.tp, job.pins.pp, job.pins.dp, job.global_batch) == (16, 2, 4, 2, 64)
    assert (job.model.family, job.model.layers, job.model.max_positions, job.model.vocab) == ("gpt", 24, 2048, 50432)
    assert (job.pins.dtype, job.pins.attention, job.pins.zero) == ("fp16", None, 0)
    assert {option.key for option in found.ignored} >= {"--lr", "--save", "--vocab-file"}
    assert next(option.value for option in found.ignored if option.key == "--save") == "$1"


def test_conditions_and_growing_arrays() -> None:
    found = read(GROWING)
    job = found.job
    assert (found.devices, job.pins.dp, job.pins.zero, job.pins.overlap) == (8, 8, 1, "both")
    assert (job.model.family, job.model.kv_heads, job.model.vocab) == ("llama", 8, 128256)
    assert not job.model.tied_embeddings
    assert (job.pins.sequence_parallel, job.pins.attention, job.global_batch) == (False, "cudnn", 8)
    assert (job.fp8, job.question(*load_cluster("h100-1x8"), "megatron-lm").fp8) == ("delayed", "delayed")
    assert any("-f pretrain_gpt.py" in text for text in found.assumed)


def test_a_text_under_slurm_with_open_variables() -> None:
    with pytest.raises(BadInput, match="--set SEQ_LEN=") as caught:
        read(TEXT)
    assert "$SEQ_LEN" in str(caught.value)
    found = read(TEXT, SEQ_LEN="4096")
    job = found.job
    assert (found.devices, job.pins.tp, job.pins.dp, job.seq_tokens) == (32, 4, 8, 4096)
    assert (job.pins.recompute, job.pins.attention, job.model.vocab, job.model.max_positions) == (
        "selective",
        "flash",
        32000,
        0,
    )
    assert read(TEXT, SEQ_LEN="4096", TP_SIZE="8").job.pins.tp == 8


def test_arguments_in_yaml_and_as_options() -> None:
    # Sections as megatron/training/yaml_arguments.py reads them; options as keys as its functional tests have them.
    sections = """\
language_model:
  num_layers: 24
  hidden_size: 1024
  num_attention_heads: 16
  activation_func: swiglu
  normalization: RMSNorm
  add_bias_linear: False
  recompute_granularity: full
  recompute_method: block
  recompute_num_layers: 2
model_parallel:
  tensor_model_parallel_size: 2
  sequence_parallel: True
  pipeline_model_parallel_size: 4
  bf16: True
seq_length: 4096
micro_batch_size: 2
global_batch_size: 32
padded_vocab_size: 50304
position_embedding_type: rope
data_path: ${DATA}
lr: 0.00025
"""
    job = read(sections, "config.yaml").job
    assert (job.model.family, job.pins.recompute, job.pins.recompute_layers) == ("llama", "full", "first-2")
    assert (job.pins.tp, job.pins.pp, job.pins.dp, job.pins.sequence_parallel) == (2, 4, 2, True)
    options = """\
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --micro-batch-size: 4
  --global-batch-size: 32
  --seq-length: 1024
  --max-position-embeddings: 1024
  --vocab-file: ${DATA_PATH}/vocab.json
  --merge-file: ${DATA_PATH}/merges.txt
  --bf16: true
  --use-distributed-optimizer: true
  --fp16: false
"""
    job = read(options, "model_config.yaml").job
    assert (job.model.layers, job.micro_batch, job.pins.dtype, job.pins.zero) == (12, 4, "bf16", 1)


def test_what_memo_cannot_price_is_refused_or_said() -> None:
    with pytest.raises(BadInput, match="memo reads no options of layers of several kinds"):
        read(f"{GROWING.rstrip()} --hybrid-layer-pattern M*-M*-\n")
    found = read(f"{GROWING.rstrip()} --recompute-granularity selective --recompute-modules core_attn layernorm moe\n")
    assert found.job.pins.recompute == "selective"
    assert any("one module at a time" in text for text in found.assumed)
    uneven = read(f"{GROWING.rstrip()} --tensor-model-parallel-size 16\n")
    assert any("needs a multiple of 16" in text for text in uneven.assumed)
    with pytest.raises(BadInput, match="vocab_size"):
        read(ARRAYS.replace("--vocab-file", "--tokenizer-type HuggingFaceTokenizer --file"))
    with pytest.raises(BadInput, match="no options"):
        read("echo pretrain_gpt.py\n")


@pytest.mark.parametrize(
    ("text", "runs"),
    [("Et*3|t*4|t*4|t*3L", (3, 4, 4, 3)), ("Et|(tt|)*2,tL", (1, 2, 2, 1)), ("E|t|t|L", (0, 1, 1, 0))],
)
def test_layouts_of_stages(text: str, runs: tuple[int, ...]) -> None:
    from memo_sim.interchange.megatron_reading import layers_of

    assert tuple(layers_of(text)) == runs
    if 0 not in runs:
        assert tuple(layers_of(stages_text(runs))) == runs


@pytest.mark.slow
@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM")
@pytest.mark.parametrize("name", PLANS)
def test_the_framework_parses_every_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.environ["MEGATRON_LM"])
    module = pytest.importorskip("megatron.training.arguments", exc_type=ImportError)
    parser = module.add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    (job,) = FRAMEWORK.jobs(PLANS[name])
    words = [word for options in arguments(job).values() for option in options for word in option]
    parser.parse_args([*words, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "50304"])
    known = {text for action in parser._actions for text in action.option_strings}
    assert {key for saying in FRAMEWORK.sayings.values() for key in saying.keys} <= known


@pytest.mark.parametrize(("recipe", "said"), FP8.items())
def test_recipes_of_fp8_are_written_and_read(recipe: Fp8Recipe, said: tuple[str, str]) -> None:
    options = [*option_of("fp8", said[0]), *option_of("fp8_recipe", said[1])]
    assert options == ["--fp8-format", said[0], "--fp8-recipe", said[1]]
    text = GROWING.replace("--fp8-format hybrid", " ".join(options))
    assert read(text).job.fp8 == recipe


def test_parameters_in_fp8_alone_are_written_and_read() -> None:
    found = read(GROWING.replace("--fp8-format hybrid", "--fp8-format hybrid --fp8-param-gather"))
    assert found.job.fp8_params
    assert not any("fp8" in each.key for each in found.ignored)
    text = written(found.job, 8)
    assert "--fp8-param-gather" in text
    assert "--use-distributed-optimizer" in text  # Megatron asks for it
    assert read(text).job.fp8_params
    decisions = found.job.decisions(*load_cluster("h100-1x8"), "megatron-lm")
    assert nearest_jobs(decisions)[0].fp8_params
    assert not read(GROWING.replace("--fp8-format hybrid", "--fp8-param-gather")).job.fp8_params
    with_mx = read(GROWING.replace("--fp8-format hybrid", "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather"))
    assert not with_mx.job.fp8_params
    assert any("MXFP8" in each for each in with_mx.assumed)


def test_bridge_recipes_of_fp8_say_scales_and_parameters() -> None:
    found = megatron_bridge.Found({}, {})
    megatron_bridge._put_all(found, [("mixed_precision", "bf16_with_fp8_current_scaling_mixed")])
    assert (found.values["fp8_recipe"], found.values["fp8_param_gather"]) == ("tensorwise", True)


def test_a_recipe_of_fp8_that_memo_does_not_have_is_refused() -> None:
    with pytest.raises(BadInput) as refused:
        read(GROWING.replace("--fp8-format hybrid", "--fp8-format hybrid --fp8-recipe custom"))
    assert "custom" in refused.value.message()
