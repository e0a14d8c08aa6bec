"""How busy lanes slow each other: the lanes of one rank, and the copies of all devices of a node.

All ranks of a node do the same at the same time, because one representative rank plays each pipeline stage. A busy copy
lane therefore means that all local devices copy in that direction. A device's copy gets the lowest of these rates:

    its link                alone, or ``duplex`` while the other direction runs; divided by the devices on one PCIe
    uplink its share of the node   ``all_devices`` x the profile's devices is what the node carries in one direction its
    share of the host   ``host_copy_bytes_per_s`` is for all copies of all local devices in both directions, and for the
    optimizer's updates on the host beside them

Compute runs slower beside copies, collectives and p2p exchanges, by the factors of ``compute_slowdown``. The factors
multiply, because these use different resources. The two collective lanes use the same resource and count once.

Collectives share links inside a node:

- A collective over the replicas runs beside a layer's collective or a ring exchange. Together they demand ``1 +
  replica_link_share`` of the link; each gets the same fraction of its demand.
- METP's broadcasts and reductions use the links of the ring. So do RSA's sums of the gradients of keys and values. Both
  these collectives and the ring exchange demand the whole link.

Multipliers are rates relative to the instruction running alone, in (0, 1].
"""

from __future__ import annotations

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.costs.host_update import node_bytes_per_s
from memo_sim.program.ir.instruction import Lane

COPY = (1 << Lane.D2H) | (1 << Lane.H2D)
P2P = (1 << Lane.P2P) | (1 << Lane.SEND) | (1 << Lane.RECV)
COLLECTIVE = (1 << Lane.COLLECTIVE) | (1 << Lane.REPLICA)
LAYERS = (Lane.COLLECTIVE, Lane.P2P)
"""Lanes of the layers' communication, which may share links with the replicas' collectives."""


class NodeRates:
    """Rate multipliers of a rank's lanes, by the set of busy lanes."""

    def __init__(
        self,
        hardware: Hardware,
        cluster: Cluster,
        local_devices: int | None = None,
        *,
        replica_link_share: float = 0.0,
        ring_shares_links: bool = False,
    ) -> None:
        """``local_devices``: devices of one node that take part; default all.

        ``replica_link_share``: fraction of a device's link inside the node that a replica collective uses, in [0, 1].
        ``ring_shares_links``: whether a ring exchange uses the same links as a layer's collectives.
        """
        self._replica_link_share = replica_link_share
        self._ring_shares_links = ring_shares_links
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
        for lane in self._on_links(busy):
            slowed[lane] = 1.0 / self._links_asked(busy)
        d2h, h2d = bool(busy & (1 << Lane.D2H)), bool(busy & (1 << Lane.H2D))
        down = self._link(Lane.D2H, both=h2d) if d2h else 0.0
        up = self._link(Lane.H2D, both=d2h) if h2d else 0.0
        share = self._hardware.host_copy_bytes_per_s.value / self.local_devices
        host = min(share, self._host_update / self.local_devices) if busy & (1 << Lane.HOST) else 0.0
        left = min(1.0, share / (down + up + host)) if busy & (COPY | (1 << Lane.HOST)) else 1.0
        for lane, rate in ((Lane.D2H, down), (Lane.H2D, up)):
            if rate:
                slowed[lane] = min(1.0, rate * left / self._alone(lane))
        if host:
            slowed[Lane.HOST] = left
        return tuple(slowed)

    def _on_links(self, busy: int) -> list[Lane]:
        """Return the busy lanes that share links with another busy lane; may be empty."""
        layers = [lane for lane in LAYERS if busy & (1 << lane)]
        if layers and busy & (1 << Lane.REPLICA):
            return [*layers, Lane.REPLICA]
        return layers if self._ring_shares_links else []

    def _links_asked(self, busy: int) -> float:
        """Return the total demand on a device's links, of layers and replicas, in links."""
        layers = sum(bool(busy & (1 << lane)) for lane in LAYERS)
        asked = float(layers if self._ring_shares_links else min(1, layers))
        return asked + (self._replica_link_share if busy & (1 << Lane.REPLICA) else 0.0)

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
