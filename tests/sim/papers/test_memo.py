"""MEMO's figures and tables, computed small, with the paper's findings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.figure import Point
from memo_sim.contract.units import GIB
from memo_sim.contract.validation import CaseError, CasePrediction, CaseReport, Expectation
from memo_sim.memory.device_allocator import DeviceCall
from memo_sim.memory.replay import DeviceStop, Iteration
from memo_sim.papers import memo
from memo_sim.papers.figures import figure
from memo_sim.papers.memo import TABLES, cells, layer_times, longest, published
from memo_sim.planning.question import Pins, Question
from memo_sim.validation.cases import load_cases
from memo_sim.views.published_table import published_table
from tests.refusals import refused


def test_a_longer_sequence_hides_its_offload_and_attention_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "LAYER_TOKENS", tuple(n * 65536 for n in (2, 3, 4, 8)))
    told: list[tuple[int, int]] = []
    found = figure("1b", progress=lambda done, total: told.append((done, total)))
    offload, forward, attention = ([p.y or 0.0 for p in line.points] for line in found.lines)
    assert offload[0] > forward[0]
    assert offload[-1] < forward[-1]
    assert "256k" in found.findings[0]
    shares = [a / f for a, f in zip(attention, forward, strict=True)]
    assert shares == sorted(shares)
    # Offload grows with the length, attention with its square.
    assert offload[3] / offload[2] == pytest.approx(2, rel=0.01)
    assert attention[3] / attention[2] == pytest.approx(4, rel=0.02)
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_the_allocator_reserves_more_than_is_allocated_and_requests_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    found = figure("1a", progress=lambda done, total: told.append((done, total)))
    assert "gpt-7b, 512k, tp8+sp" in found.title
    reserved, allocated = ([p.y or 0.0 for p in line.points] for line in found.lines)
    assert [line.label for line in found.lines] == ["reserved", "allocated"]
    assert len(reserved) <= memo.WINDOWS
    assert all(all_of_it >= used for all_of_it, used in zip(reserved, allocated, strict=True))
    # As in the paper: more than 4 GB reserved and not allocated at the peak, and requests of 4 GiB that fail.
    peak = allocated.index(max(allocated))
    assert reserved[peak] - allocated[peak] > 4
    assert max(reserved) <= 79.25
    assert f"{max(allocated):.1f} GiB are allocated" in found.findings[0]
    assert "4 or" in found.findings[1]
    assert "in allocation retries" in found.findings[2]
    seconds = [p.x for p in found.lines[0].points]
    assert seconds == sorted(set(seconds))
    assert told == [(1, 1)]


def test_failed_requests_are_those_that_retry() -> None:
    calls = (DeviceCall("synchronize", 0), DeviceCall("free", 6), DeviceCall("malloc", 4))
    step = Iteration(
        instants=np.array([3, 7]),
        allocated_bytes=np.array([5, 9]),
        reserved_bytes=np.array([12, 12]),
        stops=[
            DeviceStop(3, "a", (DeviceCall("malloc", 2),), 0.5, False),
            DeviceStop(7, "b", calls, 1.5, True),
        ],
    )
    # Of 12 bytes, 5 are allocated when the request of 4 fails; 9 with it.
    assert memo.failed_requests(step) == [memo.FailedRequest(requested_bytes=4, unused_bytes=7, seconds=1.5)]


def test_memory_without_retries_is_said_to_have_none() -> None:
    step = Iteration(np.array([0]), np.array([8 * GIB]), np.array([9 * GIB]))
    assert memo._fragmentation(step, 1.0) == [
        "At the highest peak, 8.0 GiB are allocated and 1.0 GiB more are reserved (MEMO: more than 4 GB).",
        "No allocation retry happens.",
    ]


def test_figure_1a_is_refused_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "_best", lambda question: None)
    with refused(Infeasible, what="megatron-lm has no plan for gpt-7b at 512k tokens"):
        figure("1a")


def test_attention_and_the_rest_are_the_whole_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "LAYER_TOKENS", (65536, 131072))
    found = figure("6")
    for point, rest in zip(found.lines[0].points, found.lines[1].points, strict=True):
        times = layer_times(round(point.x))
        assert (point.y or 0) + (rest.y or 0) == pytest.approx(1e3 * times.forward_s)


def test_the_share_of_attention_is_reported_where_it_passes_nine_tenths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = {65536: 0.5, 576 * 1024: 0.88, 768 * 1024: 0.901}
    monkeypatch.setattr(memo, "LAYER_TOKENS", tuple(shares))
    monkeypatch.setattr(memo, "layer_times", lambda tokens: memo.LayerTimes(1.0, shares[tokens], 0.0))
    assert figure("6").findings == [
        "FlashAttention's share of the forward grows from 50.0 % at 64k tokens to 90.1 % at 768k.",
        "Here it first passes 90 % at 768k tokens (88.0 % at 576k); in MEMO's paper it passes 90 % beyond 576k.",
    ]
    shares[768 * 1024] = 0.89
    assert figure("6").findings[1].startswith("Here it stays under 90 % at these lengths (88.0 % at 576k)")


@pytest.mark.parametrize("fits", [0, 1, 5, 8, 12])
def test_the_longest_is_the_last_that_fits(monkeypatch: pytest.MonkeyPatch, fits: int) -> None:
    asked: list[int] = []

    def best(question: Any) -> Any:
        asked.append(question)
        return SimpleNamespace(tokens=question) if question <= fits * 128 else None

    monkeypatch.setattr(memo, "_best", best)
    tokens, plan = longest(lambda tokens: tokens, 128, 12)  # type: ignore[arg-type, return-value]
    assert tokens == fits * 128
    assert plan == (SimpleNamespace(tokens=tokens) if fits else None)
    assert len(asked) == len(set(asked)) <= 8


def test_lengths_on_64_gpus_name_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "SYSTEMS", ("memo",))
    monkeypatch.setattr(memo, "LONG_TOKENS", (16 * 1024, 4096 * 1024))
    monkeypatch.setattr(memo, "NODES", (1,))
    monkeypatch.setattr(memo, "_question", _on_one_layout)
    found = figure("11c")
    fits, beyond = found.lines[0].points
    assert 0.25 < (fits.y or 0) < 0.5
    assert fits.note.startswith("tp8")
    assert beyond == Point(x=4096 * 1024, y=None, note="no plan fits")
    assert "1 of 2" in found.findings[0]


def _on_one_layout(system: str, seq_tokens: int, *, gpus: int) -> Question:
    cluster, hardware = load_cluster(f"a800-1x{gpus}")
    return Question(
        model=load_model("gpt-7b"),
        cluster=cluster,
        hardware=hardware,
        seq_tokens=seq_tokens,
        system=system,
        pins=Pins(tp=8, recompute="full"),
    )


def test_unknown_figures_and_tables_are_refused() -> None:
    with refused(UsageError, got="'11d'", wanted="sppo-10", hint="'11c'"):
        figure("11d")
    with refused(UsageError, got="'table6'", wanted="table3", hint="'table5'"):
        published("table6")


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_arranged_as_printed(name: str) -> None:
    cases = load_cases(TABLES[name])
    reports = [_told(case.case, case.question.system, case.expected) for case in cases]
    text = published_table(cells(cases, reports))
    lines = text.splitlines()
    wanted = {
        "table3": (["gpt-7b on a800-1x8", "4k", "8k"], "deepspeed-ulysses"),
        "table4": (["gpt-7b on a800-1x8", "64k", "128k"], "full recompute, caching allocator"),
        "table5": (["gpt-7b on a800-1x8", "0", "0.125"], "192k"),
    }[name]
    assert lines[0].split("  ")[0] == wanted[0][0]
    assert lines[0].split()[3:5] == wanted[0][1:]
    assert lines[1].startswith(wanted[1])
    assert lines[2].strip().startswith("error")
    assert set(lines[2].split()[1::2]) == {"+10.0"}
    assert ("oom" in text) == any(c.expected.status in {"gpu_oom", "host_oom"} for c in cases)


def _told(case: str, system: str, expected: Expectation) -> CaseReport:
    """Return a prediction ten per cent above what was measured."""
    mfu = None if expected.mfu is None else 1.1 * expected.mfu
    predicted = CasePrediction(status=expected.status or "ok", mfu=mfu)
    error = CaseError(status=True, mfu=None if mfu is None else 0.1)
    return CaseReport(
        case=case, source="test", system=system, predicted=predicted, expected=expected, error=error, fitted=False
    )
