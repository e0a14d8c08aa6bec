"""How many ranks a search proves for an answer: the best plan alone where no other is shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from memo_sim.answers import what_if as answers
from memo_sim.answers.what_if import LEAST_EXACT, what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.engine.simulate import Simulation
from memo_sim.planning.arena import Arena, arena_of
from memo_sim.planning.outcome import SearchResult
from memo_sim.planning.question import Question
from memo_sim.planning.search import search


@pytest.fixture
def question() -> Question:
    cluster, hardware = load_cluster("a800-1x8")
    return Question(load_model("gpt-tiny"), cluster, hardware, seq_tokens=8192, global_batch=8)


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of exact ranks of each search."""
    found = list[int]()

    def counted(*arguments: Any, keep: int, **more: Any) -> SearchResult:
        found.append(keep)
        return search(*arguments, keep=keep, **more)

    monkeypatch.setattr(answers, "search", counted)
    return found


def test_one_rank_is_proved_where_one_plan_is_shown(question: Question, proved: list[int]) -> None:
    only = what_if(question, top=1, explained=False).result
    several = what_if(question, top=2).result
    assert proved == [1, LEAST_EXACT]
    assert only.best == several.best
    assert len(only.plans) == 1


def test_more_ranks_are_proved_where_the_best_arena_does_not_fit(
    question: Question, proved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    best, second = what_if(question, top=2).result.plans

    def too_large_at_first(simulation: Simulation) -> Arena:
        arena = arena_of(simulation)
        if simulation.prediction.step_s != best.step_s:
            return arena
        refused = msgspec.structs.replace(arena.prediction, status="gpu_oom", step_s=None, shortfall_bytes=1)
        return replace(arena, prediction=refused)

    monkeypatch.setattr(answers, "arena_of", too_large_at_first)
    shown = what_if(question, top=1, explained=False).result
    assert proved == [LEAST_EXACT, 1, LEAST_EXACT]
    assert shown.best is not None
    assert shown.best.step_s == second.step_s > best.step_s
