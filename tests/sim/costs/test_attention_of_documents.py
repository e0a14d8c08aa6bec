"""Prices of attention over packed documents: as one document's where it is alone, and by length where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memo_sim.contract.attended_pairs import pairs_in_window
from memo_sim.contract.catalog import load_cluster
from memo_sim.costs.attention import AttentionRates, of_year
from memo_sim.program.ir.work import Attention, WindowedAttention

TOKENS = 32768
WHOLE = Attention(1, TOKENS, TOKENS, "causal", 32, 8, 128, backward=False, kernel="flash3", dtype="bf16")


@pytest.fixture(scope="module")
def rates() -> AttentionRates:
    _, hardware = load_cluster("h100-1x8")
    return AttentionRates(of_year(hardware.attention, hardware.eager_libraries), wave_tokens=128 * 128)


def of(length: int, *, backward: bool = False) -> Attention:
    return replace(WHOLE, backward=backward, segments=((length, length, TOKENS * length // 2),))


@pytest.mark.parametrize("backward", [False, True])
def test_one_document_costs_what_its_sequence_costs(rates: AttentionRates, backward: bool) -> None:
    whole = replace(WHOLE, backward=backward)
    assert of(TOKENS, backward=backward).flops == whole.flops
    assert rates.seconds(of(TOKENS, backward=backward), set()) == pytest.approx(rates.seconds(whole, set()))


def test_shorter_documents_take_less_time_at_lower_rates(rates: AttentionRates) -> None:
    works = [of(length) for length in (8192, 2048, 512, 256, 64)]
    seconds = [rates.seconds(work, set()) for work in works]
    assert seconds == sorted(seconds, reverse=True)
    speeds = [work.flops / taken for work, taken in zip(works, seconds, strict=True)]
    assert speeds == sorted(speeds, reverse=True)
    assert seconds[-1] > seconds[-2] / 2  # of a tile, 64 tokens fill a part


def test_documents_shorter_than_measured_are_marked(rates: AttentionRates) -> None:
    outside: set[str] = set()
    rates.seconds(of(2048), outside)
    assert not outside
    rates.seconds(of(128), outside)
    assert outside == {"attention.flash3.bf16.forward"}


def test_no_pairs_take_no_time_beyond_the_launch(rates: AttentionRates) -> None:
    assert rates.seconds(replace(WHOLE, segments=((1, 1, 0),)), set()) == 0


def test_a_window_costs_documents_what_it_leaves_of_them(rates: AttentionRates) -> None:
    named = {name: getattr(WHOLE, name) for name in WHOLE.__slots__}
    sequence = WindowedAttention(**named, window=1024)
    alone = replace(sequence, segments=((TOKENS, TOKENS, pairs_in_window(TOKENS, TOKENS, 1024)),))
    assert alone.flops == sequence.flops
    assert rates.seconds(alone, set()) == pytest.approx(rates.seconds(sequence, set()), rel=0.01)
    pairs = TOKENS // 512 * pairs_in_window(512, 512, 1024)
    shorter = replace(sequence, segments=((512, 512, pairs),))
    assert rates.seconds(shorter, set()) < rates.seconds(alone, set())
