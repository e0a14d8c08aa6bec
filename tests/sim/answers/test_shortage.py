"""Why a run is out of memory: what fills it at the peak, and single changes with the price of a fresh what-if."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from memo_sim.answers.shortage import shortage
from memo_sim.answers.what_if import what_if
from memo_sim.contract.shortage import Shortage
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.search import play, search
from memo_sim.reasons.remedies import both, changes, evaluated
from memo_sim.views.shortage_table import in_words, shortage_text
from tests.sim.answers.test_more_memory import GIB, ask
from tests.sim.planning.test_search import question


@pytest.fixture(scope="module")
def asked() -> Question:
    return ask(30, recompute="none", alpha=0.0)


@pytest.fixture(scope="module")
def found(asked: Question) -> Shortage:
    return shortage(asked)


def test_the_run_that_was_asked_for_is_explained_though_another_plan_fits(asked: Question, found: Shortage) -> None:
    assert not found.fits
    assert (found.candidates, found.status, found.decisions.recompute) == (1, "gpu_oom", "none")
    assert found.needed_bytes - found.capacity_bytes == found.shortfall_bytes > 0
    assert found.capacity_bytes == 30 * GIB
    prediction = play(asked, found.decisions).prediction
    assert found.by_class == prediction.peak_by_class
    assert sum(found.by_class.values()) + sum(found.reserve.values()) == found.needed_bytes


def test_the_named_tensors_are_those_of_the_peak(found: Shortage) -> None:
    assert [t.bytes for t in found.tensors] == sorted((t.bytes for t in found.tensors), reverse=True)
    skeletal = sum(t.bytes for t in found.tensors if t.buffer_class == "skeletal")
    assert 0.9 * found.by_class["skeletal"] < skeletal <= found.by_class["skeletal"]


def test_every_way_out_fits_and_the_fastest_is_first(found: Shortage) -> None:
    steps = [way.step_s for way in found.ways]
    assert len(steps) >= 2
    assert None not in steps
    assert steps == sorted(steps)
    assert all(way.needed_bytes <= found.capacity_bytes for way in found.ways)
    assert all(way.shortfall_bytes < found.shortfall_bytes for way in found.too_little)
    assert found.tried >= len(found.ways) + len(found.too_little)


def test_a_way_out_costs_what_a_fresh_what_if_with_its_options_says(asked: Question, found: Shortage) -> None:
    way = next(way for way in found.ways if way.knob == "recompute" and "full" in way.options)
    assert way.leave_out == ["--alpha"]
    fresh = what_if(replace(asked, pins=Pins(tp=2, recompute="full"))).result.best
    assert fresh is not None
    assert way.step_s == fresh.step_s


def test_a_run_that_fits_says_what_stays_free() -> None:
    found = shortage(ask(80, recompute="none", alpha=0.0))
    assert found.fits
    assert found.needed_bytes + found.free_bytes == found.capacity_bytes
    assert (found.ways, found.shortfall_bytes, found.tried) == ([], 0, 0)
    assert "the run fits" in shortage_text(found)


def test_host_memory_that_is_short_is_explained_by_the_host() -> None:
    found = shortage(ask(80, 4, recompute="none", alpha=1.0))
    assert (found.memory, found.status) == ("host", "host_oom")
    assert sum(found.by_class.values()) == found.needed_bytes
    assert found.reserve == {}
    assert "of a node's host memory" in shortage_text(found)


def test_cached_memory_counts_what_the_allocator_holds() -> None:
    found = shortage(ask(80, recompute="full", memory_policy="caching"))
    assert found.fits
    live = sum(found.by_class.values()) + sum(found.reserve.values())
    assert found.needed_bytes > live
    assert "held by PyTorch's allocator, not in use" in shortage_text(found)


def test_a_default_batch_is_typed_with_every_way_out(asked: Question) -> None:
    found = shortage(replace(asked, batch_rule="not given"))
    assert {way.options.rpartition(" --")[2] for way in found.ways} == {"global-batch 1"}
    assert "global batch 1: the run does not fit" in shortage_text(found)


def test_the_text_names_the_peak_and_the_options(found: Shortage) -> None:
    text = shortage_text(found)
    assert "the run does not fit (keep on tp2+sp cp1 dp1)" in text.splitlines()[0]
    assert found.ways[0].options in text
    assert "output of the MLP's activation" in text
    assert in_words("m0/s0/l3/bwd/ffn_up.dgrad") == "in backward of layer 3 (m0/s0/l3/bwd/ffn_up.dgrad)"
    assert in_words("stage1: m0/s0/head/fwd/x") == "in the head with the loss (stage1: m0/s0/head/fwd/x)"


@pytest.mark.slow
def test_where_no_single_change_is_enough_the_nearest_is_shown() -> None:
    asked = question(1024, system="full-swap")
    cluster, hardware = with_memory(asked.cluster, asked.hardware, device_bytes=GIB, host_bytes=None)
    found = shortage(replace(asked, cluster=cluster, hardware=hardware))
    assert found.ways == []
    text = shortage_text(found)
    assert "No single change makes it fit" in text
    assert "memo-sim longest" in text


def needs_two_changes() -> Question:
    asked = ask(10, seq_tokens=1 << 16, recompute="none", alpha=0.0)
    return replace(asked, model=msgspec.structs.replace(asked.model, layers=2))


def test_two_changes_make_a_run_fit_that_neither_makes_fit_alone() -> None:
    asked = needs_two_changes()
    plan = search(asked).ranked[0].decisions
    known = {change.options: change for change in changes(asked, plan)}
    full, host = (
        (known[options], evaluated(known[options], plan)) for options in ("--recompute full", "--states host")
    )
    assert full[1] is not None
    assert host[1] is not None
    assert {full[1].prediction.status, host[1].prediction.status} == {"gpu_oom"}
    (change,) = both(asked, full, host)
    assert change.options == "--states host --recompute full"
    found = evaluated(change, plan)
    assert found is not None
    assert found.prediction.status == "ok"
    assert (found.decisions.states, found.decisions.recompute) == ("host", "full")
    assert both(asked, full, full) == []


@pytest.mark.slow
def test_pairs_are_listed_where_no_single_change_is_enough() -> None:
    asked = needs_two_changes()
    found = shortage(asked)
    assert (found.ways, len(found.pairs)) == ([], 2)
    assert found.pairs_tried <= 15
    way = next(way for way in found.pairs if way.options == "--states host --recompute rowwise")
    assert (way.knob, way.leave_out) == ("states, recompute", ["--alpha"])
    fresh = what_if(replace(asked, states="host", pins=Pins(tp=2, recompute="rowwise"))).result.best
    assert fresh is not None
    assert way.step_s == fresh.step_s
    text = shortage_text(found)
    assert "Ways out, two changes each" in text
    assert "the optimizer runs on the host's cores" in text


def test_near_changes_double_degrees_and_others_go_further() -> None:
    asked = replace(question(1024, system="any"), pins=Pins(tp=1, cp=8, recompute="full"))
    plan = search(asked).ranked[0].decisions
    near, far = ({c.options for c in changes(asked, plan, near=n)} for n in (True, False))
    assert "--tp 2 --cp 4" in near
    assert "--tp 4 --cp 2" not in near
    assert "--tp 4 --cp 2" in far
    change = next(c for c in changes(asked, plan) if c.options == "--tp 4 --cp 2")
    one = evaluated(change, plan)
    assert one is not None
    layout = one.decisions.layout
    assert (layout.tp, layout.cp, layout.sequence_parallel) == (4, 2, True)
