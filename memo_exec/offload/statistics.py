"""Statistics of an offloading context: bytes copied on each lane, and bytes that stayed on the device, by reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from enum import StrEnum


class Why(StrEnum):
    """The reason why a saved tensor stayed on the device."""

    __hash__ = str.__hash__  # an enum's own is Python code, and every saved tensor is counted

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
    """Counts since the context was made or since ``reset``; copied bytes count once, not once per view."""

    offloaded_tensors: int = 0
    """Number of copies to the host."""
    offloaded_bytes: int = 0
    """Bytes copied on the D2H lane."""
    restored_tensors: int = 0
    """Number of copies back to the device."""
    restored_bytes: int = 0
    """Bytes copied on the H2D lane, including prefetches that were never used."""
    shared_tensors: int = 0
    """Saved tensors that needed no copy: views of bytes already offloaded."""
    reused_tensors: int = 0
    """Unpacked tensors that needed no copy: the original was still alive."""
    forward_waits: int = 0
    """How often compute waited for the D2H lane because ``max_fwd_stash_size`` copies were in flight."""
    dropped_prefetches: int = 0
    """Prefetched copies that were dropped unused because backward had moved on."""
    kept_bytes: Counter[Why] = field(default_factory=Counter)
    """Bytes of saved tensors that stayed on the device, by reason; each view counts, even of the same bytes."""
    host_bytes: int = 0
    """Size of the host slab in bytes; 0 on a CPU without a ``host_bytes`` limit."""
    host_is_device: bool = False
    """Whether activations are in host memory already, so that nothing is copied: no GPU, and no ``device`` named."""
    host_peak_bytes: int = 0
    """Largest number of host bytes in use; without a ``host_bytes`` limit, the slab's size after the first pass."""

    def reset(self) -> None:
        """Set all counts to zero, except what describes host memory."""
        for each in fields(self):
            if not each.name.startswith("host"):
                setattr(self, each.name, Counter() if each.name == "kept_bytes" else 0)
