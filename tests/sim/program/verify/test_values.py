"""Values: programs of every kind are accepted, and a fault planted in one copy, kernel or row is found."""

from __future__ import annotations

import pytest

from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower
from memo_sim.program.verify.values import check_values
from tests.sim.small_programs import GPT, LLAMA, decide

HALF = ("tokenwise", 0.5)
PLANS: dict[str, Decisions] = {
    "keep": decide(LLAMA),
    "gpt": decide(GPT, policy=HALF),
    "full": decide(LLAMA, policy=("full", 0.0)),
    "full swapped": decide(LLAMA, policy=("full", 1.0)),
    "tokenwise": decide(LLAMA, policy=HALF),
    "tp": decide(LLAMA, Layout(tp=2, sequence_parallel=True), HALF),
    "tp whole": decide(GPT, Layout(tp=2)),
    "tp chunked": decide(LLAMA, Layout(tp=4, sequence_parallel=True, tp_overlap="chunked"), HALF),
    "tp shared heads": decide(LLAMA, Layout(tp=8, sequence_parallel=True)),
    "ring": decide(LLAMA, Layout(cp=4), HALF),
    "all-gather": decide(LLAMA, Layout(cp=4, cp_exchange="all_gather"), HALF),
    "rsa": decide(GPT, Layout(cp=4, cp_exchange="rsa")),
    "ulysses": decide(LLAMA, Layout(ulysses=4), HALF),
    "metp": decide(GPT, Layout(metp=4)),
    "1F1B": decide(LLAMA, Layout(pp=2), HALF, global_batch=4),
    "zero-bubble": decide(LLAMA, Layout(pp=2, schedule="zero-bubble"), global_batch=4),
    "interleaved": decide(LLAMA, Layout(pp=2, virtual_stages=2, schedule="interleaved"), global_batch=4),
    "subsequences": decide(LLAMA, Layout(pp=2, subsequences=4)),
    "zero 3": decide(LLAMA, Layout(dp=2, zero=3), HALF),
    "zero 2": decide(GPT, Layout(dp=4, zero=2, zero_ranks=2)),
    "mlp chunks": decide(LLAMA, policy=("full", 0.0), mlp_chunk_tokens=512),
    "selective": decide(LLAMA, policy=("selective", 0.0)),
    "operators": decide(LLAMA, policy=("operators", 0.0)),
    "attention chunks": decide(LLAMA, Layout(ulysses=2), ("full", 0.0), attention_chunk_tokens=256),
}


def faults(program: Program, decisions: Decisions) -> list[str]:
    """Return what the checker finds in one program."""
    return check_values(program, expand(program), decisions)


@pytest.mark.parametrize("plan", PLANS)
def test_programs_are_accepted(plan: str) -> None:
    for program in lower(PLANS[plan]):
        assert faults(program, PLANS[plan]) == []
