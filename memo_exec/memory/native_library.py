"""Builds and loads the native library of the replaying allocator.

The library is compiled on first use, which needs g++ but not CUDA. It holds one state per process, because torch has
one allocator per process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import secrets
import shutil
import stat
import subprocess
from functools import cache
from pathlib import Path

from memo_sim.contract.errors import CannotRun

SOURCE = Path(__file__).parent / "native" / "replay_allocator.cpp"
FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra")


def cache_directory() -> Path:
    """Return the folder for built libraries, following the XDG base directory rules: a relative path is ignored."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (chosen if chosen.is_absolute() else Path("~/.cache").expanduser()) / "memo"


def library_path(directory: Path | None = None) -> Path:
    """Return the path of the built library; build it if none exists for this source and this kind of machine.

    Raises:
        CannotRun: if g++ is missing or fails, or if other users may write to the library or its folder.
    """
    directory = directory or cache_directory()
    made_of = SOURCE.read_bytes() + " ".join((*FLAGS, platform.machine())).encode()
    built = directory / f"replay_allocator-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CannotRun(
            "no folder for the compiled replaying allocator can be created",
            where=str(directory),
            got=error.strerror,
            hint="set XDG_CACHE_HOME to a folder that you own",
        ) from None
    _refuse_writable_by_others(directory)
    if built.is_file():
        _refuse_writable_by_others(built)
    else:
        _build(built)
    return built


def _build(built: Path) -> None:
    """Compile to a temporary name, then rename; processes that build at the same time cannot disturb each other."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise CannotRun("the replaying allocator is compiled on first use, but there is no compiler", wanted="g++")
    fresh = built.with_name(f".{secrets.token_hex(8)}.so")
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(fresh), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fresh.unlink(missing_ok=True)
        raise CannotRun("the replaying allocator does not compile", got=done.stderr.strip()[-500:], where=str(SOURCE))
    fresh.chmod(0o700)
    fresh.replace(built)


def _refuse_writable_by_others(path: Path) -> None:
    """Refuse a path that another user could have written.

    Raises:
        CannotRun: if group or others may write, or if the owner is neither root nor this user.
    """
    found = path.stat()
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if others or found.st_uid not in (0, os.getuid()):
        raise CannotRun(
            "others may write to the path from which the replaying allocator would be loaded",
            where=str(path),
            got=f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}",
            wanted="writable by you alone",
            hint="run chmod go-w on it, or set XDG_CACHE_HOME to a folder that you own",
        )


@cache
def library(path: Path) -> ctypes.CDLL:
    """Load the library and declare the types of its functions."""
    loaded = ctypes.CDLL(str(path))
    numbers, pointer, number = ctypes.POINTER(ctypes.c_int64), ctypes.c_void_p, ctypes.c_int64
    loaded.memo_malloc.restype = pointer
    loaded.memo_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, pointer]
    loaded.memo_free.restype = None
    loaded.memo_free.argtypes = [pointer, ctypes.c_ssize_t, ctypes.c_int, pointer]
    loaded.memo_record.restype = None
    loaded.memo_record.argtypes = [ctypes.c_int, pointer]
    loaded.memo_replay.argtypes = [numbers, numbers, number, number, pointer]
    loaded.memo_lend.restype = None
    loaded.memo_lend.argtypes = [pointer, number, pointer]
    loaded.memo_event_count.restype = number
    loaded.memo_events.restype = number
    loaded.memo_events.argtypes = [numbers, number]
    loaded.memo_counts.restype = None
    loaded.memo_counts.argtypes = [numbers]
    loaded.memo_arena.restype = loaded.memo_living.restype = number
    for name in ("memo_begin_step", "memo_stop", "memo_reset_counts"):
        getattr(loaded, name).restype = None
    return loaded
