"""Prices collectives and p2p transfers, inside a node and across nodes.

    seconds = alpha + factor(ranks) * bytes / bus rate(bytes)

    factor   all-reduce 2(n-1)/n    all-gather, reduce-scatter, all-to-all (n-1)/n    broadcast, reduce, send+receive 1

``bytes`` is the size of the whole tensor; for an all-to-all, it is what one rank holds.

Inside a node, alpha and bus rate come from the profile's tables, interpolated in log ranks.

Across nodes (``network.py`` has rings, trees and protocols; the fastest is taken):

- A ring runs at its slowest link. That is the lower of the bus rate among the group's ranks in one node, and the
  group's share of the node's cards, which all groups of the node use at once.
- Over two nodes, an all-reduce is a tree when a tree is faster. The tensor then crosses the network once in each
  direction instead of 2(n-1)/n times, and the bus rate may exceed the cards' rate (AddyLaddy, nccl#812; sjeaugey,
  nccl-tests#196; SimAI models it too), if the tree's channels or switches that reduce allow it.
- In an all-to-all, each rank sends its bytes for other nodes through its own share of the cards, at most one card
  (sjeaugey, nccl-tests#267). Bytes for the same node move at the same time.
- An exchange or an all-to-all over n nodes takes as long as the slowest of n transfers, if the network says how much
  their times deviate (``pace.slowest``).
- A transfer that leaves its leaf switch has 1 / ``oversubscription`` of the rate, as if every link to the spine were
  in use.

The network's efficiency curves were measured with rings over whole nodes, which spread a tensor over all their cards. A
transfer with fewer cards reads them at equal bytes per card: bytes x cards of a node / usable cards.

    usable cards     collectives: a node's cards / groups per node     all-to-all, p2p: at most one card per rank

All-to-alls over more than two nodes are outside the calibrated range, and rings over more nodes than were measured.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import log2
from typing import Literal

from memo_sim.contract.cluster import Cluster, Network
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import CollectiveKind, Hardware
from memo_sim.contract.plan import Layout
from memo_sim.costs.contention import Demands, Link
from memo_sim.costs.curves import LogCurve, between
from memo_sim.costs.network import NetworkTimes, Path
from memo_sim.costs.pace import slowest
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

KINDS: dict[Group, CollectiveKind] = {
    "ulysses": "all_to_all",
    "ep": "all_to_all",
    "cp": "all_gather",
    "metp": "broadcast",
}
"""The kind that stands for a group's collectives where links are shared; ``reduce_scatter`` for all other groups."""

RING_AND_REDUCED: tuple[CollectiveKind, CollectiveKind] = ("all_gather", "all_reduce")
IN_SWITCH = 1.1
"""Bus rate of an all-reduce over an all-gather's inside a node, above which switches reduce; measured: 1.3 on H200."""

