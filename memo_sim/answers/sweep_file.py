"""The file of a sweep: JSON lines that are only ever appended to, by one process at a time.

    {"schema":"memo.sweep/1","key":"9f2c…","question":{"model":"llama3-8b",…},…}
    {"schema":"memo.sweep/1","key":"41aa…",…
                                           ^ the process ended here: the next sweep removes what is left of the line

The file itself is locked, so that nothing lies beside it; the operating system frees the lock when the process ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.files import read_regular
from memo_sim.contract.sweep import SweepLine

_BEGIN = b'{"schema":"memo.sweep/1",'
"""How every line begins: what is removed at the end of a file has to begin so as well."""


class SweepFile:
    """An open file of answers; ``lines`` are those that it held when it was opened."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        raw = file.read()
        whole, left = raw[: raw.rfind(b"\n") + 1], raw[raw.rfind(b"\n") + 1 :]
        self.lines = lines_of(whole, path)
        if left and not (left.startswith(_BEGIN) or _BEGIN.startswith(left)):
            raise _no_sweep(path, f"line {len(self.lines) + 1} is no line of a sweep")
        if left:
            file.truncate(len(whole))

    def append(self, line: SweepLine) -> None:
        """Add a line, whole, so that a process that ends later leaves it as it is.

        Raises:
            UsageError: when the disk is full.
        """
        try:
            self._file.write(encoded(line))
            self._file.flush()
        except OSError as error:
            raise UsageError("the file cannot be written", where=str(self._file.name), got=error.strerror) from None


@contextmanager
def opened(path: Path) -> Iterator[SweepFile]:
    """Open the file of a sweep for this process alone; make it where there is none.

    Raises:
        UsageError: when it cannot be written, or another sweep writes it.
        BadInput: when it holds something else.
    """
    codec.check_writable(path)
    if path.exists() and not path.is_file():
        raise UsageError("this is no ordinary file", where=str(path), wanted="a file for the lines of a sweep")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UsageError("the file cannot be written", where=str(path), got=error.strerror) from None
    with os.fdopen(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "wait until it has ended, or write to another file"
            raise UsageError("another sweep writes this file", where=str(path), hint=hint) from None
        except OSError as error:
            raise UsageError("the file cannot be locked", where=str(path), got=error.strerror) from None
        file.seek(0)
        yield SweepFile(file, path)


def read_lines(path: Path) -> list[SweepLine]:
    """Return the whole lines of a file, without a lock: a line that a running sweep is writing is left out.

    Raises:
        BadInput: when it cannot be read or holds something else.
    """
    raw = read_regular(path)
    return lines_of(raw[: raw.rfind(b"\n") + 1], path)


def lines_of(raw: bytes, path: Path) -> list[SweepLine]:
    """Return the lines of a file's text.

    Raises:
        BadInput: naming the first line that is none of a sweep.
    """
    found = []
    for number, text in enumerate(raw.splitlines(), start=1):
        if not text.startswith(_BEGIN):
            raise _no_sweep(path, f"line {number} is no line of a sweep")
        found.append(codec.decode(text, SweepLine, where=f"{path}, line {number}"))
    return found


def encoded(line: SweepLine) -> bytes:
    """Return a line as it stands in a file."""
    return msgspec.json.encode(line) + b"\n"


def _no_sweep(path: Path, got: str) -> BadInput:
    hint = "name a new file, or one that memo-sim sweep has written"
    return BadInput("this file holds no answers of a sweep", where=str(path), got=got, hint=hint)
