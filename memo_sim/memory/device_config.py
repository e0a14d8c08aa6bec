"""Settings of PyTorch's CUDA caching allocator, and the sizes that follow from them (c10/core/AllocatorConfig.h).

A request is rounded up to a block size, which decides the pool. If no free block fits, the device gives a segment:

    request     block        pool     segment
      700 B     1 KiB        small      2 MiB
      1 MiB     1 MiB        small      2 MiB
    1.5 MiB     1.5 MiB      large     20 MiB
     11 MiB     11 MiB       large     12 MiB   (multiples of 2 MiB from 10 MiB on)
"""

from __future__ import annotations

from dataclasses import dataclass

from memo_sim.contract.errors import UsageError
from memo_sim.contract.units import MIB

BLOCK_BYTES = 512
"""The smallest block; every block size is a multiple of it."""
SMALL_BYTES = MIB
"""The largest block of the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
ROUNDED_ALONE_BYTES = 10 * MIB
"""From this block size on, a segment has the size of the request, rounded up to ``SEGMENT_UNIT_BYTES``."""
SEGMENT_UNIT_BYTES = 2 * MIB
DEFAULT_ROUNDING_MB = 20


@dataclass(frozen=True, kw_only=True)
class AllocatorConfig:
    """The settings of PYTORCH_ALLOC_CONF, by PyTorch's names and with its defaults; ``_mb`` are MiB."""

    max_split_size_mb: int | None = None
    """Blocks of at least this size are never split; None: any block may be split."""
    max_non_split_rounding_mb: int = DEFAULT_ROUNDING_MB
    """A cached block that serves a request of at least ``max_split_size_mb`` is larger by less than this."""
    roundup_power2_divisions: int = 1
    """Number of equal steps between powers of two to which sizes are rounded up; 1: multiples of 512 bytes."""
    garbage_collection_threshold: float = 0.0
    """Above this share of the capacity, old cached segments are released before a new one is allocated; 0: never."""
    expandable_segments: bool = False
    large_segment_size_mb: int = 20
    """Segment size for blocks of 1 to 10 MiB, and page size of an expandable segment."""

    def __post_init__(self) -> None:
        """Refuse settings that PyTorch 2.13 refuses, and settings with which it fails later.

        Raises:
            UsageError: naming the setting.
        """
        divisions = self.roundup_power2_divisions
        segment_mb = self.large_segment_size_mb
        for name, got, wanted, right in (
            (
                "max_split_size_mb",
                self.max_split_size_mb,
                f"at least large_segment_size_mb, {segment_mb}, or nothing",
                self.max_split_size_mb is None or self.max_split_size_mb >= segment_mb,
            ),
            (
                "max_non_split_rounding_mb",
                self.max_non_split_rounding_mb,
                f"at least large_segment_size_mb, {segment_mb}",
                self.max_non_split_rounding_mb >= segment_mb or self.max_non_split_rounding_mb == DEFAULT_ROUNDING_MB,
            ),
            (
                "roundup_power2_divisions",
                divisions,
                "a power of two",
                divisions > 0 and not divisions & (divisions - 1),
            ),
            (
                "garbage_collection_threshold",
                self.garbage_collection_threshold,
                "from 0 (never) to below 1",
                0 <= self.garbage_collection_threshold < 1,
            ),
            (
                "large_segment_size_mb",
                segment_mb,
                f"more than {ROUNDED_ALONE_BYTES // MIB}, and even with expandable_segments: the device maps 2 MiB",
                segment_mb * MIB > ROUNDED_ALONE_BYTES and not (self.expandable_segments and segment_mb % 2),
            ),
            (
                "expandable_segments",
                "with max_split_size_mb",
                "one of the two: PyTorch fails where it would free an oversize block of an expandable segment",
                not (self.expandable_segments and self.max_split_size_mb is not None),
            ),
        ):
            if not right:
                raise UsageError("not a valid setting of the caching allocator", where=name, got=got, wanted=wanted)

    @property
    def max_split_bytes(self) -> int | None:
        """``max_split_size_mb`` in bytes."""
        return None if self.max_split_size_mb is None else self.max_split_size_mb * MIB

    @property
    def max_non_split_rounding_bytes(self) -> int:
        """``max_non_split_rounding_mb`` in bytes."""
        return self.max_non_split_rounding_mb * MIB

    @property
    def large_segment_bytes(self) -> int:
        """``large_segment_size_mb`` in bytes."""
        return self.large_segment_size_mb * MIB

    def block_bytes(self, size_bytes: int) -> int:
        """Return the block size to which a request of ``size_bytes`` (at least 1) is rounded up."""
        if size_bytes < BLOCK_BYTES:
            return BLOCK_BYTES
        divisions = self.roundup_power2_divisions
        if divisions > 1 and size_bytes > BLOCK_BYTES * divisions:
            step = (1 << (size_bytes.bit_length() - 1)) // divisions
            return -(-size_bytes // step) * step
        return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES

    def segment_bytes(self, block_bytes: int) -> int:
        """Return the segment size for a block of ``block_bytes`` that no cached block serves."""
        if block_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < ROUNDED_ALONE_BYTES:
            return self.large_segment_bytes
        return -(-block_bytes // SEGMENT_UNIT_BYTES) * SEGMENT_UNIT_BYTES
