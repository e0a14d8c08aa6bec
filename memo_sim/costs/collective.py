"""Prices collectives and p2p transfers, inside a node and across nodes.

    seconds = alpha + factor(ranks) * bytes / bus rate(bytes)

    factor   all-reduce 2(n-1)/n    all-gather, reduce-scatter, all-to-all (n-1)/n    broadcast, reduce, send+receive 1

``bytes`` is the size of the whole tensor; for an all-to-all, it is what one rank holds.

Inside a node, alpha and bus rate come from the profile's tables, interpolated in log ranks.

Across nodes:

- A ring runs at its slowest link. That is the lower of the bus rate among the group's ranks in one node, and the
  group's share of the node's cards, which all groups of the node use at once.
- Over two nodes, an all-reduce is a tree when a tree is faster. The tensor then crosses the network once in each
  direction instead of 2(n-1)/n times, and the bus rate may exceed the cards' rate (AddyLaddy, nccl#812; sjeaugey,
  nccl-tests#196; SimAI models it too).
- In an all-to-all, each rank sends its bytes for other nodes through its own share of the cards, at most one card
  (sjeaugey, nccl-tests#267). Bytes for the same node move at the same time.
- Each node that a message passes adds the network's latency.

The network's efficiency curve was measured with a ring over two whole nodes, which spreads a tensor over all their
cards. A transfer with fewer cards reads the curve at equal bytes per card: bytes x cards of a node / usable cards.

    usable cards     collectives: a node's cards / groups per node     all-to-all, p2p: at most one card per rank

More than two nodes are outside the range of that curve.
"""

from __future__ import annotations

from math import log2

from memo_sim.contract.cluster import Cluster, Network
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import CollectiveKind, Hardware
from memo_sim.contract.plan import Layout
from memo_sim.costs.curves import LogCurve, between
from memo_sim.costs.placement import Placement, hop, place
from memo_sim.program.ir.work import Collective, Exchange, Group, PointToPoint
from memo_sim.program.layout.rank_order import REPLICATE, SHARD, degree

ALIKE: dict[CollectiveKind, tuple[CollectiveKind, ...]] = {
    "all_reduce": ("all_reduce", "reduce_scatter", "all_gather"),
    "all_gather": ("all_gather", "reduce_scatter", "all_reduce"),
    "reduce_scatter": ("reduce_scatter", "all_gather", "all_reduce"),
    "broadcast": ("broadcast", "all_gather", "all_reduce"),
    "reduce": ("reduce", "reduce_scatter", "all_reduce"),
    "all_to_all": ("all_to_all", "send_recv"),
    "send_recv": ("send_recv", "all_to_all"),
}
"""Tables to use for each kind, in order of preference; a ring's bus rate hardly depends on what it carries."""

LARGE_BYTES = 2**30
"""Bytes of a tensor whose collective runs at the link's full rate."""

CURVE_NODES = 2
"""Number of nodes that the network's efficiency curve was measured on."""


TREE_NODES = 2
"""Number of nodes for which a tree has no intermediate node."""


def volume_factor(kind: CollectiveKind, ranks: int) -> float:
    """Return how many times ``bytes`` cross the slowest link (``factor`` in the module's formula)."""
    if kind == "all_reduce":
        return 2.0 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


