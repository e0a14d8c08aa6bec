"""Jobs of verl: the actor's step of its overrides and configurations, and what is refused or left out by name."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from memo_sim.answers.import_job import import_job
from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.plan import Decisions
from memo_sim.interchange.framework import Read, Source
from memo_sim.interchange.frameworks import READ_ONLY, find_framework, framework_of, framework_titled
from memo_sim.interchange.plan_paths import plan_paths
from tests.refusals import refused

ACTOR, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
SCRIPT = f"""\
responses=8
answer=$((1024 * 30))
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.train_batch_size=128 data.max_prompt_length=2048 data.max_response_length=$answer \\
    {MODEL}path=Qwen/Qwen3-8B {ACTOR}ppo_mini_batch_size=32 \\
    ++{ACTOR}use_dynamic_bsz=True {ACTOR}ppo_max_token_len_per_gpu=40000 \\
    {ACTOR}ulysses_sequence_parallel_size=2 {ACTOR}fsdp_config.optimizer_offload=True \\
    actor_rollout_ref.rollout.n=${{responses}} actor_rollout_ref.rollout.name=vllm \\
    trainer.logger='["console"]' trainer.n_gpus_per_node=8 trainer.nnodes=1 $@
"""
CONFIG = """\
algorithm: {adv_estimator: rloo}
critic: {enable: null}
data: {max_prompt_length: 1024, max_response_length: 7168, train_batch_size: 64}
actor_rollout_ref:
  model: {path: /models/mine, enable_activation_offload: true, use_fused_kernels: true}
  rollout: {n: 4, response_length: "${data.max_response_length}"}
  actor:
    strategy: fsdp2
    use_fused_kernels: ${oc.select:actor_rollout_ref.model.use_fused_kernels,false}
    ppo_mini_batch_size: ${data.train_batch_size}
    ppo_micro_batch_size_per_gpu: 2
    fsdp_config: {fsdp_size: 4, offload_policy: true}
