"""Reads requests from an allocator's log (MEMO 4.3.2).

    malloc qkv 1048576
    malloc scores 4096
    free qkv 1048576

Each line is one instant. An id may be allocated again after its free: its second life is called ``qkv#2``. A buffer
that is never freed lives to the end. Empty lines and lines that start with ``#`` are ignored.
"""

from __future__ import annotations

import re

from memo_sim.contract.errors import BadInput
from memo_sim.contract.requests import Requests
from memo_sim.memory.source import Source

WANTED = "'malloc ID SIZE' or 'free ID SIZE'"
_LINE = re.compile(r"(malloc|free)\s+(\S+)\s+(\d{1,18})", re.ASCII)


def is_allocation_log(text: str) -> bool:
    """Return whether the first line that is not ignored belongs to a log."""
    words = next((line.split() for line in text.splitlines() if _says_something(line)), [])
    return bool(words) and words[0] in ("malloc", "free")


def read_allocation_log(text: str, where: str) -> Source:
    """Return the requests of a log, in the order of its mallocs; ignored lines do not count as instants.

    Raises:
        BadInput: with file and line, when a line is neither a malloc nor a free, a live id is allocated again, or a
            free names an id that is not live or another size.
    """
    ids: list[str] = []
    lower: list[int] = []
    upper: list[int] = []
    sizes: list[int] = []
    live: dict[str, int] = {}
    lives: dict[str, int] = {}
    taken: set[str] = set()
    instant = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not _says_something(line):
            continue
        here = f"{where}: line {number}"
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise BadInput("neither a malloc nor a free", where=here, got=repr(line.strip()[:80]), wanted=WANTED)
        action, name, size = match[1], match[2], int(match[3])
        if action == "malloc":
            if name in live:
                raise BadInput("a live buffer is allocated again", where=here, got=name, wanted="a free before it")
            live[name] = len(ids)
            lives[name] = lives.get(name, 0) + 1
            ids.append(_fresh(name, lives[name], taken))
            lower.append(instant)
            upper.append(-1)
            sizes.append(size)
        else:
            if name not in live:
                freed = "it was freed before" if name in lives else "it was never allocated"
                raise BadInput("a free of a buffer that is not live", where=here, got=name, hint=freed)
            buffer = live.pop(name)
            if sizes[buffer] != size:
                raise BadInput("a free of another size", where=here, got=size, wanted=f"{sizes[buffer]}, as allocated")
            upper[buffer] = instant
        instant += 1
    for buffer in live.values():
        upper[buffer] = instant
    notes = [f"{len(live)} of {len(ids)} buffers are never freed: they live to the end"] if live else []
    return Source(Requests(ids=ids, lower=lower, upper=upper, size_bytes=sizes), "log", notes)


def _says_something(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _fresh(name: str, life: int, taken: set[str]) -> str:
    """Return a unique name for one life of an id."""
    candidate = name if life == 1 else f"{name}#{life}"
    while candidate in taken:
        candidate += "'"
    taken.add(candidate)
    return candidate
