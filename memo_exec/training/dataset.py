"""Draws token sequences from one file: the same ones for the same (seed, step) on every machine.

The suffix decides how the file is read:

    .npy          a one-dimensional numpy array of integers
    .bin          raw little-endian token ids: uint16, or uint32 for vocabularies above 65,536
    .ids          decimal integers, separated by white space
    anything else text: its bytes are the tokens, which needs a vocabulary of at least 256

The file is one document. A sequence is a window of the file at a random start. Its labels are the next tokens, so a
window has one token more than the sequence. A shorter file is padded, and the loss ignores the padding.

A plan with packed documents needs to know where they end. Its windows are the same, and their documents are

    .jsonl                   lines: objects with a ``text``, whose bytes are the tokens, or ``input_ids``
    anything read as text    lines; the included text, as below
    .npy, .bin, .ids         lengths drawn from the plan's histogram, from the seed and the step

Where ranks cut every document, its rows are filled up to a multiple, and drawn lengths are rounded up to one.

The last token of a document has no target. The piece of a document that a window cuts off at its end has one more.
"""

from __future__ import annotations

import hashlib
import tokenize
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from memo_exec.kernels.call import Ends
from memo_sim.contract.documents import Documents, fill
from memo_sim.contract.errors import BadInput
from memo_sim.contract.files import check_regular, read_regular
from memo_sim.contract.units import format_percent

TEXT_VOCAB = 256
BINARY = (".npy", ".bin", ".ids")
"""Suffixes of files with token ids, which do not say where documents end."""
IGNORED_LABEL = -100
"""Label of a token without a target (padding). It gives no loss and no gradient and does not count as a target."""

BAD_HEADER = (EOFError, SyntaxError, TypeError, KeyError, RecursionError, tokenize.TokenError)
"""What numpy raises for a header that it cannot read, besides ValueError."""

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Token ids and labels of one global batch, each (sequences, tokens)."""

    ids: Ids
    labels: Ids
    documents: Ends = ()
    """Where the documents of each sequence end; empty where a sequence is one document."""
    rollout: NDArray[np.float32] | None = None
    """A policy's numbers, (sequences, tokens, 3): advantage, and log-probabilities when drawn and by the reference."""


