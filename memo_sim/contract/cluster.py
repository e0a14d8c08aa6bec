"""Nodes of devices and the network between them (``memo.cluster/1``)."""

from __future__ import annotations

import msgspec

from memo_sim.contract.hardware import Curve, Quantity, Source, require_sources
from memo_sim.contract.units import Degree, Positive


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What lies between nodes: cards, their rate, and how a collective's rate grows with the message."""

    nics_per_node: Positive
    nic_bytes_per_s: Quantity
    """What collectives get out of one card, one direction, at large sizes."""
    latency_s: Quantity
    """What one message between two nodes costs before its first byte."""
    size_efficiency: Curve
    """Fraction of the cards' rate reached, by whole-tensor bytes of a ring over two nodes that uses all their cards."""

    def __post_init__(self) -> None:
        """Refuse cards that carry nothing."""
        if self.nic_bytes_per_s.value <= 0:
            raise ValueError("nic_bytes_per_s must be more than 0")


class Cluster(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.cluster/1"
):
    """A homogeneous cluster: so many nodes of so many devices of one hardware profile."""

    name: str
    hardware: str
    """A shipped profile's name, or the path of a ``memo.hardware/1`` file (relative to this file)."""
    nodes: Degree
    devices_per_node: Degree
    host_memory_bytes: Quantity | None = None
    """Host memory of one node that training may use; the hardware profile's when not given."""
    network: Network | None = None
    sources: dict[str, Source] = {}

    def __post_init__(self) -> None:
        """Refuse several nodes with nothing between them, and numbers without a source."""
        require_sources(self, self.sources)
        if self.nodes > 1 and self.network is None:
            raise ValueError(f"{self.nodes} nodes need a network")

    @property
    def devices(self) -> int:
        """Devices of the whole cluster."""
        return self.nodes * self.devices_per_node
