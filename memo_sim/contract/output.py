"""What a command does when what it prints is read no more, or has no room.

Who reads only the first lines (``memo-sim ... | head``) closes the pipe: the command ends as one that SIGPIPE ended,
and says nothing. A full disk is an output that cannot be written, as a file given by ``-o`` can be.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from memo_sim.contract.errors import BadInput, MemoError, UsageError

CLOSED_PIPE = 141
"""128 and SIGPIPE's number: what a shell reports of a program that wrote to a closed pipe."""

OUT, ERR = 1, 2
"""Descriptors of standard output and standard error."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a write fails with where there is no room, or no working device."""


@contextmanager
def while_read() -> Iterator[None]:
    """End the process quietly once nobody reads what it prints.

    It stands inside click's own handler, which would make an exit 1 of a closed pipe, as of a bug.
    """
    try:
        yield
    except BrokenPipeError:
        _abandon(OUT, ERR)
        sys.exit(CLOSED_PIPE)


def system_failure(error: OSError) -> MemoError:
    """Return what to say of an error of the operating system that nobody has put in words.

    Files that are written are named by whoever writes them; what has no name and no room is standard output.
    """
    if error.filename is None and error.errno in FULL:
        _abandon(OUT)
        return UsageError("the output cannot be written", where="standard output", got=error.strerror)
    return BadInput("cannot read or write", where=error.filename, got=error.strerror)


def _abandon(*descriptors: int) -> None:
    """Send the rest of a stream nowhere: Python writes it at exit, and would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
