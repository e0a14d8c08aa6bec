"""A cluster: how many nodes of which devices, and the network between the nodes (``memo.cluster/1``)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from memo_sim.contract.hardware import Curve, Quantity, Source, require_sources
from memo_sim.contract.units import MOST_DEVICES, Degree, PerNode

DEFAULT_EFFICIENCY = "default-efficiency"
"""The source of the network's efficiency by size where the cluster names none."""


class NodesCurve(Curve, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Efficiency of a ring over more than two whole nodes, by bytes of the whole tensor."""

    nodes: Annotated[int, msgspec.Meta(ge=3)]


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network between nodes: the cards of a node, their rate, its switches, and efficiency by bytes and nodes."""

    nics_per_node: PerNode
    nic_bytes_per_s: Quantity
    """Rate that collectives reach on one card, in one direction, for large messages."""
    latency_s: Quantity
    """Time of one message between two nodes before its first byte arrives."""
    size_efficiency: Curve | None = None
    """Fraction of the cards' rate that a collective reaches, by bytes of the whole tensor.

    The collective is a ring over two nodes that uses all their cards. Null: SimAI's rings, as in the clusters that are
    given by name, at the sizes that take as long on these cards (``catalog.with_default_efficiency``)."""
    efficiency_by_nodes: list[NodesCurve] = []
    """The same fraction for rings over more whole nodes, where it was measured; other rings are derived."""
    transfer_deviation: Quantity | None = None
    """Relative standard deviation of the time of equal transfers between nodes; null: none is charged.

    An exchange or all-to-all over n nodes takes as long as the slowest of n transfers."""
    oversubscription: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    """Rate of a leaf switch's links to nodes over that of its links to the spine; 1: no transfer is slower there."""
    rail_optimised: bool = True
    """Whether a leaf switch joins card i of many nodes (a rail), or all cards of few nodes."""
    leaf_ports: Degree = 32
    """Ports of a leaf switch that go to nodes; half of a 64-port switch."""

    def __post_init__(self) -> None:
        """Refuse a network whose cards have rate zero, and two curves for the same number of nodes."""
        if self.nic_bytes_per_s.value <= 0:
            raise ValueError("nic_bytes_per_s must be more than 0")
        if self.size_efficiency is None and self.efficiency_by_nodes:
            raise ValueError("efficiency_by_nodes needs size_efficiency, the curve of two nodes")
        nodes = [curve.nodes for curve in self.efficiency_by_nodes]
        if len(set(nodes)) < len(nodes):
            raise ValueError("efficiency_by_nodes has two curves for the same number of nodes")

    @property
    def node_bytes_per_s(self) -> float:
        """Rate of all cards of a node, in one direction."""
        return self.nics_per_node * self.nic_bytes_per_s.value

    @property
    def nodes_per_leaf(self) -> int:
        """Nodes that reach each other without the spine."""
        return self.leaf_ports if self.rail_optimised else max(1, self.leaf_ports // self.nics_per_node)


class Cluster(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.cluster/1"
):
    """A homogeneous cluster: ``nodes`` nodes, each with ``devices_per_node`` devices of one hardware profile."""

    name: str
    hardware: str
    """A shipped profile's name, or the path of a ``memo.hardware/1`` file relative to this file."""
    nodes: Degree
    devices_per_node: PerNode
    host_memory_bytes: Quantity | None = None
    """Host memory of one node that training may use; the default is the hardware profile's value."""
    network: Network | None = None
    sources: dict[str, Source] = {}

    def __post_init__(self) -> None:
        """Refuse several nodes without a network, too many devices, and numbers without a source."""
        require_sources(self, self.sources)
        if self.devices > MOST_DEVICES:
            raise ValueError(f"{self.nodes} x {self.devices_per_node} are more than {MOST_DEVICES} devices")
        if self.nodes > 1 and self.network is None:
            raise ValueError(f"a cluster of {self.nodes} nodes needs a network")

    @property
    def devices(self) -> int:
        """Devices of the whole cluster."""
        return self.nodes * self.devices_per_node
