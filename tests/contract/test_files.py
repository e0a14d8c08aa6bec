"""Tests that files which are no ordinary files, and numbers beyond all bounds, are refused with their place."""

import os
import re
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from memo_sim.contract import codec, files
from memo_sim.contract.errors import BadInput
from memo_sim.contract.hardware import Curve
from memo_sim.contract.plan import Kernels
from memo_sim.contract.trace import MemoryCurve, Spans
from tests.refusals import refused


class Tagged(Curve, frozen=True, kw_only=True, tag_field="schema", tag="memo.curve/1"):
    """A document for the tests above."""


def test_a_fifo_is_refused_and_nobody_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with refused(BadInput, where="fifo", got="a FIFO", wanted="a file"):
        codec.read_raw(tmp_path / "fifo")


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/dev/tty"])
def test_devices_are_refused(path: str) -> None:
    with refused(BadInput, where=path, got="a device"):
        codec.read_raw(path)


def test_a_file_that_is_too_large_is_refused_by_its_size(tmp_path: Path) -> None:
    """A sparse file of a tebibyte takes no space on the disk."""
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(2**40)
    with refused(BadInput, where="huge.json", got="1024", wanted="4"):
        codec.read_raw(tmp_path / "huge.json")


def test_a_file_that_grows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log.json").write_bytes(b"x" * 100)
    monkeypatch.setattr(files, "check_regular", lambda path: 5)
    with refused(BadInput, what="too large", where="log.json"):
        files.read_regular(tmp_path / "log.json", most=50)


def test_a_file_takes_no_more_memory_than_it_has_bytes(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_bytes(b"{}" * 1000)
    tracemalloc.start()
    try:
        assert files.read_regular(tmp_path / "small.json") == b"{}" * 1000
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_file_that_says_it_is_empty_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files in /proc do."""
    (tmp_path / "proc.json").write_bytes(b"{}" * 1000)
    monkeypatch.setattr(files, "check_regular", lambda path: 0)
    monkeypatch.setattr(files, "PIECE", 300)
    assert files.read_regular(tmp_path / "proc.json") == b"{}" * 1000


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"schema": "memo.foo/1", "x": 1e400}', "line 1, column 31"),
        ('{\n"schema": "memo.plan/1", "x": [1, "1e999", {"y": -1e999}]}', "line 2, column 50"),
    ],
)
def test_a_number_beyond_all_floats_is_named_beside_a_wrong_schema(text: str, place: str) -> None:
    with refused(BadInput, what="too large", where=f"file.json: {place}", got=("1e" if "400" in text else "-1e")):
        codec.decode(text.encode(), Tagged, where="file.json")


@pytest.mark.parametrize(
    ("document", "kind", "says"),
    [
        (b'{"x": [5e-324], "y": [1], "source": "s"}', Curve, ">= 1e-30"),
        (b'{"x": [1], "y": [1e300], "source": "s"}', Curve, "<= 1e+30"),
        (b'{"attention": "nokernel"}', Kernels, "'nokernel' is no attention kernel"),
        (b'{"attention": "flash22"}', Kernels, "did you mean 'flash2'"),
        (b'{"time_s": [0, 1], "bytes_by_class": {"input": [5]}}', MemoryCurve, "1 values of input for 2 times"),
        (b'{"time_s": [0], "bytes_by_class": {"input": [1e25]}}', MemoryCurve, "int"),
        (
            b'{"ids": ["a"], "ops": ["b"], "lanes": ["c"], "start_s": [0], "end_s": [1e308]}',
            Spans,
            "from 0.0 to 1e+308",
        ),
    ],
)
def test_values_that_no_run_can_have(document: bytes, kind: type, says: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=re.escape(says)):
        msgspec.json.decode(document, type=kind)
