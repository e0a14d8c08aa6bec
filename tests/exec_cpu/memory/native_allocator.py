"""Drives the replaying allocator's native library with host memory instead of device memory."""

import ctypes
from pathlib import Path

from memo_exec.memory.native_library import library


class Caller:
    """Calls the library's malloc and free as torch does."""

    def __init__(self, path: Path) -> None:
        self.library = on_host(path)

    def malloc(self, size: int, stream: int = 0) -> int:
        return int(self.library.memo_malloc(size, 0, stream) or 0)

    def free(self, pointer: int, size: int) -> None:
        self.library.memo_free(pointer, size, 0, None)

    def play(self, step: list[tuple[str, int]]) -> list[int]:
        """Make a step's requests; write to every block, and check the content when it is freed."""
        held: dict[str, tuple[int, int, int]] = {}
        addresses = []
        for mark, (name, size) in enumerate(step, start=1):
            if name.startswith("-"):
                self.release(held.pop(name[1:]))
            else:
                pointer = self.malloc(size)
                ctypes.memset(pointer, mark, size)
                held[name] = pointer, size, mark
                addresses.append(pointer)
        for block in held.values():
            self.release(block)
        return addresses

    def release(self, block: tuple[int, int, int]) -> None:
        pointer, size, mark = block
        assert ctypes.string_at(pointer, size) == bytes([mark]) * size
        self.free(pointer, size)


def on_host(path: Path) -> ctypes.CDLL:
    """Return the library, switched to host memory."""
    loaded = library(path)
    assert loaded.memo_use_host_memory() == 0
    return loaded
