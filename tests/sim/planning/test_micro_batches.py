"""Larger micro-batches: searched where they are open and sequences are short, on the fastest layouts."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import msgspec
import pytest

from memo_sim.answers.left_out import left_out
from memo_sim.answers.named_values import question_of
from memo_sim.planning import micro_batches
from memo_sim.planning.micro_batches import MOST_SEQUENCE_TOKENS, are_searched, with_larger_micro_batches
from memo_sim.planning.outcome import Evaluated, SearchResult
from memo_sim.planning.question import Question
from memo_sim.planning.search import search

ASKED = {"model": "llama-tiny", "cluster": "h100-1x2", "seq_len": "1k", "global_batch": 32}


@pytest.fixture(scope="module")
def question() -> Question:
    return question_of(ASKED)


IN_SUBSEQUENCES = {**ASKED, "global_batch": 8, "system": "every-layout", "pp": 2, "subsequences": 2}


@pytest.mark.parametrize(
    "asked", [ASKED, pytest.param(IN_SUBSEQUENCES, marks=pytest.mark.slow)], ids=["whole", "subsequences"]
)
def test_the_best_micro_batch_is_found(asked: dict[str, object]) -> None:
    question = question_of(asked)
    found = with_larger_micro_batches(question, search(question, siblings=inf), siblings=inf)
    assert found.best is not None
    steps = {size: search(replace(question, micro_batch=size)).best for size in (1, 2, 4, 8)}
    quickest = min((one.prediction.step_s or 0.0, size) for size, one in steps.items() if one is not None)
    assert (found.best.prediction.step_s, found.best.decisions.micro_batch) == quickest
    assert quickest[1] > 1
    assert found.evaluated == len(found.ranked) == len({one.decisions for one in found.ranked})
    of_best = {one.policy for one in found.ranked if one.decisions.micro_batch == quickest[1]}
    assert len(of_best) > 2, "the explanation knows the other policies"


def test_a_larger_one_that_is_played_and_slower_is_not_explained(
    question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, limits = search(question), []
    assert found.best is not None

    def slower(asked: Question, best: Evaluated, *_: object, siblings: float = 0.0) -> SearchResult:
        limits.append((best, siblings))
        prediction = msgspec.structs.replace(best.prediction, step_s=2 * (best.prediction.step_s or 0.0))
        decisions = msgspec.structs.replace(best.decisions, micro_batch=asked.micro_batch)
        return SearchResult([replace(best, decisions=decisions, prediction=prediction)], 1, 0)

    monkeypatch.setattr(micro_batches, "search_beside", slower)
    larger = with_larger_micro_batches(question, found, siblings=inf)
    assert larger.best is found.best
    assert limits == [(found.best, 0.0)] * 3


@pytest.mark.parametrize("cp", [1, 2])
def test_sequences_in_subsequences_may_go_through_the_stages_together(cp: int) -> None:
    machine = {"cp": cp, "cluster": f"h100-1x{2 * cp}"}
    asked = {**IN_SUBSEQUENCES, "global_batch": 2, "recompute": "none", "alpha": 0.0} | machine
    question = question_of(asked)
    best = with_larger_micro_batches(question, search(question), siblings=inf).best
    assert best is not None
    assert (best.decisions.layout.subsequences, best.decisions.micro_batch) == (2, 2)


def test_a_given_micro_batch_and_long_sequences_stay(question: Question) -> None:
    assert are_searched(question)
    given = question_of({**ASKED, "micro_batch": 1})
    alone = search(given)
    assert with_larger_micro_batches(given, alone, siblings=inf) is alone
    for changed in ({"seq_tokens": 2 * MOST_SEQUENCE_TOKENS}, {"global_batch": 1}, {"system": "megatron-core"}):
        assert not are_searched(replace(question, **changed))


def test_the_answer_names_what_was_not_tried(question: Question) -> None:
    def named(asked: Question) -> str:
        return "; ".join(one.what for one in left_out(asked) if one.option == "--micro-batch")

    assert "up to 8 or 32k tokens a rank" in named(question)
    assert named(question_of(IN_SUBSEQUENCES)).endswith("32k tokens a rank and subsequence")
    assert named(replace(question, seq_tokens=2 * MOST_SEQUENCE_TOKENS)) == "micro-batches above 1"
    assert named(question_of({**ASKED, "micro_batch": 1})) == ""
