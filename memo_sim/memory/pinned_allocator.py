"""Sizes of blocks of PyTorch's pinned host allocator (aten/src/ATen/core/CachingHostAllocator.h).

Every request is rounded up to a power of two: a pinned block of 3.0 GiB takes 4 GiB. Blocks are neither split nor
merged.
"""

from __future__ import annotations


def pinned_bytes(size_bytes: int) -> int:
    """Return what a pinned block for ``size_bytes`` takes: the next power of two, nothing for nothing."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0
