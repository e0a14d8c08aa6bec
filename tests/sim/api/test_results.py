"""Results compare, copy and pickle by their documents, and refuse wrong arguments with memo's errors."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

import memo_sim as memo
from memo_sim.views.typed_result import TypedResult
from tests.refusals import check_fields

TINY: dict[str, Any] = {"cluster": "a800-1x2", "seq_len": "1k", "system": "full-recompute", "tp": 2}
MOST_PICKLED_BYTES = 500_000
"""The programs of a plan have megabytes."""


def made() -> list[TypedResult]:
    answer = memo.what_if("gpt-tiny", **TINY)
    return [
        answer,
        memo.what_if("gpt-tiny", **TINY, device_memory_gib=0.5),
        memo.longest("gpt-tiny", cluster="a800-1x2", step="8k", system="full-recompute", tp=2),
        memo.what_if("gpt-tiny", **{**TINY, "cluster": ["a800-1x2", "h100-1x2"]}),
        memo.gpus("gpt-tiny", seq_len="1k", cluster="a800", most_gpus=1, system="full-recompute"),
        memo.oom(answer),
        memo.explain(answer),
        memo.export(answer, to="megatron-lm"),
        memo.compare(answer, answer.plan),
        memo.sweep(memo.grid(model="gpt-tiny", **TINY), jobs=1),
    ]


@pytest.fixture(scope="module")
def results() -> list[TypedResult]:
    return made()


def test_results_are_equal_pickled_and_copied(results: list[TypedResult]) -> None:
    names = [type(result).__name__ for result in results]
    assert len(set(names)) == len(results) - 1
    for number, result in enumerate(results):
        raw = pickle.dumps(result)
        assert len(raw) < MOST_PICKLED_BYTES
        for same in (pickle.loads(raw), copy.deepcopy(result), copy.copy(result)):
            assert same == result
            assert hash(same) == hash(result)
            assert (str(same), same.to_json()) == (str(result), result.to_json())
        others = [each for at, each in enumerate(results) if at != number]
        assert result not in others
        assert result != result.to_json()


def test_a_pickled_answer_has_its_plan_and_its_timeline(results: list[TypedResult]) -> None:
    answer = results[0]
    assert isinstance(answer, memo.WhatIfResult)
    again: memo.WhatIfResult = pickle.loads(pickle.dumps(answer))
    assert again.plan.decisions == answer.plan.decisions
    assert again.plan.program_sha256 == answer.plan.program_sha256
    assert again.placement == answer.placement
    assert again.traces == answer.traces
    assert again.table("kinds") == answer.table("kinds")


@pytest.mark.slow
def test_another_process_answers() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        answer = pool.submit(memo.what_if, "gpt-tiny", **TINY).result()
        assert answer == memo.what_if("gpt-tiny", **TINY)
        with pytest.raises(memo.UsageError, match="not a value of tp"):
            pool.submit(memo.what_if, "gpt-tiny", **{**TINY, "tp": 0}).result()


def test_every_result_shows_itself(results: list[TypedResult]) -> None:
    for result in results:
        shown: Any = result
        assert shown._repr_html_().startswith("<table>")
        assert repr(shown).startswith(f"<{type(shown).__name__}")
        rows = shown.table()
        assert len({tuple(row) for row in rows}) <= 1


def test_wrong_arguments_of_methods_are_refused(results: list[TypedResult]) -> None:
    for result in results:
        for name in ("save", "plot", "save_report", "save_timeline"):
            method = getattr(result, name, None)
            if method is None:
                continue
            with pytest.raises(memo.UsageError) as refused:
                method(3)
            check_fields(refused.value, memo.UsageError, what="not a value of path", got="3", wanted="text or a path")
            with pytest.raises(memo.UsageError) as refused:
                method(paht="plan.json")
            check_fields(refused.value, memo.UsageError, got="'paht'", hint="did you mean 'path'?")
        wrong: Any = result
        with pytest.raises(memo.UsageError) as refused:
            wrong.save()
        check_fields(refused.value, memo.UsageError, what="'path'", wanted="path")
        with pytest.raises(memo.UsageError):
            wrong.table("nothing")
    answer: Any = results[0]
    with pytest.raises(memo.UsageError) as refused:
        answer.plot(of="fronts")
    check_fields(refused.value, memo.UsageError, what="not a value of 'of'", wanted="timeline, front", hint="front")
