"""Prices AdamW on the host's cores (``--states host``): bytes of its operands / the share of one rank.

All ranks of a node update at the same time, so each gets an equal share of the node's rate. Every parameter costs its
gradient, master copy and two moments read, the last three written back, and the updated parameter: 28 bytes and the
parameter's. The rate lies far below that of copies, because frameworks pass over gradients and parameters more often
(scale, clip, cast), and few cores do not reach the memory's rate.

    an update beside copies   both draw from host memory (``NodeRates``)
"""

from __future__ import annotations

from memo_sim.contract.hardware import Hardware
from memo_sim.program.ir.work import HostUpdate

SHARE_OF_COPIES = 0.25
"""Rate of the update over that of copies, for a profile that has no measurement.

Published runs lie at 0.15 (DeepSpeed on A100 nodes) and 0.32 (Megatron-Core on an H100): see the shipped profiles."""


def node_bytes_per_s(hardware: Hardware) -> float:
    """Return the rate of the updates of all ranks of a node together, in bytes/s."""
    if hardware.host_update_bytes_per_s is not None:
        return hardware.host_update_bytes_per_s.value
    return SHARE_OF_COPIES * hardware.host_copy_bytes_per_s.value


class HostUpdateTimes:
    """Prices the updates of one of ``local_devices`` ranks."""

    def __init__(self, hardware: Hardware, local_devices: int) -> None:
        self._measured = hardware.host_update_bytes_per_s is not None
        self._bytes_per_s = node_bytes_per_s(hardware) / local_devices

    def seconds(self, work: HostUpdate, outside: set[str]) -> float:
        """Return the seconds of an update while nothing else draws from host memory."""
        if not self._measured:
            outside.add("host_update")
        return work.moved_bytes / self._bytes_per_s
