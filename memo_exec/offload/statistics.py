"""What an offloading context did: bytes over each lane, what stayed and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from enum import StrEnum


class Why(StrEnum):
    """Why a saved tensor stayed where it was."""

    DEVICE = "on another device"
    KIND = "not a plain strided tensor"
    PARAMETER = "parameter or buffer"
    SMALL = "smaller than min_offload_size"
    CAPTURED = "saved while a graph is captured"
    FRACTION = "beyond the fraction"
    HOST = "host memory is full"
    STORAGE = "view of a storage that stays"


@dataclass
class OffloadStatistics:
    """Counts since the context was made, or since ``reset``; bytes are those copied, not those of every view."""

    offloaded_tensors: int = 0
    """Copies to the host."""
    offloaded_bytes: int = 0
    """Bytes over the D2H lane."""
    restored_tensors: int = 0
    restored_bytes: int = 0
    """Bytes over the H2D lane, those brought back for nothing included."""
    shared_tensors: int = 0
    """Saved tensors that needed no copy: views of bytes already offloaded."""
    reused_tensors: int = 0
    """Unpacked tensors that needed no copy: the original was still alive."""
    forward_waits: int = 0
    """How often compute had to wait for the D2H lane, because ``max_fwd_stash_size`` copies were on their way."""
    dropped_prefetches: int = 0
    """Copies that were brought back and left unused while backward moved on."""
    kept_bytes: Counter[Why] = field(default_factory=Counter)
    """Bytes of saved tensors that stayed, by reason; views of the same bytes count each."""
    host_bytes: int = 0
    """Bytes of the host slab."""
    host_peak_bytes: int = 0
    """Host bytes in use at most. Without ``host_bytes`` the slab has exactly these after the first pass."""

    def reset(self) -> None:
        """Start counting again; the host's bytes stay."""
        for each in fields(self):
            if not each.name.startswith("host"):
                setattr(self, each.name, Counter() if each.name == "kept_bytes" else 0)
