"""The allocator that records and replays, as Python sees it: built on first use, driven by ctypes.

The library keeps one state per process, as torch keeps one allocator. It needs g++, and no CUDA to build.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import shutil
import subprocess
from functools import cache
from pathlib import Path

from memo_sim.contract.errors import CannotRun
from memo_sim.contract.requests import ARENA_ALIGNMENT_BYTES, Requests

SOURCE = Path(__file__).parent / "native" / "replay_allocator.cpp"
FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC")


def cache_directory() -> Path:
    """Return where built libraries are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memo"


def library_path(directory: Path | None = None) -> Path:
    """Return the built library, building it when there is none of this source yet.

    Raises:
        CannotRun: without g++, or when it fails.
    """
    source = SOURCE.read_bytes()
    directory = directory or cache_directory()
    built = directory / f"replay_allocator-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if built.is_file():
        return built
    compiler = shutil.which("g++")
    if compiler is None:
        raise CannotRun("the replaying allocator is built on first use and there is no compiler", wanted="g++")
    directory.mkdir(parents=True, exist_ok=True)
    fresh = directory / f".{secrets.token_hex(8)}.so"
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(fresh), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fresh.unlink(missing_ok=True)
        raise CannotRun("the replaying allocator does not build", got=done.stderr.strip()[-500:], where=str(SOURCE))
    fresh.replace(built)  # whoever builds at the same time puts the same file there
    return built


@cache
def library(path: Path) -> ctypes.CDLL:
    """Return the loaded library with its functions' types."""
    loaded = ctypes.CDLL(str(path))
    numbers = ctypes.POINTER(ctypes.c_int64)
    loaded.memo_malloc.restype = ctypes.c_void_p
    loaded.memo_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    loaded.memo_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    loaded.memo_record.argtypes = [ctypes.c_int]
    loaded.memo_replay.argtypes = [numbers, numbers, ctypes.c_int64, ctypes.c_int64]
    loaded.memo_event_count.restype = ctypes.c_int64
    loaded.memo_events.argtypes = [numbers]
    loaded.memo_counts.argtypes = [numbers]
    loaded.memo_arena.restype = ctypes.c_int64
    return loaded


def requests_of_events(events: list[tuple[int, int]]) -> Requests:
    """Return recorded events, (request, its bytes or -1 when given back), as requests; one instant an event.

    What is never given back lasts to the end.

    Raises:
        ValueError: when something is given back that was not asked for.
    """
    lower: dict[int, int] = {}
    upper: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for instant, (request, size) in enumerate(events):
        if size >= 0:
            lower[request], sizes[request] = instant, size
        elif request in lower:
            upper[request] = instant
        else:
            raise ValueError(f"request {request} is given back and was never made")
    return Requests(
        name="recorded",
        ids=[str(request) for request in lower],
        lower=list(lower.values()),
        upper=[upper.get(request, len(events)) for request in lower],
        size_bytes=list(sizes.values()),
        alignment_bytes=ARENA_ALIGNMENT_BYTES,
    )


class Recorder:
    """Records what is asked of the allocator between ``start`` and ``stop``."""

    def __init__(self, path: Path) -> None:
        self._library = library(path)

    def start(self) -> None:
        """Forget what was recorded, and record."""
        self._library.memo_record(1)

    def stop(self) -> Requests:
        """Stop, and return the requests since ``start``."""
        self._library.memo_record(0)
        count = self._library.memo_event_count()
        flat = (ctypes.c_int64 * (2 * count))()
        self._library.memo_events(flat)
        return requests_of_events(list(zip(flat[::2], flat[1::2], strict=True)))
