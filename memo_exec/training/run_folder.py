"""The folder of a run's checkpoints: one run at a time uses it, and a run removes only what it has written.

    DIR/.lock                   who uses the folder; the operating system frees the lock when the process ends
    DIR/.unfinished-RUN-…       a checkpoint that is being written by the run with the identifier RUN
    DIR/step-00000120           a complete checkpoint
    DIR/weights                 the trained weights

The lock is a POSIX lock, which also holds between nodes that share the folder over NFS. A link inside the folder is
never followed and never removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from memo_sim.contract.errors import BadInput, UsageError

LOCK = ".lock"
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".unfinished-"


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the lock file: the run that uses the folder, or used it last."""

    run: str
    host: str
    process: int


def new_run() -> str:
    """Return the identifier of a new run. Resumed runs keep the identifier of the first one."""
    return secrets.token_hex(8)


def check_directory(directory: Path) -> None:
    """Make the directory of a run's checkpoints before the first step, so that a wrong path fails early.

    Raises:
        UsageError: when it cannot be made or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError("checkpoints cannot be written here", where=str(directory), got=error.strerror) from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError("checkpoints cannot be written here", where=str(directory), got="no permission to write")


@contextmanager
def locked(directory: Path, run: str) -> Iterator[None]:
    """Keep other runs out of the folder inside this block, and remove what the last one left unfinished.

    The lock ends with this process, however it ends.

    Raises:
        UsageError: when another run holds the lock, or the file system has no locks.
    """
    path = directory / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UsageError("checkpoints cannot be written here", where=str(path), got=error.strerror) from None
    with os.fdopen(descriptor, "r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UsageError(
                "another run uses this folder",
                where=str(directory),
                got=_named(_holder(file.read())),
                hint="wait for its end, or choose another --save directory",
            ) from None
        except OSError as error:
            raise UsageError(
                "this folder's file system has no locks, so two runs could write to it",
                where=str(directory),
                got=error.strerror,
                hint="choose another --save directory, or mount it with locks",
            ) from None
        before = _holder(file.read())
        for each in {run} | ({before.run} if before is not None else set()):
            _remove_unfinished(directory, each)
        file.seek(0)
        file.truncate()
        file.write(msgspec.json.encode(Holder(run=run, host=socket.gethostname(), process=os.getpid())) + b"\n")
        file.flush()
        yield


def _holder(raw: bytes) -> Holder | None:
    try:
        found = msgspec.json.decode(raw, type=Holder)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # empty while its holder writes it, or another program's file
        return None
    return found if re.fullmatch("[0-9a-f]{16}", found.run) else None


def _named(holder: Holder | None) -> str:
    return f"process {holder.process} on {holder.host!r}" if holder is not None else "a process that has just begun"


def fresh(directory: Path, run: str) -> Path:
    """Make and return a new folder for a checkpoint that is being written.

    Raises:
        UsageError: when it cannot be made.
    """
    made = directory / f"{_UNFINISHED}{run}-{secrets.token_hex(4)}"
    try:
        made.mkdir(parents=True)
    except OSError as error:
        raise UsageError("the checkpoint cannot be written", where=str(directory), got=error.strerror) from None
    return made


def place_of(directory: Path, step: int) -> Path:
    """Return the folder of the checkpoint after ``step`` steps."""
    return directory / f"step-{step:08d}"


def _remove_unfinished(directory: Path, run: str) -> None:
    for path in directory.iterdir():
        if path.name.startswith(f"{_UNFINISHED}{run}-") and is_folder(path):
            shutil.rmtree(path, ignore_errors=True)


def steps_in(directory: Path) -> dict[int, Path]:
    """Return everything in the folder whose name is that of a checkpoint, by step, whatever it is."""
    if not directory.is_dir():
        return {}
    named = ((path, _NAME.fullmatch(path.name)) for path in directory.iterdir())
    return {
        int(match[1]): path for path, match in named if match is not None and path.name == f"step-{int(match[1]):08d}"
    }


def is_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def check_free(directory: Path, after: int) -> None:
    """Refuse a folder in which something else has the name of a checkpoint that the run will write.

    ``after`` is the step after which the run begins.

    Raises:
        UsageError: naming it.
    """
    later = {step: path for step, path in steps_in(directory).items() if step > after}
    if later:
        raise UsageError(
            "the --save directory has something that is no checkpoint but has a checkpoint's name",
            where=str(later[min(later)]),
            hint="move it away, or choose another --save directory",
        )


def check_plain(path: Path) -> Path:
    """Return ``path`` when it is a file and not a link.

    Raises:
        BadInput: when it is something else.
    """
    if path.is_symlink() or not path.is_file():
        got = "a link" if path.is_symlink() else "no file"
        raise BadInput("the checkpoint cannot be read", where=str(path), got=got, wanted="a file")
    return path
