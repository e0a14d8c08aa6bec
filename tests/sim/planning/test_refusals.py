"""The error when no layout of a question can be lowered: it names the number to change, or the knob."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memo_sim.answers.longest import longest
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.refusals import NothingDivides
from memo_sim.planning.space import candidates
from memo_sim.views.answer_text import longest_text
from tests.refusals import check_fields


def ask(model: str, seq_tokens: int, *, system: str = "any", **pins: object) -> Question:
    cluster, hardware = load_cluster("a100-1x8")
    return Question(load_model(model), cluster, hardware, seq_tokens, system, Pins(**pins))  # type: ignore[arg-type]


def refused(question: Question) -> Infeasible:
    with pytest.raises(Infeasible) as caught:
        candidates(question)
    return caught.value


def test_a_knob_that_excludes_every_dividing_layout_is_named() -> None:
    """One layout does not divide the global batch either, but the memory policy is the reason for all others."""
    error = refused(ask("gpt-7b", 1 << 16, system="metp", memory_policy="eager"))
    assert not isinstance(error, NothingDivides)
    check_fields(error, Infeasible, where="decisions.memory_policy", got=("eager", "metp 2"), wanted="planned")


def test_numbers_that_no_layout_divides_are_named() -> None:
    error = refused(ask("gpt-7b", 65537))
    assert isinstance(error, NothingDivides)
    assert "--seq-len 65536" in str(error.hint)
    batch = refused(ask("gpt-7b", 1 << 16, dp=8))
    assert isinstance(batch, NothingDivides)
    assert "--global-batch 8" in str(batch.hint)
    assert batch.what == "the batch is too small for dp"
    uneven = refused(replace(ask("gpt-7b", 1 << 16, dp=8), global_batch=12))
    assert uneven.what == "the batch is not a multiple of micro-batch x dp"


def test_knobs_that_a_bidirectional_model_excludes_are_named() -> None:
    error = refused(ask("bert-large", 512, subsequences=2))
    check_fields(error, Infeasible, where="layout.subsequences", got=("2", "bidirectional"), hint="causal")


def test_a_kernels_integer_limit_is_not_reported_as_divisibility() -> None:
    """At a billion tokens, every layout without a ring exceeds the kernels' 32-bit integers."""
    found = longest(ask("gpt-7b", 1, cp=1), step_tokens=1000 << 20).document
    assert found.bound == "cannot be"
    assert "(what plans allow)" in longest_text(found)
    assert "32 bits" in found.tried[0].reason
