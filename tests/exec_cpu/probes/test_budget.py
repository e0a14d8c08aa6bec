"""A calibration's budget counts from the start of the process, and parts that begin late are cut."""

import os
import statistics
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from memo_exec.probes import collectives, timing
from memo_exec.probes.budget import Budget, launched_s, process_age_s
from memo_exec.probes.ranks import Ranks
from memo_exec.probes.timing import Effort, Sample, time_call


def test_shares_count_what_has_passed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    budget = Budget(60.0, spent_s=6.0)
    assert budget.until(0.5) == 124.0
    assert not budget.over(0.5)
    now[0] = 124.5
    assert budget.over(0.5)
    assert not budget.over(1.0)


def test_the_start_of_the_process_counts(tmp_path: Path) -> None:
    started = time.clock_gettime(time.CLOCK_BOOTTIME) - 5.0
    fields = " ".join(["S", *["0"] * 18, str(round(started * os.sysconf("SC_CLK_TCK"))), "0"])
    (tmp_path / "stat").write_text(f"17 (a name) of two words) {fields}")
    assert process_age_s(tmp_path / "stat") == pytest.approx(5.0, abs=1.0)
    assert process_age_s(tmp_path / "none") == 0.0
    (tmp_path / "stat").write_text("17 (short) S 0")
    assert process_age_s(tmp_path / "stat") == 0.0
    assert 0 < launched_s() < 86400


@pytest.mark.parametrize(("over", "measured"), [(True, [4, 16]), (False, [4, 8, 16])])
def test_collectives_are_measured_at_the_ends_when_time_is_short(
    monkeypatch: pytest.MonkeyPatch, over: bool, measured: list[int]
) -> None:
    sizes: list[int] = []
    ranks = Ranks(0, 1, torch.device("cpu"))
    monkeypatch.setattr(ranks, "group", lambda count: SimpleNamespace())
    monkeypatch.setattr(collectives, "group_sizes", lambda world: [1])
    monkeypatch.setattr(collectives, "KINDS", ("all_reduce",))
    monkeypatch.setattr(collectives, "call_of", lambda kind, ranks, count, size, group: sizes.append(size))
    monkeypatch.setattr(collectives, "time_handed_calls", lambda *given: Sample(1.0, 0.0))
    monkeypatch.setattr(collectives, "table_of", lambda kind, count, found, source: cast("object", sorted(found)))
    tables, _ = collectives.measure(
        ranks, [4, 8, 16], 0.1, "x", outside=lambda: 0, told=lambda text: None, over=lambda: over
    )
    assert sizes == measured
    assert tables == [measured]


def test_a_call_on_a_cpu_is_timed_from_the_arrival_of_the_last_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank arrives when half of each call has passed, so half of each duration counts."""
    ranks, threads = Ranks(0, 1, torch.device("cpu")), set()
    given: list[list[float]] = []

    def halves(durations: list[float], group: object) -> list[float]:
        given.append(durations)
        return [duration / 2 for duration in durations]

    monkeypatch.setattr(ranks, "shortest", halves)

    def call() -> None:
        threads.add(threading.current_thread().name)
        time.sleep(0.002)

    sample = collectives.time_handed_calls(ranks, call, cast("collectives.Group", None), 0.0)
    assert [len(durations) for durations in given] == [collectives.FEWEST_CALLS]
    assert min(given[0]) >= 0.002
    assert sample.seconds == pytest.approx(statistics.median(given[0]) / 2)
    assert len(threads) == 1
    assert threads != {threading.current_thread().name}


@pytest.mark.parametrize(("call_s", "calls"), [(2 * timing.LONG_S, 1), (timing.LONG_S / 2, 2)])
def test_one_long_call_is_enough_when_time_is_short(monkeypatch: pytest.MonkeyPatch, call_s: float, calls: int) -> None:
    now, made = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call(i: int) -> None:
        made.append(i)
        now[0] += call_s

    hurried = Effort(repeats=1, seconds=0.0, most=1, patience_s=0.0)
    assert time_call(call, torch.device("cpu"), hurried).seconds == pytest.approx(call_s)
    assert len(made) == calls
    assert set(made) == {0}  # so one set of operands is enough
