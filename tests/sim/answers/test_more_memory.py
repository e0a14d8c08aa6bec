"""What one more GiB gains, the Pareto front, tied plans, and options that make a plan fit."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import pytest

from memo_sim.answers.longest import longest
from memo_sim.answers.more_memory import with_one_more_gib, with_what_more_buys, with_what_more_holds
from memo_sim.answers.what_if import what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.planning.outcome import Evaluated, SearchResult
from memo_sim.planning.presets import FULL_SWAP, KEEP
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.search import search
from memo_sim.reasons.runner_up import ties

GIB = 2**30


def ask(device_gib: float, host_gib: float = 2000, *, seq_tokens: int = 1 << 17, **pins: object) -> Question:
    cluster, hardware = load_cluster("a800-1x8")
    sizes = {"device_bytes": int(device_gib * GIB), "host_bytes": int(host_gib * GIB)}
    cluster, hardware = with_memory(cluster, hardware, **sizes)
    cluster = msgspec.structs.replace(cluster, devices_per_node=2)
    model = msgspec.structs.replace(load_model("gpt-7b"), layers=4)
    return Question(model, cluster, hardware, seq_tokens, system="any", pins=Pins(tp=2, **pins))


def test_a_gib_that_lets_a_faster_plan_fit_is_reported_with_the_time_saved() -> None:
    # The full swap needs 32.04 GiB of host memory, which one more GiB provides.
    asked = ask(34, 31.5)
    answer = with_what_more_buys(asked, what_if(asked))
    device, host = answer.result.more_memory
    assert (device.space, host.space) == ("device", "host")
    again = search(with_one_more_gib(asked, "host")).best
    assert again is not None
    assert host.saved_s == pytest.approx(answer.result.best.step_s - again.prediction.step_s)
    assert host.best.step_s == again.prediction.step_s
    assert host.saved_s > 0
    assert re.match(r"One more GiB of each node's host memory makes the step .* shorter", host.text)


def test_a_gib_that_is_not_needed_gains_nothing() -> None:
    asked = ask(80)
    answer = with_what_more_buys(asked, what_if(asked))
    assert [m.saved_s for m in answer.result.more_memory] == [0.0, 0.0]
    assert all("gains nothing" in m.text for m in answer.result.more_memory)


def test_a_gib_that_makes_the_first_plan_fit() -> None:
    short = search(ask(10)).ranked[0].prediction
    assert short.shortfall_bytes > GIB
    asked = ask(10 + short.shortfall_bytes / GIB - 0.5)
    answer = with_what_more_buys(asked, what_if(asked))
    assert answer.result.best is None
    device, host = answer.result.more_memory
    assert device.best is not None
    assert host.best is None
    assert "lets full recompute, inputs swapped, MLP in blocks, attention in chunks on" in device.text


@pytest.mark.slow
def test_the_longest_sequence_grows_with_device_memory() -> None:
    asked, step = ask(20, recompute="full"), 1 << 14
    found = with_what_more_holds(asked, longest(asked, step_tokens=step), step_tokens=step, most_step_s=None)
    device, host = found.document.more_memory
    assert device.seq_tokens > found.document.seq_tokens == host.seq_tokens
    assert "more tokens fit, in steps of 16k" in device.text


@pytest.mark.slow
def test_the_front_is_complete_when_it_is_asked_for() -> None:
    short, whole = what_if(ask(80)).result, what_if(ask(80), pareto=True).result
    assert not short.front_is_whole
    assert whole.front_is_whole
    assert len(whole.front) >= len(short.front) > 0
    assert whole.front[0].step_s == pytest.approx(min(p.step_s for p in whole.front), rel=1e-12)
    assert len({(p.step_s, p.peak_device_bytes, p.peak_host_bytes_per_node) for p in whole.front}) == len(whole.front)
    eighths = "the fastest alpha and every eighth"
    assert any(eighths in line for line in whole.why)
    assert not any(eighths in line for line in short.why)
    pinned = what_if(ask(80, recompute="full", alpha=0.0), pareto=True).result
    assert pinned.front_is_whole
    assert not any(eighths in line for line in pinned.why)


def evaluated(policy: object, step_s: float, *, device: int, host: int) -> Evaluated:
    decisions = Decisions(model=load_model("gpt-7b"), seq_tokens=4096)
    prediction = Prediction(
        status="ok", step_s=step_s, peak_device_bytes=device * GIB, peak_host_bytes_per_node=host * GIB
    )
    return Evaluated(policy, decisions, prediction)


def test_tied_plans_are_listed_with_their_differences() -> None:
    best, near = evaluated(KEEP, 10.0, device=50, host=0), evaluated(FULL_SWAP, 10.04, device=20, host=100)
    far = evaluated(FULL_SWAP, 10.06, device=20, host=100)
    (line,) = ties(SearchResult([best, near, far], 3, 0))
    assert "full swap" in line
    assert "0.40 % slower, 30.00 GiB less device memory, 100.00 GiB more host memory per node" in line
    assert "ranked by step time" in line
    assert ties(SearchResult([best, far], 2, 0)) == []
    (line,) = ties(SearchResult([best, evaluated(FULL_SWAP, 10.0, device=20, host=100)], 2, 0))
    assert "ranked by least host memory, then least device memory" in line


def test_equal_step_times_are_ordered_by_host_memory_then_device_memory() -> None:
    plans = [evaluated(KEEP, 1.0, device=d, host=h) for d, h in ((2, 1), (1, 1), (9, 0))]
    assert sorted(plans, key=lambda e: e.rank_key) == [plans[2], plans[1], plans[0]]


def test_options_that_would_help_are_tried() -> None:
    asked = replace(ask(12, recompute="full"), states="fp32")
    answer = what_if(asked).result
    assert answer.best is None
    (line,) = [line for line in answer.why if line.startswith("What would help")]
    for states in ("bf16", "host"):
        fits = what_if(replace(asked, states=states)).result.best is not None
        assert (f"--states {states};" in line or f"--states {states}." in line) == fits