MESSAGE_NODES = 2
"""Number of nodes that an all-to-all's efficiency is known for."""


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
        self._across = NetworkTimes(cluster.network, cluster.devices_per_node) if cluster.network else None
        self._copies: dict[Lane, float] = {}
        """Rates of large copies on the links of a node, where devices reach each other over those to the host."""
        if hardware.peers_over_host_link:
            self._copies = {Lane.D2H: hardware.d2h.alone.y[-1], Lane.H2D: hardware.h2d.alone.y[-1]}
        self._tables: dict[CollectiveKind, list[tuple[float, float, LogCurve]]] = {}
        for table in sorted(hardware.collectives, key=lambda table: table.ranks):
            entry = (log2(table.ranks), table.alpha_s, LogCurve.of(table.bus_bytes_per_s))
            self._tables.setdefault(table.kind, []).append(entry)

    def seconds(self, work: Collective, outside: set[str]) -> float:
        """Return the seconds that the collective takes on every rank of its group; each call starts anew."""
        placement = place(work.group, work.ranks, self._layout, self._devices_per_node)
        calls = work.calls or ((work.kind, work.bytes),)
        return sum(self._time(kind, size, placement, outside) for kind, size in calls)

    def exchange_seconds(self, work: Exchange, outside: set[str]) -> float:
        """Return the seconds of one hop of a ring exchange; the slowest rank sets the pace."""
        placement = self._hops(work.group, work.ranks, work.distance)
        return self._time("send_recv", work.bytes, placement, outside)

    def _hops(self, group: Group, ranks: int, distance: int) -> Placement:
        """Return the placement of a group's hops to ranks ``distance`` away.

        As many ranks of a node send to another one as the distance, or its rest to the whole ring, has; they share the
        node's cards.
        """
        placement = place(group, ranks, self._layout, self._devices_per_node)
        away = min(distance, ranks - distance, placement.per_node)
        return replace(placement, together=placement.together * away) if placement.nodes > 1 else placement

    @cached_property
    def demands(self) -> Demands:
        """The fractions of links that large transfers of each lane use while they run alone (``contention.py``).

        A device's link inside its node carries at most what the fastest measured transfer moves through it. A group
        inside a node uses the fraction that its own rate is of that. Across nodes it uses the cards that its size and
        place allow, and of the link inside the node as much as keeps up with them. A collective and a hop of a ring use
        both directions, and a transfer between pipeline stages or a copy on the same link (``peers_over_host_link``)
        uses one.
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
        rings: list[tuple[Group, int]] = [("metp" if layout.metp > 1 else "cp", 1)]
        if layout.tp_overlap == "chunked":
            rings.append(("tp", layout.tp // 2))
        used = [
            self._used("send_recv", self._hops(ring, degree(ring, layout), distance))
            for ring, distance in rings
            if degree(ring, layout) > 1
        ]
        if used:
            node, network = map(max, zip(*used, strict=True))
            found[Lane.P2P] = _shares(node, network, "out") | _shares(node, network, "in")
        if layout.pp > 1:
            hops = {hop(i, i + 1, layout, self._devices_per_node) for i in range(layout.pp - 1)}
            node, network = map(max, zip(*(self._used("send_recv", each) for each in hops), strict=True))
            found[Lane.SEND] = _shares(node, network, "out")
            found[Lane.RECV] = _shares(node, network, "in")
        for lane, bytes_per_s in self._copies.items():
            found[lane] = _shares(bytes_per_s / self._link_bytes_per_s, 0.0, "out" if lane is Lane.D2H else "in")
        return found

    def _used(self, kind: CollectiveKind, placement: Placement) -> tuple[float, float]:
        """Return the fractions of a device's link in its node, and of the node's cards, that a large transfer uses."""
        if placement.nodes == 1:
            return self._inside(kind, LARGE_BYTES, placement.ranks)[1] / self._link_bytes_per_s, 0.0
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
        bytes_per_s = min(bytes_per_s, self._inside(kind, LARGE_BYTES, placement.per_node)[1])
        return bytes_per_s / self._link_bytes_per_s, network

    @cached_property
    def _link_bytes_per_s(self) -> float:
        """The most that a device's link inside its node carries in one direction: the highest measured bus rate, or
        that of copies on the same link.

        An all-reduce counts only where nothing else was measured. Where switches add (NVLS), its bus rate is higher
        than what the links carry.
        """
        rates = {kind: max(curve(LARGE_BYTES) for _, _, curve in tables) for kind, tables in self._tables.items()}
        most = max((rate for kind, rate in rates.items() if kind != "all_reduce"), default=rates.get("all_reduce", 1.0))
        return max(most, *self._copies.values()) if self._copies else most

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
        if placement.nodes > 1:
            return self._time_across(kind, size_bytes, placement, outside)
        alpha_s, bus, covered = self._inside(kind, size_bytes, placement.ranks)
        streaming = volume_factor(kind, placement.ranks) * size_bytes / bus
        if not covered and streaming > alpha_s:
            outside.add(f"collective.{kind}")
        return alpha_s + streaming

    def _inside(self, kind: CollectiveKind, size_bytes: int, ranks: int) -> tuple[float, float, bool]:
        """Return alpha, bus rate, and whether both were calibrated, for ``ranks`` ranks of one node."""
        tables = next((self._tables[like] for like in ALIKE[kind] if like in self._tables), None)
        if tables is None:
            known = ", ".join(sorted(self._tables)) or "none"
            raise Infeasible(
                "the profile has not measured this collective",
                got=kind,
                wanted=known,
                hint="memo-exec calibrate under torchrun measures them between the devices of a node",
            )
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
                hint="a cluster with network cards (h100-2x8-ndr8), or a cluster file with a network",
            )
        return self._network

    def _time_across(self, kind: CollectiveKind, size_bytes: int, placement: Placement, outside: set[str]) -> float:
        """Return the seconds of a collective or p2p transfer over several nodes."""
        net, across = self._net, self._across
        assert across is not None
        path = self._path(kind, placement)
        alpha_s, local, _ = self._inside(kind, size_bytes, max(2, placement.per_node))
        local = local if placement.per_node > 1 else float("inf")
        measured_nodes = across.most_nodes
        if kind in ("send_recv", "all_to_all"):
            fastest_s = alpha_s + net.latency_s.value
            seconds = fastest_s + self._messages(kind, size_bytes, placement, path, local)
            measured_nodes = MESSAGE_NODES if kind == "all_to_all" else placement.nodes
        else:
            passes = 2 if kind == "all_reduce" else 1
            factor = volume_factor(kind, placement.ranks)
            fastest_s = alpha_s
            ways = [
                across.ring_seconds(size_bytes, factor, passes, path, local),
                alpha_s + across.short_ring_seconds(size_bytes, factor, passes, path),
            ]
            if kind == "all_reduce":
                local_s = factor * size_bytes / local
                in_switch = self._reduces_in_switch(placement.per_node)
                ways.append(alpha_s + across.tree_seconds(size_bytes, local_s, path, in_switch=in_switch))
            seconds = min(ways)
        if placement.nodes > measured_nodes or (not across.covers(size_bytes, path) and seconds > 2 * fastest_s):
            outside.add("network")
        return seconds

    def _reduces_in_switch(self, per_node: int) -> bool:
        """Whether switches inside a node reduce (NVLink SHARP); all-reduces then have a higher bus rate than rings."""
        if per_node < 2 or "all_gather" not in self._tables:
            return False
        ring, reduced = (self._inside(kind, LARGE_BYTES, per_node)[1] for kind in RING_AND_REDUCED)
        return reduced > IN_SWITCH * ring

    def _path(self, kind: CollectiveKind, placement: Placement) -> Path:
        """Return the group's share of the cards, and what its bytes are on all cards of a node."""
        net = self._net
        cards = self._cards(kind, placement)
        rate = net.nic_bytes_per_s.value * cards
        if placement.span > net.nodes_per_leaf:
            rate /= net.oversubscription
        return Path(placement.nodes, placement.per_node, rate, net.nics_per_node / cards)

    def _messages(
        self, kind: CollectiveKind, size_bytes: int, placement: Placement, path: Path, local_bytes_per_s: float
    ) -> float:
        """Return the seconds of a hop or an all-to-all without latency; the slowest node's transfer sets the pace."""
        assert self._across is not None
        deviation = self._net.transfer_deviation
        slow = 1.0 + deviation.value * slowest(placement.nodes) if deviation else 1.0
        away_s = slow * self._across.message_seconds(size_bytes, path)
        if kind == "send_recv":
            return away_s
        stay = (placement.per_node - 1) / placement.ranks * size_bytes / local_bytes_per_s
        return max((placement.ranks - placement.per_node) / placement.ranks * away_s, stay)


def _shares(node: float, network: float, direction: Literal["out", "in"]) -> dict[Link, float]:
    """Return the used fractions of the links in one direction, without links that are not used."""
    links: dict[Link, float] = (
        {"node out": node, "network out": network} if direction == "out" else {"node in": node, "network in": network}
    )
    return {link: share for link, share in links.items() if share}
