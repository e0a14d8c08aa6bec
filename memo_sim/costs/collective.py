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

from functools import cached_property
from math import log2
from typing import Literal

from memo_sim.contract.cluster import Cluster, Network
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import CollectiveKind, Hardware
from memo_sim.contract.plan import Layout
from memo_sim.costs.contention import Demands, Link
from memo_sim.costs.curves import LogCurve, between
from memo_sim.costs.placement import Placement, hop, place
from memo_sim.program.ir.instruction import COLLECTIVE_LANES, Lane
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
"""Tables to use for each kind, in order of preference; a ring's bus rate hardly depends on what it carries."""

LARGE_BYTES = 2**30
"""Bytes of a tensor whose collective runs at the link's full rate."""

KINDS: dict[Group, CollectiveKind] = {"ulysses": "all_to_all", "cp": "all_gather", "metp": "broadcast"}
"""The kind that stands for a group's collectives where links are shared; ``reduce_scatter`` for all other groups."""

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

    @cached_property
    def demands(self) -> Demands:
        """The fractions of links that large transfers of each lane use while they run alone (``contention.py``).

        A group inside a node uses all of a device's link. Across nodes it uses the cards that its size and place allow,
        and of the link inside the node as much as keeps up with them. A collective and a hop of a ring use both
        directions, and a transfer between pipeline stages uses one.
        """
        layout = self._layout
        found: dict[Lane, dict[Link, float]] = {}
        if not self._tables:
            return found
        for group, lane in COLLECTIVE_LANES.items():
            if degree(group, layout) > 1:
                placement = place(group, degree(group, layout), layout, self._devices_per_node)
                node, network = self._used(KINDS.get(group, "reduce_scatter"), placement)
                found[lane] = _shares(node, network, "out") | _shares(node, network, "in")
        ring: Group = "metp" if layout.metp > 1 else "cp"
        if degree(ring, layout) > 1:
            placement = place(ring, degree(ring, layout), layout, self._devices_per_node)
            node, network = self._used("send_recv", placement)
            found[Lane.P2P] = _shares(node, network, "out") | _shares(node, network, "in")
        if layout.pp > 1:
            hops = {hop(i, i + 1, layout, self._devices_per_node) for i in range(layout.pp - 1)}
            node, network = map(max, zip(*(self._used("send_recv", each) for each in hops), strict=True))
            found[Lane.SEND] = _shares(node, network, "out")
            found[Lane.RECV] = _shares(node, network, "in")
        return found

    def _used(self, kind: CollectiveKind, placement: Placement) -> tuple[float, float]:
        """Return the fractions of a device's link in its node, and of the node's cards, that a large transfer uses."""
        if placement.nodes == 1:
            return 1.0, 0.0
        if self._network is None:
            return 0.0, 0.0
        cards = self._cards(kind, placement)
        senders = placement.together * (placement.per_node if kind == "all_to_all" else 1)
        network = cards * senders / self._network.nics_per_node
        if placement.per_node < 2:
            return 0.0, network
        bytes_per_s = self._network.nic_bytes_per_s.value * cards
        if kind == "all_to_all":
            bytes_per_s *= (placement.per_node - 1) / (placement.ranks - placement.per_node)
        return min(1.0, bytes_per_s / self._inside(kind, LARGE_BYTES, placement.per_node)[1]), network

    def _cards(self, kind: CollectiveKind, placement: Placement) -> float:
        """Return how many of a node's cards the group uses, or one rank of it in an all-to-all or p2p transfer."""
        cards = self._net.nics_per_node / placement.together
        if kind == "all_to_all":
            cards /= placement.per_node
        return min(1.0, cards) if kind in ("send_recv", "all_to_all") else cards

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
        cards = self._cards(kind, placement)
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


def _shares(node: float, network: float, direction: Literal["out", "in"]) -> dict[Link, float]:
    """Return the used fractions of the links in one direction, without links that are not used."""
    links: dict[Link, float] = (
        {"node out": node, "network out": network} if direction == "out" else {"node in": node, "network in": network}
    )
    return {link: share for link, share in links.items() if share}