@dataclass(frozen=True)
class Dataset:
    """The tokens of a file and the windows drawn from it."""

    path: Path
    tokens: NDArray[Any]
    documents: Documents | None = None
    """The lengths that the plan packs; None: a sequence is one document."""
    ends: Ids | None = None
    """Where the documents of the file end, in tokens; None: their lengths are drawn."""
    multiple: int = 1
    """What the rows of a document are a multiple of, where ranks cut every document."""

    @cached_property
    def sha256(self) -> str:
        """Hash of the file; a checkpoint pins it."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def short_of(self, seq_tokens: int) -> str:
        """Return a warning for a file that is shorter than one sequence; "" for any other."""
        targets = len(self.tokens) - 1
        if targets >= seq_tokens:
            return ""
        return (
            f"{self.path} has {len(self.tokens)} tokens, too few for a sequence of {seq_tokens} tokens: the rest is "
            f"padding, and {format_percent(targets / seq_tokens, 2)} of the targets count"
        )

    def batch(self, seed: int, step: int, sequences: int, seq_tokens: int) -> Batch:
        """Return the global batch of one step. It depends only on the arguments and the file."""
        positions = max(len(self.tokens) - seq_tokens, 1)
        starts = np.random.default_rng([seed, step]).integers(0, positions, size=sequences)
        ids = np.zeros((sequences, seq_tokens), dtype=np.int64)
        labels = np.full((sequences, seq_tokens), IGNORED_LABEL, dtype=np.int64)
        for row, start in enumerate(starts):
            window = np.asarray(self.tokens[start : start + seq_tokens + 1], dtype=np.int64)
            ids[row, : min(len(window), seq_tokens)] = window[:seq_tokens]
            labels[row, : len(window) - 1] = window[1:]
        if self.documents is None:
            return Batch(ids, labels)
        if self.ends is not None and self.multiple > 1:
            return self._filled_up(starts.tolist(), seq_tokens)
        ends = tuple(
            self._drawn(f"{seed}:{step}:{row}", seq_tokens) if self.ends is None else self._within(start, seq_tokens)
            for row, start in enumerate(starts.tolist())
        )
        for row, own in enumerate(ends):
            labels[row, [end - 1 for end in own[:-1]]] = IGNORED_LABEL
            if self.ends is not None and np.isin(starts[row] + seq_tokens, self.ends):
                labels[row, -1] = IGNORED_LABEL
        return Batch(ids, labels, ends)

    def _drawn(self, seed: str, seq_tokens: int) -> tuple[int, ...]:
        """Return where documents of drawn lengths end in a sequence."""
        assert self.documents is not None
        return tuple(accumulate(next(fill(self.documents.draw(Random(seed)), seq_tokens, self.multiple))))

    def _filled_up(self, starts: list[int], seq_tokens: int) -> Batch:
        """Return sequences whose documents are filled up to a multiple of rows, without targets in the added rows."""
        assert self.ends is not None
        ids = np.zeros((len(starts), seq_tokens), dtype=np.int64)
        labels = np.full((len(starts), seq_tokens), IGNORED_LABEL, dtype=np.int64)
        every = []
        for row, start in enumerate(starts):
            at, ends = start, [0]
            while ends[-1] < seq_tokens and at < len(self.tokens):
                end = int(self.ends[np.searchsorted(self.ends, at + 1)])
                taken, first = min(end - at, seq_tokens - ends[-1]), ends[-1]
                piece = np.asarray(self.tokens[at : min(end, at + taken + 1)], dtype=np.int64)
                ids[row, first : first + taken] = piece[:taken]
                labels[row, first : first + len(piece) - 1] = piece[1:]
                ends.append(first + -(-taken // self.multiple) * self.multiple)
                at += taken
            every.append((*ends[1:-1], seq_tokens))
        return Batch(ids, labels, tuple(every))

    def _within(self, start: int, seq_tokens: int) -> tuple[int, ...]:
        """Return where the file's documents end in a window from ``start`` on; padding counts as one."""
        assert self.ends is not None
        low, high = np.searchsorted(self.ends, [start + 1, start + seq_tokens])
        return (*(self.ends[low:high] - start).tolist(), seq_tokens)


def load_dataset(
    path: str | Path | None, vocab: int, documents: Documents | None = None, *, multiple: int = 1
) -> Dataset:
    """Return the tokens of ``path``, or those of the included text when it is None.

    ``documents``: the lengths of documents that the plan packs, if it packs any. ``multiple``: what their rows are a
    multiple of.

    Raises:
        BadInput: when the file cannot be read, has fewer than two tokens, or has ids outside the vocabulary.
    """
    file = Path(path) if path is not None else Path(str(files("memo_exec").joinpath("data", "shakespeare.txt")))
    size = check_regular(file)
    lines = documents is not None and path is not None and file.suffix.lower() not in BINARY
    ends = None
    try:
        if lines:
            tokens, ends = _read_lines(file, vocab)
        else:
            tokens = _read(file, size, vocab)
    except (OSError, ValueError, OverflowError, *BAD_HEADER) as error:
        raise BadInput("the token ids cannot be read", where=str(file), got=str(error)) from None
    if len(tokens) < 2:
        raise BadInput(
            "the file has too few tokens to train on", where=str(file), got=len(tokens), wanted="at least 2 tokens"
        )
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= vocab:
        raise BadInput(
            "the file has a token id outside the model's vocabulary",
            where=str(file),
            got=least if least < 0 else most,
            wanted=f"0 to {vocab - 1}",
            hint="check that the file was made with this model's tokenizer",
        )
    return Dataset(file, tokens, documents, ends, multiple)