class CollectiveTimes:
    """Prices the collectives and p2p transfers of one layout on one cluster."""

    def __init__(self, hardware: Hardware, cluster: Cluster, layout: Layout) -> None:
        self._layout = layout
        self._devices_per_node = cluster.devices_per_node
        self._network = cluster.network
        self._efficiency = LogCurve.of(cluster.network.size_efficiency) if cluster.network else None
        self._tables: dict[CollectiveKind, list[tuple[float, float, LogCurve]]] = {}
        for table in sorted(hardware.collectives, key=lambda table: table.ranks):
            entry = (log2(table.ranks), table.alpha_s, LogCurve.of(table.bus_bytes_per_s))
            self._tables.setdefault(table.kind, []).append(entry)

    def seconds(self, work: Collective, outside: set[str]) -> float:
        """Return the seconds that the collective takes on every rank of its group."""
        placement = place(work.group, work.ranks, self._layout, self._devices_per_node)
        return self._time(work.kind, work.bytes, placement, outside)

    def exchange_seconds(self, work: Exchange, outside: set[str]) -> float:
        """Return the seconds of one hop of a ring exchange; the slowest rank sets the pace."""
        placement = place(work.group, work.ranks, self._layout, self._devices_per_node)
        return self._time("send_recv", work.bytes, placement, outside)

    @property
    def replica_link_share(self) -> float:
        """Fraction of a device's link inside its node that a large collective over the replicas uses while it runs.

        It is 1 inside a node, the fraction that the cards allow across nodes, and 0 when a node has one rank of the
        group. When only METP's ranks are replicas (of embedding and head), it is their collective's fraction. Where
        ZeRO 1 divides over groups of replicas, it is that of a group: it has more ranks in a node than the all-reduces
        between groups, which are all that ZeRO 2 and 3 have on that lane.
        """
        layout = self._layout
        group: Group = "grads" if layout.replicas > 1 else "ends"
        if layout.shard_copies > 1 and layout.shards > 1:
            group = SHARD if layout.zero == 1 else REPLICATE
        placement = place(group, degree(group, layout), layout, self._devices_per_node)
        if placement.per_node < 2 or not self._tables:
            return 0.0
        if placement.nodes == 1:
            return 1.0
        cards = self._net.nics_per_node / placement.together
        bus = self._inside("reduce_scatter", LARGE_BYTES, placement.per_node)[1]
        return min(1.0, self._net.nic_bytes_per_s.value * cards / bus)

    def p2p_seconds(self, work: PointToPoint, outside: set[str]) -> float:
        """Return the seconds that a rank of one pipeline stage takes to send to its peer on another stage."""
        placement = hop(work.source, work.target, self._layout, self._devices_per_node)
        return self._time("send_recv", work.bytes, placement, outside)

    def _time(self, kind: CollectiveKind, size_bytes: int, placement: Placement, outside: set[str]) -> float:
        if placement.ranks < 2 or size_bytes <= 0:
            return 0.0
        crossing = placement.nodes > 1
        alpha_s, bus, covered = self._inside(kind, size_bytes, placement.ranks)
        name = f"collective.{kind}"
        if not crossing:
            streaming = volume_factor(kind, placement.ranks) * size_bytes / bus
        else:
            streaming, covered = self._streaming_across(kind, size_bytes, placement)
            alpha_s += self._hops(kind, placement) * self._net.latency_s.value
            name = "network"
        if (not covered and streaming > alpha_s) or placement.nodes > CURVE_NODES:
            outside.add(name)
        return alpha_s + streaming

    def _inside(self, kind: CollectiveKind, size_bytes: int, ranks: int) -> tuple[float, float, bool]:
        """Return alpha, bus rate, and whether both were calibrated, for ``ranks`` ranks of one node."""
        tables = next((self._tables[like] for like in ALIKE[kind] if like in self._tables), None)
        if tables is None:
            known = ", ".join(sorted(self._tables)) or "none"
            raise Infeasible("the profile has not measured this collective", got=kind, wanted=known)
        logs = [entry[0] for entry in tables]
        asked = log2(ranks)
        alpha_s = between(logs, [entry[1] for entry in tables], asked)
        bus = between(logs, [entry[2](size_bytes) for entry in tables], asked)
        covered = logs[0] <= asked <= logs[-1] and all(entry[2].covers(size_bytes) for entry in tables)
        return alpha_s, bus, covered

    @property
    def _net(self) -> Network:
        if self._network is None:
            raise Infeasible(
                "a group of ranks does not fit on one node, and the cluster has no network",
                wanted="groups that fit on one node",
            )
        return self._network

    def _hops(self, kind: CollectiveKind, placement: Placement) -> int:
        """Return the number of node-to-node steps that a message takes one after another."""
        if kind in ("send_recv", "all_to_all"):
            return 1
        return (placement.nodes - 1) * (2 if kind == "all_reduce" else 1)

    def _streaming_across(self, kind: CollectiveKind, size_bytes: int, placement: Placement) -> tuple[float, bool]:
        """Return the transfer's seconds across nodes without latency, and whether the network's curve covers it."""
        cards = self._net.nics_per_node / placement.together
        if kind == "all_to_all":
            cards /= placement.per_node
        if kind in ("send_recv", "all_to_all"):
            cards = min(1.0, cards)
        whole = size_bytes * self._net.nics_per_node / cards
        efficiency, covered = 1.0, False
        if self._efficiency:
            efficiency, covered = self._efficiency(whole), self._efficiency.covers(whole)
        share = self._net.nic_bytes_per_s.value * efficiency * cards
        local = float("inf")
        if placement.per_node > 1:
            local = self._inside(kind, size_bytes, placement.per_node)[1]
        if kind == "all_to_all":
            out = (placement.ranks - placement.per_node) / placement.ranks * size_bytes / share
            stay = (placement.per_node - 1) / placement.ranks * size_bytes / local
            return max(out, stay), covered
        volume = volume_factor(kind, placement.ranks) * size_bytes
        if kind == "all_reduce" and placement.nodes == TREE_NODES:
            return max(size_bytes / share, volume / local), covered
        return volume / min(local, share), covered
