"""METP compared with its rivals: which layout is faster, what memory each needs, and where the time goes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.units import format_bytes
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.search import play, search
from memo_sim.reasons.metp import RIVALS, _beside, _seconds, metp, rival


def ask(seq_tokens: int, *, system: str = "any", device_gib: float | None = None, **pins: object) -> Question:
    """Two layers of gpt-7b on four A100, nothing recomputed or swapped unless said otherwise."""
    size = None if device_gib is None else int(device_gib * 2**30)
    cluster, hardware = with_memory(*load_cluster("a100-1x4"), device_bytes=size, host_bytes=None)
    model = structs.replace(load_model("gpt-7b"), layers=2)
    chosen = Pins(**{"recompute": "none", "alpha": 0.0, **pins})  # type: ignore[arg-type]
    return Question(model, cluster, hardware, seq_tokens, system=system, pins=chosen)


def said(question: Question) -> list[str]:
    found = search(question, keep=3)
    assert found.best is not None
    return metp(question, found, play(question, found.best.decisions))


def test_with_short_sequences_metp_is_slower_because_of_small_tiles() -> None:
    beside, why = said(ask(8192, metp=4))
    assert beside.startswith("METP 4 is slower than every rival: ")
    assert [name in beside for name in ("; cp 4 ", "; Ulysses 4 ", ", tp 4 ")] == [True] * 3
    assert beside.count("% faster with keep") == 3
    assert "METP's attention kernels take " in why
    assert "longer" in why.partition(": ")[2].partition(",")[0]
    assert "METP has 8 heads and 2k tokens, its matrix products have 1/4 of the features" in why


def test_with_little_memory_only_metp_fits() -> None:
    (beside,) = said(ask(65536, metp=4, device_gib=9.5))
    assert beside.startswith("METP 4 is faster than every rival that fits: ")
    assert beside.count("does not fit, short by ") == len(RIVALS)


def test_an_equally_fast_plan_with_less_device_memory_is_named() -> None:
    """Keep and full swap are equally fast; the search prefers keep, which needs no host memory."""
    question = ask(65536, metp=4, zero=1, alpha=None)
    question = replace(question, model=structs.replace(question.model, layers=4))
    ranked = search(question, keep=2).ranked
    keep, swap = (next(e for e in ranked if e.policy.label == label) for label in ("keep", "full swap"))
    assert ranked[0] is keep
    assert keep.prediction.step_s is not None
    assert keep.prediction.step_s <= (swap.prediction.step_s or 0.0) <= 1.005 * keep.prediction.step_s
    least = swap.prediction.peak_device_bytes
    assert least < keep.prediction.peak_device_bytes
    beside = _beside(ranked, {"tp": []})
    assert (
        f"(as little as {format_bytes(least)} with full swap, within 0.5 % of that time). On the same ranks, tp 4 "
        in beside
    )


def test_a_plan_with_the_least_memory_names_no_other() -> None:
    assert "as little as" not in said(ask(8192, metp=4, zero=1))[0]


def test_rivals_have_the_same_ranks_and_the_same_choices() -> None:
    question = ask(8192, metp=2, dp=2)
    question = replace(question, global_batch=2)
    layout = search(question).ranked[0].decisions.layout
    for degree in RIVALS:
        theirs = rival(question, layout, degree)[0].decisions
        assert (getattr(theirs.layout, degree), theirs.layout.dp, theirs.layout.metp) == (2, 2, 1)
        assert (theirs.recompute, theirs.swapped_tokens) == ("none", 0)


def test_rivals_are_those_that_the_system_allows() -> None:
    beside = said(ask(8192, system="memo", metp=4, alpha=None, recompute=None))[0]
    assert "tp 4" in beside
    assert "Ulysses" not in beside


def test_no_sentence_without_a_question_about_metp() -> None:
    assert said(ask(8192, tp=4)) == []
    assert said(ask(8192, metp=1, tp=4)) == []


def test_beside_other_layouts_rivals_are_compared_where_metp_has_the_best_plan() -> None:
    assert said(ask(8192, system="every-layout")) == []
    (beside,) = said(ask(65536, system="every-layout", device_gib=9.5))
    assert beside.startswith("METP 4 is faster than every rival that fits: ")
    pinned = said(ask(8192, system="every-layout", metp=4))
    assert pinned[0].startswith("METP 4 is slower than every rival: ")


def test_kinds_of_time_add_up_to_the_step() -> None:
    question = ask(8192, metp=4)
    best = search(question).best
    assert best is not None
    seconds = _seconds(play(question, best.decisions))
    assert sum(seconds.values()) == pytest.approx(best.prediction.step_s, rel=1e-12)
    assert all(value > 0 for value in seconds.values())
