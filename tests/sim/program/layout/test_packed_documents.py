"""Packed documents over ranks: pairs by hand, none lost, and equal shares where every document is cut."""

from __future__ import annotations

import pytest

from memo_sim.contract.documents import Documents, parse_documents
from memo_sim.contract.plan import Layout
from memo_sim.program.layout.documents import (
    _pairs_by_rank,
    _sum_calls,
    gathered_segments,
    own_segments,
    pace_of,
    step_segments,
)
from tests.sim.small_programs import LLAMA, decide, faults_of

DOCUMENTS = parse_documents("mean=200,max=1k", option="--documents")
SMALL = Documents(lengths=((256, 1),))
"""Documents that end where the chunks of 2,048 tokens over 4 ranks do."""
LAYOUTS = {
    "one rank": Layout(),
    "tp": Layout(tp=2, sequence_parallel=True, dp=2, zero=3),
    "ring": Layout(cp=4),
    "all-gather": Layout(cp=4, cp_exchange="all_gather"),
    "ulysses": Layout(ulysses=4),
    "stages": Layout(pp=2, dp=2, cp=2, ulysses=2),
}


def pairs(segments: tuple[tuple[int, int, int], ...]) -> int:
    return sum(each for _, _, each in segments)


@pytest.mark.parametrize("name", LAYOUTS)
def test_programs_pass_the_checkers(name: str) -> None:
    fields = {"documents": DOCUMENTS, "global_batch": 4, "micro_batch": 1 if name in ("stages", "all-gather") else 2}
    assert faults_of(decide(LLAMA, LAYOUTS[name], ("tokenwise", 0.5), **fields)) == []


def test_one_rank_attends_half_of_the_squares() -> None:
    assert own_segments(decide(documents=SMALL)) == ((256, 256, 8 * 256**2 // 2),)
    assert own_segments(decide()) == ()


def test_documents_inside_a_chunk_need_no_other_rank() -> None:
    decisions = decide(LLAMA, Layout(cp=4), documents=SMALL)
    assert own_segments(decisions) == ((256, 256, 2 * 256**2 // 2),)
    assert [pairs(step_segments(decisions, step)) for step in (1, 2, 3)] == [0, 0, 0]
    assert pace_of(decisions).ranks == 1
    assert pace_of(decisions).crossing == 0


def test_one_long_document_is_as_without_documents() -> None:
    decisions = decide(LLAMA, Layout(cp=4), documents=Documents(lengths=((2048, 1),)))
    assert own_segments(decisions) == ((512, 512, 512**2 // 2),)
    assert [pairs(step_segments(decisions, step)) for step in (1, 2, 3)] == [512 * 256] * 3
    assert pairs(gathered_segments(decisions)) == 3 * 512 * 256


def test_a_ranks_calls_have_all_its_pairs() -> None:
    pieces = [(0, 700), (700, 750), (750, 1500), (1500, 2048)]
    by_rank = _pairs_by_rank(pieces, 2048, 4, "sequence")
    assert sum(by_rank) == pytest.approx(sum((end - first) ** 2 for first, end in pieces) / 2, rel=1e-3)
    for rank, whole in enumerate(by_rank):
        calls: dict = {}
        _sum_calls(calls, pieces, 2048, 4, rank, "sequence")
        found = {call: pairs(each.segments(1.0)) for call, each in calls.items()}
        assert found.pop(-1, 0) == sum(each for call, each in found.items() if call > 0)
        assert sum(found.values()) == pytest.approx(whole, rel=1e-3)


def test_cuts_of_documents_even_ranks_out_and_fill_rows_up() -> None:
    uneven = pace_of(decide(LLAMA, Layout(cp=4), documents=DOCUMENTS))
    even = pace_of(decide(LLAMA, Layout(cp=4), documents=DOCUMENTS, document_cuts="documents"))
    assert uneven.ranks > 1.1 > even.ranks == 1
    assert 0 < even.filled < 8 / DOCUMENTS.mean
    assert uneven.filled == 0


def test_the_slowest_replica_sets_the_pace() -> None:
    alone = decide(documents=DOCUMENTS, global_batch=4)
    several = decide(layout=Layout(dp=4), documents=DOCUMENTS, global_batch=16)
    assert pace_of(alone).replicas == 1 < pace_of(several).replicas
    assert pairs(own_segments(several)) > pairs(own_segments(alone))