def holds_documents(path: Path) -> bool:
    """Return whether a file's first line is a document of JSON: an object with a ``text`` or with ``input_ids``."""
    if path.suffix.lower() != ".jsonl":
        return False
    check_regular(path)
    line = next((line for line in read_regular(path).splitlines() if line.strip()), b"")
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return isinstance(found, dict) and bool({"text", "input_ids"} & found.keys())


def _read(file: Path, size: int, vocab: int) -> NDArray[Any]:
    """Return the tokens in ``file``, which has ``size`` bytes; .npy and .bin files are memory-mapped."""
    suffix = file.suffix.lower()
    if suffix == ".npy":
        # open_memmap reads nothing but arrays: numpy.load would also open a zip or a pickle of that name
        return _one_dimensional(np.lib.format.open_memmap(file, mode="r"))
    if suffix == ".bin":
        dtype = np.dtype("<u2" if vocab <= 2**16 else "<u4")
        if size % dtype.itemsize:
            raise ValueError(f"{size} bytes are not a multiple of {dtype.itemsize} ({dtype.name})")
        return np.memmap(file, dtype=dtype, mode="r") if size else np.array([], dtype=dtype)
    if suffix == ".ids":
        return np.array(read_regular(file).split(), dtype=np.int64)
    _check_bytes(file, vocab)
    return np.frombuffer(read_regular(file), dtype=np.uint8)


def _check_bytes(file: Path, vocab: int, most: int = TEXT_VOCAB) -> None:
    """Refuse text for a vocabulary that has fewer tokens than a byte has values; ``most``: the largest token, if known.

    Raises:
        BadInput: saying which files hold token ids.
    """
    if vocab < TEXT_VOCAB <= most:
        raise BadInput(
            "the file is read as text, but the model's vocabulary has fewer tokens than a byte has values",
            where=str(file),
            got=f"a vocabulary of {vocab}",
            wanted=f"at least {TEXT_VOCAB}",
            hint="give a file with token ids: .npy, .bin or .ids",
        )


def _read_lines(file: Path, vocab: int) -> tuple[NDArray[Any], Ids]:
    """Return the tokens of a file with one document a line, and where each document ends."""
    parsed = file.suffix.lower() == ".jsonl"
    found = [
        _tokens_of(line, file, number, parsed=parsed)
        for number, line in enumerate(read_regular(file).splitlines(), 1)
        if line.strip()
    ]
    if not found:
        return np.array([], dtype=np.int64), np.array([], dtype=np.int64)
    tokens = np.concatenate(found)
    _check_bytes(file, vocab, most=int(tokens.max(initial=0)))
    return tokens, np.cumsum([len(each) for each in found])


def _tokens_of(line: bytes, file: Path, number: int, *, parsed: bool) -> Ids:
    """Return the tokens of one document; ``parsed``: the line is an object of JSON."""
    text: Any = line
    if parsed:
        try:
            text = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            text = None
        if isinstance(text, dict):
            ids = text.get("input_ids")
            if isinstance(ids, list) and ids and all(isinstance(n, int) and 0 <= n < 2**31 for n in ids):
                return np.array(ids, dtype=np.int64)
            text = text["text"].encode("utf-8", "replace") if isinstance(text.get("text"), str) else None
    if not isinstance(text, bytes) or not text:
        raise BadInput(
            "a line is no document",
            where=f"{file}: line {number}",
            got=repr(line[:80]),
            wanted='an object with a "text", or with "input_ids"',
        )
    return np.frombuffer(text, dtype=np.uint8).astype(np.int64)


def _one_dimensional(tokens: NDArray[Any]) -> NDArray[Any]:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"the array has dtype {tokens.dtype} and {tokens.ndim} dimensions, wanted integers and 1 dimension"
        )
    return tokens
