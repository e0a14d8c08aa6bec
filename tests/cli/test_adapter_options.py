"""``--lora`` on the command line: answers, plans written, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memo_sim.contract import codec
from memo_sim.contract.plan import Plan
from tests.cli.commands import memo_sim

QUESTION = ("what-if", "llama3-8b", "--cluster", "h100-1x8", "--seq-len", "32k")
LAYOUT = ("--tp", "2", "--cp", "2", "--dp", "2", "--zero", "1", "--global-batch", "2", "--alpha", "0")
KEEP = ("--recompute", "none")


def test_an_answer_says_what_is_trained_and_what_mfu_counts(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    done = memo_sim(*QUESTION, *LAYOUT, *KEEP, "--lora", "r=16,alpha=32", "--why", "-o", plan)
    assert done.returncode == 0, done.stderr
    assert "rank 16, scale 2, on q k v proj gate up down" in done.stdout
    assert "41.9 million of 8.03 billion parameters are trained" in done.stdout
    assert "with all weights trained, the same layout would take" in done.stdout
    assert "metp" not in done.stdout
    assert codec.read(plan, Plan).decisions.adapters == "r=16,alpha=32,targets=qkv+proj+ffn"

    again = memo_sim("what-if", "--plan", plan, "--cluster", "h100-1x8", "--json")
    row = json.loads(again.stdout)["plans"][0]
    full = memo_sim(*QUESTION, *LAYOUT, "--recompute", "full", "--json")
    assert row["step_s"] < json.loads(full.stdout)["plans"][0]["step_s"]

    refused = memo_sim("export", plan, "--to", "accelerate", "-o", tmp_path / "job")
    assert refused.returncode == 2
    assert "memo writes no job of accelerate that trains adapters" in refused.stderr


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--lora", "16"), 2, "not a description of adapters"),
        (("--lora", "r=8", "--system", "megatron-lm"), 4, "no framework's tensors and kernels of adapters are known"),
        (("--lora", "r=8", "--metp", "8"), 4, "metp 8 has no lowering beside low-rank adapters"),
    ],
)
def test_what_has_no_adapters_refuses_them(options: tuple[str, ...], code: int, text: str) -> None:
    done = memo_sim(*QUESTION, *options)
    assert done.returncode == code
    assert text in done.stderr
