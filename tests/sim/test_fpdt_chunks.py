"""FPDT's chunks of attention: what they compute is what one call computes, at the rate of shorter calls."""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.fpdt_chunks import CHUNK_TOKENS, chunks_of
from memo_sim.planning.question import Question

K = 1024


def asked(seq_tokens: int, *, nodes: int = 1, rate: float | None = None) -> tuple[Question, Decisions]:
    """Return gpt-7b under Ulysses over all devices; ``rate`` (FLOP/s): of attention, whatever its length and mask."""
    cluster, hardware = load_cluster(f"a100-{nodes}x8")
    if rate is not None:
        tables = [
            msgspec.structs.replace(table, rows=[[1024.0, 1.0, rate]], full_mask_gain=1.0)
            for table in hardware.attention
        ]
        hardware = msgspec.structs.replace(hardware, attention=tables)
    question = Question(load_model("gpt-7b"), cluster, hardware, seq_tokens, system="deepspeed-fpdt")
    layout = Layout(ulysses=8 * nodes, zero=3)
    return question, Decisions(model=question.model, layout=layout, seq_tokens=seq_tokens, recompute="full")


@pytest.mark.parametrize("seq_tokens", [512 * K, 600 * K])
def test_chunks_compute_what_one_call_computes(seq_tokens: int) -> None:
    """At one rate for every call nothing is added but its launches."""
    found = chunks_of(*asked(seq_tokens, rate=200e12))
    assert found.chunked_s == pytest.approx(found.whole_s, rel=1e-3)


def test_chunks_gain_by_calls_without_a_mask_and_lose_where_they_are_short() -> None:
    question, decisions = asked(512 * K)
    assert chunks_of(question, decisions, 512 * K).added_s == 0
    added = [chunks_of(question, decisions, n * K).added_s for n in (128, 16, 8, 4)]
    assert added == sorted(added)
    assert added[0] < 0 < added[-1]


def test_one_head_of_a_chunk_leaves_a_device_half_idle() -> None:
    """Ulysses over 32 devices leaves one head each: 64K rows of it are fewer blocks than a device wants."""
    found = chunks_of(*asked(512 * K, nodes=4))
    assert 1.05 < found.chunked_s / found.whole_s < 1.2
    assert found == chunks_of(*asked(512 * K, nodes=4), CHUNK_TOKENS)


def test_keys_come_while_the_part_before_is_computed_but_not_in_short_chunks() -> None:
    question, decisions = asked(512 * K)
    long, short = (chunks_of(question, decisions, n * K) for n in (64, 8))
    assert long.hides
    assert not short.hides
    # As many bytes a token of keys, and squares of products: an eighth of the one, a 64th of the other and more.
    assert short.fetch_s == pytest.approx(long.fetch_s / 8, rel=0.05)
    assert short.part_s > long.part_s / 64
