"""How busy lanes slow each other: the lanes of one rank, and the copies of all devices of a node.

All ranks of a node do the same at the same time, because one representative rank plays each pipeline stage. A busy copy
lane therefore means that all local devices copy in that direction. A device's copy gets the lowest of these rates:

    its link                alone, or ``duplex`` while the other direction runs; divided by the devices on one PCIe
    uplink its share of the node   ``all_devices`` x the profile's devices is what the node carries in one direction its
    share of the host   ``host_copy_bytes_per_s`` is for all copies of all local devices in both directions, and for the
    optimizer's updates on the host beside them

Compute runs slower beside copies, collectives and p2p transfers, by the factors of ``compute_slowdown``. The factors
multiply, because these use different resources. All collectives use the same resource and count once.

Communicators run beside each other and share links: those of a device inside its node, and the node's network cards. A
large transfer that runs alone uses a known fraction of each link, its demand (``CollectiveTimes.demands``). Where lanes
together demand more than a link has, each gets the same fraction of its demand:

    all-to-all inside the node     node 0.8                   together: node 1.2, so each runs at 1 / 1.2
    gather over several nodes      node 0.4, network 1.0
    send to another node           network 1.0                beside the all-to-all: no link is shared, each runs at 1

A link's two directions are shared apart: a collective uses both, a send one, and a receive the other. Where devices
reach each other over PCIe (``Hardware.peers_over_host_link``), copies from and to the host demand these links, too.

Multipliers are rates relative to the instruction running alone, in (0, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.costs.host_update import node_bytes_per_s
from memo_sim.program.ir.instruction import COLLECTIVE_LANES, Lane

COPY = (1 << Lane.D2H) | (1 << Lane.H2D)
P2P = (1 << Lane.P2P) | (1 << Lane.SEND) | (1 << Lane.RECV)
COLLECTIVE = sum(1 << lane for lane in COLLECTIVE_LANES.values())

Link = Literal["node out", "node in", "network out", "network in"]
"""A device's links inside its node, or its node's network cards; one direction of them."""
Demands = Mapping[Lane, Mapping[Link, float]]
"""By lane: the fraction of each link, in [0, 1], that its transfers use when they run alone."""


class NodeRates:
    """Rate multipliers of a rank's lanes, by the set of busy lanes."""

    def __init__(
        self,
        hardware: Hardware,
        cluster: Cluster,
        local_devices: int | None = None,
        *,
        demands: Demands | None = None,
    ) -> None:
        """``local_devices``: devices of one node that take part; default all.

        ``demands``: what lanes use of the links; without it, no transfers slow each other.
        """
        self._demands = demands or {}
        self._hardware = hardware
        self._host_update = node_bytes_per_s(hardware)
        self.local_devices = local_devices or cluster.devices_per_node
        self._known: dict[int, tuple[float, ...]] = {}

    def rates(self, busy: int) -> tuple[float, ...]:
        """Return each lane's multiplier, indexed by ``Lane``; idle lanes have 1. ``busy`` has bits ``1 << lane``."""
        found = self._known.get(busy)
        if found is None:
            found = self._known[busy] = self._rates(busy)
        return found

    def _rates(self, busy: int) -> tuple[float, ...]:
        slowed = [1.0] * len(Lane)
        if busy & (1 << Lane.COMPUTE):
            slowed[Lane.COMPUTE] = self._compute(busy)
        for lane, rate in self._on_links(busy).items():
            slowed[lane] = rate
        d2h, h2d = bool(busy & (1 << Lane.D2H)), bool(busy & (1 << Lane.H2D))
        down = self._link(Lane.D2H, both=h2d) if d2h else 0.0
        up = self._link(Lane.H2D, both=d2h) if h2d else 0.0
        share = self._hardware.host_copy_bytes_per_s.value / self.local_devices
        host = min(share, self._host_update / self.local_devices) if busy & (1 << Lane.HOST) else 0.0
        left = min(1.0, share / (down + up + host)) if busy & (COPY | (1 << Lane.HOST)) else 1.0
        for lane, rate in ((Lane.D2H, down), (Lane.H2D, up)):
            if rate:
                slowed[lane] = min(slowed[lane], rate * left / self._alone(lane))
        if host:
            slowed[Lane.HOST] = left
        return tuple(slowed)

    def _on_links(self, busy: int) -> dict[Lane, float]:
        """Return the rates of the busy lanes that transfer; a lane has the rate of its fullest link."""
        on = {lane: demands for lane, demands in self._demands.items() if busy & (1 << lane)}
        asked: dict[Link, float] = {}
        for demands in on.values():
            for link, demand in demands.items():
                asked[link] = asked.get(link, 0.0) + demand
        return {lane: 1.0 / max([1.0, *(asked[link] for link in demands)]) for lane, demands in on.items()}

    def _compute(self, busy: int) -> float:
        slowdown = self._hardware.compute_slowdown
        factor = 1.0
        for name, lanes in (("copy", COPY), ("collective", COLLECTIVE), ("p2p", P2P)):
            if busy & lanes and name in slowdown:
                factor *= slowdown[name].value
        return 1.0 / factor

    def _alone(self, lane: Lane) -> float:
        """Return the rate of a large copy that runs alone, in bytes/s."""
        return (self._hardware.d2h if lane is Lane.D2H else self._hardware.h2d).alone.y[-1]

    def _link(self, lane: Lane, *, both: bool) -> float:
        """Return the rate of a large copy beside those of other devices, before host memory is shared, in bytes/s."""
        hardware = self._hardware
        copies = hardware.d2h if lane is Lane.D2H else hardware.h2d
        alone = self._alone(lane)
        link = min(alone, copies.duplex.value) if both else alone
        sharing = min(self.local_devices, max(1, round(hardware.devices_per_uplink.value)))
        node = copies.all_devices.value * hardware.devices
        return min(link / sharing, node / self.local_devices)
