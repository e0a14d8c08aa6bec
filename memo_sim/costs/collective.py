"""Seconds of collectives and of pairwise exchanges, inside a node and across nodes.

    seconds = alpha + factor(ranks) * bytes / bus rate(bytes)

    factor   all-reduce 2(n-1)/n    all-gather, reduce-scatter, all-to-all (n-1)/n    broadcast, reduce, send+receive 1

``bytes`` is the whole tensor; for all-to-all what one rank holds. Inside a node alpha and bus rate come from the
profile's tables, interpolated in log ranks. A ring over several nodes runs at its slowest link: the lesser of the bus
rate among the group's ranks of one node and the group's share of the node's cards, which all groups of the node use at
once. Over two nodes an all-reduce is a tree where that is faster: the tensor crosses the network once each way, not
2(n-1)/n times, and the rate may pass the cards' (AddyLaddy, nccl#812; sjeaugey, nccl-tests#196; SimAI has it as well).
An all-to-all sends each rank's bytes for other nodes through that rank's own share of the cards, at most one card
(sjeaugey, nccl-tests#267), beside those that stay inside. Each node that a message passes adds the network's latency.

The network's efficiency by size is that of a ring over two whole nodes, which spreads a tensor over all of their cards.
Whoever has fewer cards is asked for at equal bytes per card, bytes x cards of a node / cards it can use:

    a node's cards / groups together    collectives        at most one card a rank    all-to-all, pairwise exchanges

More than two nodes are outside of what that curve tells.
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
from memo_sim.program.layout.rank_order import degree

ALIKE: dict[CollectiveKind, tuple[CollectiveKind, ...]] = {
    "all_reduce": ("all_reduce", "reduce_scatter", "all_gather"),
    "all_gather": ("all_gather", "reduce_scatter", "all_reduce"),
    "reduce_scatter": ("reduce_scatter", "all_gather", "all_reduce"),
    "broadcast": ("broadcast", "all_gather", "all_reduce"),
    "reduce": ("reduce", "reduce_scatter", "all_reduce"),
    "all_to_all": ("all_to_all", "send_recv"),
    "send_recv": ("send_recv", "all_to_all"),
}
"""Whose table serves a kind that the profile has not measured: a ring's bus rate does not depend on what it carries."""

LARGE_BYTES = 2**30
"""A tensor whose collective runs at the link's full rate."""

CURVE_NODES = 2
"""Nodes that the network's efficiency by size was measured on."""


TREE_NODES = 2
"""Nodes between which a tree's root and its child meet without any node in the middle."""


def volume_factor(kind: CollectiveKind, ranks: int) -> float:
    """Return how many times ``bytes`` cross the slowest link."""
    if kind == "all_reduce":
        return 2.0 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


class CollectiveTimes:
    """The collectives of one layout on one cluster."""

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
        """Return how long the collective takes for every rank of its group."""
        placement = place(work.group, work.ranks, self._layout, self._devices_per_node)
        return self._time(work.kind, work.bytes, placement, outside)

    def exchange_seconds(self, work: Exchange, outside: set[str]) -> float:
        """Return how long one hop of a ring takes: the slowest of its ranks sets the pace."""
        placement = place(work.group, work.ranks, self._layout, self._devices_per_node)
        return self._time("send_recv", work.bytes, placement, outside)

    @property
    def replica_link_share(self) -> float:
        """Fraction of a device's link inside its node that a large collective over the replicas takes while it runs.

        All of it inside a node; across nodes what the cards let through; none where a node has one rank of the group.
        Where METP's ranks alone are replicas, of embedding and head, it is theirs.
        """
        layout = self._layout
        group: Group = "grads" if layout.replicas > 1 else "ends"
        placement = place(group, degree(group, layout), layout, self._devices_per_node)
        if placement.per_node < 2 or not self._tables:
            return 0.0
        if placement.nodes == 1:
            return 1.0
        cards = self._net.nics_per_node / placement.together
        bus = self._inside("reduce_scatter", LARGE_BYTES, placement.per_node)[1]
        return min(1.0, self._net.nic_bytes_per_s.value * cards / bus)

    def p2p_seconds(self, work: PointToPoint, outside: set[str]) -> float:
        """Return how long a rank of one pipeline stage sends to its like of another."""
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
        """Return alpha, bus rate and whether they were calibrated, for ``ranks`` of one node."""
        tables = next((self._tables[like] for like in ALIKE[kind] if like in self._tables), None)
        if tables is None:
            known = ", ".join(sorted(self._tables)) or "none"
            raise Infeasible("the profile has no such collective", got=kind, wanted=known)
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
                "a group of ranks does not fit on one node, and there is no network", wanted="fewer ranks a group"
            )
        return self._network

    def _hops(self, kind: CollectiveKind, placement: Placement) -> int:
        """Return how often a message passes from node to node, one after the other."""
        if kind in ("send_recv", "all_to_all"):
            return 1
        return (placement.nodes - 1) * (2 if kind == "all_reduce" else 1)

    def _streaming_across(self, kind: CollectiveKind, size_bytes: int, placement: Placement) -> tuple[float, bool]:
        """Return the transfer's time over several nodes, and whether the network's curve covers it."""
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
