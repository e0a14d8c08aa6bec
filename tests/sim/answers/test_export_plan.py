"""An export predicts the plan as its file does, and what it says to do next can be typed."""

from __future__ import annotations

import shlex

import msgspec
import pytest

from memo_sim.answers.export_plan import MODEL_FILE, Exported, export_plan, search_line
from memo_sim.answers.named_values import question_of
from memo_sim.answers.what_if import plan_of, what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.documents import parse_documents
from memo_sim.contract.plan import Decisions
from memo_sim.contract.systems import DEFAULT_SYSTEM
from memo_sim.interchange.frameworks import find_framework
from memo_sim.planning.plan_question import question_of_plan


def test_a_plan_costs_what_its_own_system_makes_of_it() -> None:
    """DeepSpeed-Ulysses has slower attention on an A800; without its system the plan would be 30 % faster."""
    values = {"model": "llama-7b", "cluster": "a800-1x8", "seq_len": "32k", "system": "deepspeed-ulysses"}
    asked = question_of({**values, "global_batch": 8, "dp": 8, "ulysses": 1, "zero": 3})
    answer = what_if(asked)
    assert answer.best is not None
    plan, _ = plan_of(answer.best, answer.arena, asked, created="", command="")
    exported = export_plan(plan, find_framework("megatron-lm"), *load_cluster("a800-1x8"))
    assert plan.prediction is not None
    assert exported.document.plan.step_s == pytest.approx(plan.prediction.step_s)


def test_a_system_of_another_version_is_none() -> None:
    decisions = Decisions(model=load_model("gpt-tiny"), seq_tokens=1024)
    cluster, hardware = load_cluster("a800-1x2")
    assert question_of_plan(decisions, cluster, hardware, system="of tomorrow").system == DEFAULT_SYSTEM
    assert question_of_plan(decisions, cluster, hardware, system="fsdp").system == "fsdp"


def test_the_next_command_asks_about_the_same_training() -> None:
    decisions = Decisions(
        model=load_model("gpt-tiny"),
        seq_tokens=1024,
        adapters="r=8,alpha=8,targets=qkv+proj",
        documents=parse_documents("mean=128,max=512", option="--documents"),
    )
    words = shlex.split(search_line(decisions, "trl-layouts", "h100-1x4", "gpt-tiny"))
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert given["--lora"] == decisions.adapters
    assert given["--documents"] == "mean=128,max=512"
    assert not given.keys() & {"--fp8", "--objective"}
    assert "--fp8 block" in search_line(msgspec.structs.replace(decisions, fp8="block"), "any", "h100-1x4", "gpt-tiny")


def test_names_of_files_are_quoted_in_the_next_command() -> None:
    decisions = Decisions(model=load_model("gpt-tiny"), seq_tokens=1024)
    line = search_line(decisions, "megatron-core", "two nodes", MODEL_FILE)
    words = shlex.split(Exported(document=None, files={}, search=line).search_command("my folder; rm x"))  # type: ignore[arg-type]
    assert words[:5] == ["memo-sim", "what-if", "my folder; rm x/memo_model.json", "--cluster", "two nodes"]
