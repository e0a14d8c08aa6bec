"""Documents: the histogram of a text or a file, how they fill sequences, and what MFU counts of them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from memo_sim.contract.attended_pairs import pairs_in_window
from memo_sim.contract.documents import (
    MOST_LENGTHS,
    Documents,
    attended_share,
    documents_of,
    fill,
    packed,
    parse_documents,
)
from memo_sim.contract.errors import MemoError
from memo_sim.contract.plan import Decisions
from tests.exec_cpu.small import llama
from tests.sim.small_programs import decide

OPTION = "--documents"


def test_exponential_lengths_have_the_mean_and_end_at_the_longest() -> None:
    for mean, longest in ((2048, 65536), (8192, 16384), (100, 100)):
        given = parse_documents(f"mean={mean},max={longest}", option=OPTION)
        assert given.mean == pytest.approx(mean, rel=2e-3)
        assert given.lengths[-1][0] <= longest
    assert parse_documents("mean=48k,max=64k", option=OPTION).lengths[-1][0] == 65536


def test_a_file_has_one_length_or_a_length_and_a_count_a_line(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("100\n\n 200, 3\n100\n", encoding="utf-8")
    given = parse_documents(str(path), option=OPTION)
    assert given.lengths == ((100, 2), (200, 3))
    assert str(given) == "lengths.txt"
    assert str(Documents(lengths=given.lengths)) == "2 lengths, mean 160 tokens"


def test_many_lengths_are_rounded_and_keep_their_mean() -> None:
    given = documents_of(range(1, 5000))
    assert len(given.lengths) <= MOST_LENGTHS
    assert given.mean == pytest.approx(2500, rel=1e-3)


@pytest.mark.parametrize("text", ["mean=2k", "mean=2k,max=1k", "mean=x,max=2k", "mean=2k,max=64k,least=3"])
def test_texts_that_name_no_lengths_are_refused(text: str) -> None:
    with pytest.raises(MemoError):
        parse_documents(text, option=OPTION)


@pytest.mark.parametrize("line", ["0", "-3", "12 tokens", "5,0", ""])
def test_files_without_lengths_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(MemoError):
        parse_documents(str(path), option=OPTION)


def test_sequences_are_cut_from_one_stream() -> None:
    assert list(islice(fill(iter([3, 4, 10, 1]), 8), 2)) == [(3, 4, 1), (8,)]
    assert list(islice(fill(iter([3, 5, 8]), 8, 4), 2)) == [(4, 4), (4, 4)]


def test_a_documents_pairs_are_half_of_its_square() -> None:
    given = Documents(lengths=((256, 1),))
    assert packed(given, 1024)[0] == (256,) * 4
    assert given.pairs(1024) == 4 * 256**2 / 2
    assert attended_share(given, 1024) == 1 / 4
    assert attended_share(None, 1024) == 1


def test_mfu_counts_the_pairs_that_are_attended() -> None:
    whole, parts = decide(), decide(documents=Documents(lengths=((512, 1),)))
    products = 6.0 * whole.seq_tokens * whole.model.mfu_params * whole.global_batch
    assert (parts.step_flops - products) * 4 == pytest.approx(whole.step_flops - products)


def test_mfu_counts_the_pairs_that_a_window_leaves_in_each_document() -> None:
    window = llama(window=100)
    given = Documents(lengths=((64, 1), (512, 1)))
    flops = Decisions(model=window, seq_tokens=2048, documents=given).step_flops
    pieces = packed(given, 2048)
    pairs = sum(pairs_in_window(n, n, 100) if n > 100 else n * n / 2 for each in pieces for n in each) / len(pieces)
    products = 6.0 * 2048 * window.mfu_params
    assert flops - products == pytest.approx(12 * window.layers * window.q_width * pairs)


def test_the_most_documents_leave_room_and_may_be_given() -> None:
    given = parse_documents("mean=100,max=1k,most=40", option=OPTION)
    assert given.most_pieces(2048) == 40
    own = parse_documents("mean=100,max=1k", option=OPTION)
    assert max(map(len, packed(own, 2048))) < own.most_pieces(2048) < 2048