trainer: {nnodes: 2, n_gpus_per_node: 8}
"""


def read(given: Mapping[str, str] | None = None, text: str = SCRIPT, name: str = "run.sh") -> Read:
    source = (Source(name, text),)
    return framework_of(source).read(source, given or {})


def test_a_command_is_the_actors_optimizer_step() -> None:
    found = read()
    job, pins = found.job, found.job.pins
    assert (found.framework, found.devices, job.model.name, job.objective) == ("verl", 8, "qwen3-8b", "grpo")
    assert (job.seq_tokens, job.micro_batch, job.global_batch) == (32768, 2, 256)  # 80,000 tokens of two ranks
    assert (pins.ulysses, pins.dp, pins.zero, pins.sharding, job.streams) == (2, 4, 3, "fsdp1", "recorded")
    assert (pins.recompute, pins.attention, pins.dtype, job.states) == ("full", "flash2", "bf16", "fp32")
    assert (job.loss, pins.loss_chunk_tokens) == ("fused", 0)
    said = {option.key: option.says for option in found.read}
    assert "on the device during the step" in said[f"{ACTOR}fsdp_config.optimizer_offload"]
    assert any("one of 4 optimizer steps" in text for text in found.assumed)


def test_a_configuration_with_references_is_read() -> None:
    found = read({"model": "llama3-8b"}, CONFIG, "config.yaml")
    job, pins = found.job, found.job.pins
    assert (found.devices, job.seq_tokens, job.micro_batch, job.global_batch) == (16, 8192, 2, 256)
    assert (pins.dp, pins.zero_ranks, pins.sharding, job.states, job.streams) == (16, 4, "fsdp2", "host", "auto")
    assert (job.loss, pins.loss_chunk_tokens, pins.offload_inputs) == ("checkpointed", 512, True)


def test_a_command_wins_over_the_configuration_and_set_over_both() -> None:
    sources = (
        Source("config.yaml", CONFIG),
        Source("run.sh", f"python -m verl.trainer.main_ppo ~{MODEL}use_fused_kernels {ACTOR}ppo_mini_batch_size=32"),
    )
    given = {"model": "llama3-8b", f"{ACTOR}fsdp_config.fsdp_size": "-1"}
    job = framework_of(sources).read(sources, given).job
    assert (job.loss, job.global_batch, job.pins.zero_ranks) == ("fused", 128, None)


def test_entropies_keep_the_logits_and_are_said_not_to_be_priced() -> None:
    found = read({f"{ACTOR}entropy_coeff": "0.001"})
    assert (found.job.loss, found.job.pins.loss_chunk_tokens) == ("blocks", 0)
    assert any("entropies" in text and "not priced" in text for text in found.assumed)
    assert read({f"{ACTOR}entropy_coeff": "0.0"}).job.loss == "fused"


@pytest.mark.parametrize(
    ("given", "pins"),
    [
        ({f"{ACTOR}fsdp_config.reshard_after_forward": "false"}, {"zero": 2}),
        ({f"{ACTOR}fsdp_config.fsdp_size": "1"}, {"zero": 0, "zero_ranks": None, "sharding": None}),
        ({f"{MODEL}tiled_mlp.enabled": "true"}, {"mlp_chunk_tokens": 8192}),  # 2 x 32k on two ranks, in 4 tiles
        ({f"{MODEL}enable_gradient_checkpointing": "false"}, {"recompute": "none", "offload_inputs": None}),
        ({f"{ACTOR}fsdp_config.dtype": "float16"}, {"dtype": "fp16"}),
        ({f"{ACTOR}fsdp_config.mixed_precision.reduce_dtype": "bf16"}, {"reduce_dtype": "bf16"}),
        ({f"{ACTOR}fsdp_config.model_dtype": "bf16"}, {"reduce_dtype": "fp32"}),
        ({f"{MODEL}override_config.attn_implementation": "sdpa"}, {"attention": None}),
    ],
)
def test_options_become_pins(given: dict[str, str], pins: dict[str, object]) -> None:
    found = read(given).job.pins
    assert {name: getattr(found, name) for name in pins} == pins


def test_micro_batches_divide_the_sequences_of_a_replica() -> None:
    found = read({f"{ACTOR}use_dynamic_bsz": "false", f"{ACTOR}ppo_micro_batch_size_per_gpu": "3"})
    assert (found.job.micro_batch, found.job.global_batch) == (2, 256)  # 64 sequences of a replica
    assert any("micro-batches are of 2, not 3" in text for text in found.assumed)


def test_what_the_step_leaves_out_is_said() -> None:
    found = read({f"{ACTOR}use_kl_loss": "true", "actor_rollout_ref.rollout.free_cache_engine": "false"})
    assumed = " ".join(found.assumed)
    assert "of the reference model are not included" in assumed
    assert "free_cache_engine false" in assumed
    assert "reference model" not in " ".join(read().assumed)
    ignored = {option.key: option.why for option in found.ignored}
    assert "rollouts are not part" in ignored["actor_rollout_ref.rollout.name"]
    adapters = read({f"{MODEL}lora_rank": "32"})
    assert any("priced as training of all parameters" in text for text in adapters.assumed)


@pytest.mark.parametrize(
    ("given", "what", "hint"),
    [
        ({"algorithm.adv_estimator": "gae"}, "no critic", "--set algorithm.adv_estimator=grpo"),
        ({"critic.enable": "true"}, "no critic", "--set algorithm.adv_estimator=grpo"),
        ({f"{ACTOR}strategy": "megatron"}, "FSDP", "--system megatron-core"),
        ({f"{ACTOR}strategy": "veomni"}, "FSDP", "--objective grpo"),
        ({f"{ACTOR}ppo_max_token_len_per_gpu": "16000"}, "longer than the tokens", ""),
        ({f"{ACTOR}use_dynamic_bsz": "false"}, "how many sequences", "ppo_micro_batch_size_per_gpu=1"),
        ({f"{MODEL}use_remove_padding": "false"}, "without padding", ""),
        ({f"{ACTOR}ulysses_sequence_parallel_size": "3"}, "no multiple", ""),
        ({f"{ACTOR}fsdp_config.fsdp_size": "3"}, "does not divide", ""),
        ({f"{ACTOR}fsdp_config.model_dtype": "int8"}, "a wrong value", ""),
        ({f"{ACTOR}ppo_mini_batch_size": "0"}, "a wrong value", ""),
        (
            {f"{ACTOR}ppo_mini_batch_size": "$ROWS"},
            "a wrong value",
            "--set actor_rollout_ref.actor.ppo_mini_batch_size=",
        ),
        ({"devices": "1024"}, "fewer sequences than replicas", ""),
    ],
)
def test_other_jobs_are_refused_by_name(given: dict[str, str], what: str, hint: str) -> None:
    with refused(BadInput, what=what, **({"hint": hint} if hint else {})):
        read(given)


def test_other_programs_of_verl_are_refused_by_name() -> None:
    with refused(BadInput, what="reinforcement learning alone", hint="--system verl-fsdp"):
        read(text="torchrun -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=Qwen/Qwen3-8B")
    with refused(BadInput, what="FSDP", got="megatron"):
        read(text=SCRIPT.replace("main_ppo", "main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml'"))
    with refused(BadInput, what="no critic", got="verl's default"):
        read(text=SCRIPT.replace("algorithm.adv_estimator=grpo", ""))


def test_a_configuration_that_is_not_among_the_files_is_said() -> None:
    found = read(text=SCRIPT.replace("main_ppo", "main_ppo --config-name=mine"))
    assert any("the configuration mine" in text for text in found.assumed)


def test_jobs_are_read_and_not_written() -> None:
    framework = READ_ONLY["verl"]
    assert framework is find_framework("verl") is framework_titled("verl")
    assert set(framework.sayings) == set(plan_paths())
    with refused(UsageError, what="writes none"):
        framework.jobs(Decisions(model=read().job.model, seq_tokens=1024))


def live_bytes(given: Mapping[str, str]) -> float:
    memory = import_job([SCRIPT], given, machine=load_cluster("h100-1x8"), search=False).memory
    assert memory is not None
    return memory.live_bytes


def test_entropies_take_a_second_copy_of_the_logits() -> None:
    tokens, vocab = 32768, 151936  # two sequences on two ranks
    more = live_bytes({f"{ACTOR}calculate_entropy": "true"}) - live_bytes({})
    assert more == pytest.approx(2 * tokens * vocab, rel=0.01)


def test_what_is_better_has_the_same_objective() -> None:
    given = {"devices": "1", "model": "llama-tiny", "seq_len": "4k", f"{ACTOR}ulysses_sequence_parallel_size": "1"}
    found = import_job([SCRIPT], given, machine=load_cluster("h100-1x2"))
    assert [answer.decisions.objective for answer in found.better if answer.decisions] == ["grpo", "grpo"]
