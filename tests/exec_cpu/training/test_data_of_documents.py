"""Data of packed documents: lines of a file, drawn lengths, and targets that end with their document."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from memo_exec.training.conversations import load_conversations
from memo_exec.training.dataset import IGNORED_LABEL, holds_documents, load_dataset
from memo_sim.contract.documents import Documents
from memo_sim.contract.errors import BadInput

DOCUMENTS = Documents(lengths=((5, 1), (9, 1)))
VOCAB = 256


def test_lines_of_text_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("abc\n\ndefgh\nij\n", encoding="utf-8")
    data = load_dataset(path, VOCAB, DOCUMENTS)
    assert bytes(data.tokens.astype(np.uint8)) == b"abcdefghij"
    assert data.ends is not None
    assert data.ends.tolist() == [3, 8, 10]
    assert load_dataset(path, VOCAB).ends is None


def test_lines_of_json_have_text_or_ids(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(
        "\n".join(json.dumps(each) for each in ({"text": "ab"}, {"input_ids": [7, 8, 9]})), encoding="utf-8"
    )
    assert holds_documents(path)
    data = load_dataset(path, VOCAB, DOCUMENTS)
    assert data.tokens.tolist() == [97, 98, 7, 8, 9]
    assert data.ends is not None
    assert data.ends.tolist() == [2, 5]


@pytest.mark.parametrize("line", ["[1]", "{}", '{"text": ""}', '{"input_ids": ["a"]}', "{", '{"input_ids": [-1]}'])
def test_lines_that_are_no_documents_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(BadInput):
        load_dataset(path, VOCAB, DOCUMENTS)


def test_the_last_token_of_a_document_has_no_target(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join("abcdefg"[: 3 + n % 4] for n in range(50)), encoding="utf-8")
    data = load_dataset(path, VOCAB, DOCUMENTS)
    assert data.ends is not None
    batch = data.batch(1, 1, 4, 32)
    for ids, labels, ends in zip(batch.ids, batch.labels, batch.documents, strict=True):
        assert ends[-1] == 32
        for place, label in enumerate(labels.tolist()):
            if place + 1 in ends[:-1]:
                assert label == IGNORED_LABEL
                assert ids[place + 1] == ord("a")
            elif place < 31:
                assert label == ids[place + 1] == ids[place] + 1


def test_documents_are_filled_up_where_ranks_cut_them(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("abcde\nfg\nhijklmnopq\n" * 9, encoding="utf-8")
    data = load_dataset(path, VOCAB, DOCUMENTS, multiple=4)
    batch = data.batch(2, 1, 6, 24)
    for ids, labels, ends in zip(batch.ids.tolist(), batch.labels.tolist(), batch.documents, strict=True):
        assert ends[-1] == 24
        for first, end in pairwise((0, *ends)):
            assert (end - first) % 4 == 0
            real = [token for token in ids[first:end] if token]
            assert bytes(real) in b"abcde fg hijklmnopq"
            assert ids[first:end] == real + [0] * (end - first - len(real))
            assert labels[first : first + len(real) - 1] == real[1:]
            assert end == 24 or set(labels[first + len(real) - 1 : end]) == {IGNORED_LABEL}


def test_conversations_are_filled_up_where_ranks_cut_them(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    line = json.dumps({"prompt_ids": [7, 8, 9], "completion_ids": [1, 2]})
    path.write_text("\n".join([line] * 5), encoding="utf-8")
    assert not holds_documents(path)
    loaded = replace(load_conversations(path, VOCAB, 24, None, 9), multiple=8)
    batch = loaded.batch(0, 1, 1, 24)
    assert batch.documents == ((8, 16, 24),)
    assert batch.ids.tolist() == [[7, 8, 9, 1, 2, 0, 0, 0] * 3]
    assert np.flatnonzero(batch.labels[0] != IGNORED_LABEL).tolist() == [2, 3, 10, 11, 18, 19]


def test_lengths_are_drawn_where_a_file_does_not_say_them(tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(200) % 50)
    data = load_dataset(path, VOCAB, DOCUMENTS)
    first, again, other = (data.batch(3, step, 2, 40).documents for step in (1, 1, 2))
    assert first == again != other
    lengths = {int(n) for ends in first for n in np.diff([0, *ends[:-1]])}
    assert lengths <= {5, 9}
    assert load_dataset(None, VOCAB, DOCUMENTS).ends is None
