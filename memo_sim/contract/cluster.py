"""A cluster: how many nodes of which devices, and the network between the nodes (``memo.cluster/1``)."""

from __future__ import annotations

import msgspec

from memo_sim.contract.hardware import Curve, Quantity, Source, require_sources
from memo_sim.contract.units import Degree, Positive


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network between nodes: the cards of a node, their rate, and how efficiency grows with message size."""

    nics_per_node: Positive
    nic_bytes_per_s: Quantity
    """Rate that collectives reach on one card, in one direction, for large messages."""
    latency_s: Quantity
    """Time of one message between two nodes before its first byte arrives."""
    size_efficiency: Curve
    """Fraction of the cards' rate that a collective reaches, by bytes of the whole tensor.

    The collective is a ring over two nodes that uses all their cards."""

    def __post_init__(self) -> None:
        """Refuse a network whose cards have rate zero."""
        if self.nic_bytes_per_s.value <= 0:
            raise ValueError("nic_bytes_per_s must be more than 0")


class Cluster(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.cluster/1"
):
    """A homogeneous cluster: ``nodes`` nodes, each with ``devices_per_node`` devices of one hardware profile."""

    name: str
    hardware: str
    """A shipped profile's name, or the path of a ``memo.hardware/1`` file relative to this file."""
    nodes: Degree
    devices_per_node: Degree
    host_memory_bytes: Quantity | None = None
    """Host memory of one node that training may use; the default is the hardware profile's value."""
    network: Network | None = None
    sources: dict[str, Source] = {}

    def __post_init__(self) -> None:
        """Refuse several nodes without a network, and numbers without a source."""
        require_sources(self, self.sources)
        if self.nodes > 1 and self.network is None:
            raise ValueError(f"a cluster of {self.nodes} nodes needs a network")

    @property
    def devices(self) -> int:
        """Devices of the whole cluster."""
        return self.nodes * self.devices_per_node
