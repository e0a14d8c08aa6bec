"""Opens files that a user names: ordinary files up to a size, so that no input makes a command wait or fill memory.

A FIFO would wait for a writer, a terminal for its user, and ``/dev/zero`` never ends. All of them are refused by kind
before a byte is read. A file that is too large is refused by its size, before its content is in memory.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from memo_sim.contract.errors import BadInput
from memo_sim.contract.units import format_bytes

MOST_BYTES = 4 * 2**30
"""The largest document that is read whole. The largest trace of ours has 70 MB; a month of allocator log some GB."""

PIECE = 2**20
"""What is read at once of a file that is larger than it said."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def check_regular(path: str | Path) -> int:
    """Return the size in bytes of an ordinary file; links are followed.

    Raises:
        BadInput: when there is none at ``path``, or it is something else.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise BadInput("no such file", where=str(path)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(found.st_mode):
        if stat.S_ISDIR(found.st_mode):
            raise BadInput("this is a directory", where=str(path), wanted="a file")
        raise BadInput(
            "this is no ordinary file",
            where=str(path),
            got=_KINDS.get(stat.S_IFMT(found.st_mode), "something else"),
            wanted="a file",
            hint="write its content to a file first",
        )
    return found.st_size


def read_regular(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of an ordinary file of at most ``most`` bytes.

    Raises:
        BadInput: as ``check_regular`` does, or when the file is larger or cannot be read.
    """
    if (size := check_regular(path)) > most:
        raise _too_large(path, size, most)
    try:
        # O_NONBLOCK: the file may have become a FIFO since it was looked at.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            raw = file.read(size + 1)  # read() takes as much memory as it is asked for, before it reads
            # It has grown, or lies in /proc.
            while size < len(raw) <= most and (more := file.read(max(PIECE, len(raw)))):
                raw += more
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if len(raw) > most:
        raise _too_large(path, len(raw), most)
    return raw


def _too_large(path: str | Path, size: int, most: int) -> BadInput:
    return BadInput(
        "the file is too large", where=str(path), got=format_bytes(size), wanted=f"up to {format_bytes(most)}"
    )


def _unreadable(path: str | Path, error: OSError | ValueError) -> BadInput:
    return BadInput("the file cannot be read", where=repr(str(path)), got=str(error))
