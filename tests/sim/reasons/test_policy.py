"""What an answer says of a policy's objective: logits in chunks and whole, and the forwards that a step leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from memo_sim.answers.assumptions import assumptions
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.plan import Layout
from memo_sim.contract.units import GIB, format_bytes
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.planning.question import Question
from memo_sim.program.ir.instruction import Lane
from memo_sim.reasons.policy import policy
from tests.sim.small_programs import decide

TOKENS, VOCAB, CHUNK = 2**14, 128256, 1024


def played(**changes: Any) -> tuple[Question, Simulation]:
    model, (cluster, hardware) = load_model("llama3-8b"), load_cluster("h100-1x8")
    fields = {"seq_tokens": TOKENS, "objective": "grpo", "global_batch": 4, "loss_chunk_tokens": CHUNK} | changes
    plan = decide(model, Layout(tp=2, sequence_parallel=True, dp=4, zero=1), ("none", 0.0), **fields)
    return Question(model, cluster, hardware, seq_tokens=TOKENS, system="any"), simulate(plan, hardware, cluster)


def said(**changes: Any) -> str:
    (line,) = [each for each in assumptions(*played(**changes)) if each.name == "objective"]
    return line.value


def test_logits_of_a_chunk_are_compared_with_fp32_ones_of_all_tokens() -> None:
    """Each of two tensor-parallel ranks has half of the vocabulary."""
    held, whole = 2 * CHUNK * VOCAB // 2, 4 * TOKENS * VOCAB // 2
    assert whole == pytest.approx(3.914 * GIB, rel=1e-3)
    text = said()
    assert (
        f"{format_bytes(held)} for 1k tokens at once; in fp32 for all 16k they would take {format_bytes(whole)}" in text
    )
    assert f"{format_bytes(3 * 4 * TOKENS)} a micro-batch" in text
    assert "forwards of the reference model are not included" in text
    assert f"{format_bytes(whole // 2)} for all 16k tokens at once, {format_bytes(whole)} in fp32" in said(
        loss_chunk_tokens=0
    )


def test_forwards_are_timed_and_a_reference_model_is_not_included() -> None:
    _, simulation = played()
    (text,) = policy(simulation)
    (stage,) = simulation.stages
    compute = stage.per_instruction(lambda i: float(i.lane is Lane.COMPUTE))
    whole = float((stage.seconds * compute * stage.weights).sum())
    forward = float(text.partition("forwards take ")[2].split(" ")[0]) / 1e3
    assert "ms of compute" in text
    assert 0.25 * whole < forward < 0.4 * whole  # a backward takes twice as long, and attention's 2.5 times
    assert policy(played(objective="next-token")[1]) == []
