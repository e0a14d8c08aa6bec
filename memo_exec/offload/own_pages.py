"""Bytes on pages of their own, which return to the system piece by piece as they are copied away.

    pages   [ returned ][ returned ][ piece ][        ]
    into    [ copied   ][ copied   ][ piece ][ untouched pages take no memory ]

So while bytes move, both places together take at most one piece more than the bytes. Memory of the C library's heap
would not do: a long-lived copy between the short-lived tensors of a step leaves holes there.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from memo_exec.memory.pinned import own_pages

PIECE_BYTES = 2**21
"""A multiple of every page size, huge pages included."""


class OwnPages:
    """``memory``: ``size_bytes`` > 0 bytes, on pages that nothing else uses."""

    def __init__(self, size_bytes: int) -> None:
        self._pages = own_pages(size_bytes)
        self.memory = torch.frombuffer(self._pages, dtype=torch.uint8)

    def move(self, into: Tensor) -> None:
        """Copy all bytes to ``into`` and return their pages to the system; they read as zeros afterwards."""
        for first in range(0, len(self.memory), PIECE_BYTES):
            piece = self.memory[first : first + PIECE_BYTES]
            into[first : first + PIECE_BYTES].copy_(piece)
            if hasattr(mmap, "MADV_DONTNEED"):
                self._pages.madvise(mmap.MADV_DONTNEED, first, len(piece))
