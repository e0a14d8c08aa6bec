"""Handles a closed pipe or a full disk on standard output.

- In ``memo-sim ... | head`` the reader closes the pipe early. The command then ends quietly, with the exit code of a
  process that SIGPIPE ended.
- A full disk is reported as an output that cannot be written, just like a file given with ``-o``.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from memo_sim.contract.errors import BadInput, MemoError, UsageError

CLOSED_PIPE = 141
"""128 plus SIGPIPE's number: the exit code that a shell reports for a program that wrote to a closed pipe."""

OUT, ERR = 1, 2
"""File descriptors of standard output and standard error."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of a write to a full or failing device."""


@contextmanager
def while_read() -> Iterator[None]:
    """End the process quietly when the reader of its output has closed the pipe.

    Enter this inside click's own error handler, which would turn a closed pipe into exit code 1, the code of a bug.
    """
    try:
        yield
    except BrokenPipeError:
        abandon(OUT, ERR)
        sys.exit(CLOSED_PIPE)


def system_failure(error: OSError) -> MemoError:
    """Return the error to show for an operating-system error that no other code has handled.

    Code that writes a file names it in the error. An error without a file name and with no space left is about standard
    output.
    """
    if error.filename is None and error.errno in FULL:
        abandon(OUT)
        return UsageError("the output cannot be written", where="standard output", got=error.strerror)
    return BadInput("cannot read or write", where=error.filename, got=error.strerror)


def abandon(*descriptors: int) -> None:
    """Redirect the descriptors to the null device, because Python flushes them at exit and would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
