"""Jobs of TRL's GRPO: their objective, their loss, and what a step of memo leaves out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from memo_sim.contract.errors import BadInput
from memo_sim.interchange.framework import Read, Source
from memo_sim.interchange.frameworks import find_framework
from tests.refusals import refused

ARGUMENTS = """\
model_name_or_path: Qwen/Qwen3-8B
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
num_generations: 8
max_completion_length: 4096
beta: {beta}
loss_type: {loss_type}
use_vllm: true
use_liger_kernel: {liger}
"""
FSDP = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n"


def read(
    more: str = "",
    given: Mapping[str, str] | None = None,
    *,
    beta: str = "0.0",
    loss: str = "dapo",
    liger: str = "false",
) -> Read:
    text = ARGUMENTS.format(beta=beta, loss_type=loss, liger=liger) + more
    sources = (Source("grpo.yaml", text), Source("fsdp.yaml", FSDP))
    return find_framework("trl").read(sources, {"seq_len": "6k"} if given is None else given)


def test_whole_logits_are_in_fp32_unless_liger_computes_the_loss() -> None:
    job = read().job
    assert (job.objective, job.loss, job.seq_tokens, job.global_batch) == ("grpo", "eager-fp32", 6144, 64)
    assert job.pins.loss_chunk_tokens == 0
    fused = read(liger="true").job
    assert (fused.loss, fused.pins.loss_chunk_tokens) == ("fused", 6144)  # one sequence of the two at a time


def test_what_the_step_leaves_out_is_said() -> None:
    assumed = " ".join(read(beta="0.04").assumed)
    assert "the KL term needs one of the reference model" in assumed
    assert "reference model" not in " ".join(read().assumed)
    ignored = {option.key: option.why for option in read(loss="dr_grpo").ignored}
    assert "generation is not part of it" in ignored["use_vllm"]
    assert "all tokens (dapo)" in ignored["loss_type"]
    assert "loss_type" not in {option.key for option in read().ignored}


def test_a_prompt_has_to_have_a_length() -> None:
    assert read("max_prompt_length: 2048\n", {}).job.seq_tokens == 6144
    with refused(BadInput, what="how long a prompt", got="4096", hint="--set seq_len"):
        read(given={})


@pytest.mark.parametrize(("command", "objective"), [("trl grpo", "grpo"), ("trl sft", "next-token")])
def test_the_command_says_what_is_trained(command: str, objective: str) -> None:
    script = f"{command} --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1"
    given = {"seq_len": "6k", "devices": "8"}
    assert find_framework("trl").read((Source("train.sh", script),), given).job.objective == objective
