"""Prices collectives over several nodes: what a ring, a tree and the low-latency protocol cost by bytes and by nodes.

A ring over n ranks sends messages of bytes / n, one per step, so its messages get shorter and its steps more with every
node. Its time is that of its bytes at the cards' steady rate, plus an overhead:

    seconds = factor x bytes / (cards' rate x steady efficiency) + passes x overhead(bytes, ring) / rate of all cards

    factor (n-1)/n in each pass; passes: all-reduce 2, others 1

The overhead of a ring over whole nodes comes from the cluster's efficiency curves, which were measured over 2 nodes and
perhaps over more: overhead = (n-1)/n x (bytes / efficiency(bytes) - bytes / steady efficiency). Other rings are
compared with those by their latency, the time that one message takes around them (NCCL's model, ``tuning.cc``):

    latency = base + (steps inside nodes) x NVLink hop + (steps between nodes) x network latency

- Between measured rings the overhead at equal bytes is interpolated in the latency.
- A ring with r times the latency of the largest measured ring has r times that ring's overhead for bytes / r: equal
  bytes in each step. A ring over n nodes so has about the efficiency of one over 2 nodes at bytes x 2 / n. A ring
  shorter than any measured one follows the same rule.

NCCL takes the fastest of its algorithms, and so does this module:

    ring                every collective
    tree                all-reduce. Over two nodes the tensor crosses the network once each way, over more nodes twice.
                        Its latency grows with log2(nodes), and its rate is below a ring's. Where switches inside the
                        node do not reduce (A100), one channel a card limits it: over two nodes of A100 with four or
                        eight HDR cards all-reduces reach 86 to 91 and 192 GB/s, no more than a ring does
                        (nccl-tests#175, #100, nccl#1048, #812)
    low latency (LL)    short hops, at most half of the rate; in a ring for tensors smaller than any measured one

Bytes are those of a whole tensor spread over all cards of a node; a transfer with fewer cards asks at equal bytes per
card. Curves are read so that no message takes longer than a larger one, and that efficiency never falls with bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil, inf, log2

from memo_sim.contract.cluster import Network
from memo_sim.contract.hardware import Curve
from memo_sim.costs.curves import between

BASE_S = 8.4e-6
"""NCCL's base latency of a collective with the Simple protocol (NVIDIA/nccl@5067397c src/graph/tuning.cc)."""

NVLINK_RING_S = 3.4e-6
NVLINK_TREE_S = 4.0e-6
"""Latency of one NVLink hop with the Simple protocol (same source)."""

LL_NVLINK_S = 0.6e-6
"""Latency of one NVLink hop with the LL protocol (same source)."""

LL_RING_SHARE, LL_TREE_SHARE = 2.7 / 14.0, 5.0 / 14.0
"""Latency of a network hop with LL over that with Simple, in a ring and in a tree (same source)."""

LL_RING_RATE, LL_TREE_RATE = 0.5, 1.0 / 3.8
"""Rate with LL over a ring's with Simple (same source)."""

LL_BYTES_PER_S = 20e9
"""Highest bus rate with LL between nodes; NCCL has 19 to 39 GB/s by kind of host processor (same source)."""

TREE_RATE = 0.92
"""Rate of a tree over a ring's (same source)."""

TREE_CHANNEL_BYTES_PER_S = (23.6e9, 17.8e9)
"""Highest rate of one channel of a tree on A100 over two nodes, and over more (same source: ``perChMaxTreeBws``).

A channel sends and receives the tensor's share once each, so a tree of c channels takes 2 x bytes / (c x rate)."""

TREE_CORRECTION_BYTES = [2.0**22, 2.0**25, 2.0**26, 2.0**27, 2.0**28, 2.0**29]
TREE_CORRECTION = [0.7, 0.7, 0.8, 0.9, 0.9, 1.0]
"""NCCL's correction of a tree's rate by bytes (same source: ``treeCorrectionFactor``, Simple, 4 MiB and more)."""

TREE_NODES = 2
"""Number of nodes for which a tree has no intermediate node."""


@dataclass(frozen=True, slots=True)
class Path:
    """The way of a collective over several nodes.

    ``nodes`` with ``per_node`` ranks in each; ``bytes_per_s``: the group's share of the cards' rate in one direction;
    ``whole``: factor from the tensor's bytes to those of a tensor over all cards, at equal bytes per card.
    """

    nodes: int
    per_node: int
    bytes_per_s: float
    whole: float

    def latency_s(self, network_s: float) -> float:
        """Return the seconds that a message takes once around the group's ring."""
        return BASE_S + self.nodes * (self.per_node - 1) * NVLINK_RING_S + (self.nodes - 1) * network_s


class _Overhead:
    """Bytes that could have been sent in the overhead of a ring of ``ranks``, by bytes, from a curve of efficiency."""

    def __init__(self, curve: Curve, ranks: int, steady: float) -> None:
        best = 0.0
        times = []
        for size, efficiency in zip(curve.x, curve.y, strict=True):
            best = max(best, efficiency)
            times.append(size / best)
        for i in reversed(range(len(times) - 1)):
            times[i] = min(times[i], times[i + 1])
        self.first, self.last = curve.x[0], curve.x[-1]
        self._sizes = curve.x
        factor = (ranks - 1) / ranks
        self._bytes = [factor * (time - size / steady) for time, size in zip(times, curve.x, strict=True)]

    def __call__(self, size: float) -> float:
        return between(self._sizes, self._bytes, size)


class NetworkTimes:
    """Times of collectives over the nodes of one cluster."""

    def __init__(self, network: Network, devices_per_node: int) -> None:
        assert network.size_efficiency is not None, "load_cluster gives every network a curve"
        self._network = network
        self._node_bytes_per_s = network.node_bytes_per_s
        curves = {2: network.size_efficiency, **{more.nodes: more for more in network.efficiency_by_nodes}}
        self._steady = max(max(curve.y) for curve in curves.values())
        self.most_nodes = max(curves)
        self._rings = [_Overhead(curves[nodes], nodes * devices_per_node, self._steady) for nodes in sorted(curves)]
        self._latencies = [
            Path(nodes, devices_per_node, 0.0, 1.0).latency_s(network.latency_s.value) for nodes in sorted(curves)
        ]

    def covers(self, size_bytes: float, path: Path) -> bool:
        """Whether as many bytes per card were measured."""
        return self._rings[0].first <= size_bytes * path.whole <= self._rings[0].last

    def message_seconds(self, size_bytes: float, path: Path) -> float:
        """Return the seconds of bytes that one rank sends to another node, without latency.

        The efficiency is that of the shortest measured ring.
        """
        overhead = self._rings[0](size_bytes * path.whole) / self._node_bytes_per_s
        return size_bytes / (path.bytes_per_s * self._steady) + overhead

    def ring_seconds(
        self, size_bytes: float, factor: float, passes: int, path: Path, local_bytes_per_s: float
    ) -> float:
        """Return the seconds of a ring in which ``factor`` x bytes cross the slowest link in ``passes`` rounds.

        ``local_bytes_per_s``: bus rate among the ranks of one node.
        """
        rate = min(local_bytes_per_s, path.bytes_per_s * self._steady)
        overhead = self._overhead_bytes(size_bytes * path.whole, path.latency_s(self._network.latency_s.value))
        overhead_s = max(overhead / self._node_bytes_per_s, self._short_latency_s(path))
        return factor * size_bytes / rate + passes * overhead_s

    def short_ring_seconds(self, size_bytes: float, factor: float, passes: int, path: Path) -> float:
        """Return the seconds of a ring with the low-latency protocol, whose tensor goes round ``passes`` times.

        Infinite for sizes that were measured: what NCCL chose for those is in the curves.
        """
        if size_bytes * path.whole >= self._rings[0].first:
            return inf
        rate = min(LL_BYTES_PER_S, path.bytes_per_s * self._steady * LL_RING_RATE)
        return passes * self._short_latency_s(path) + factor * size_bytes / rate

    def tree_seconds(self, size_bytes: float, local_s: float, path: Path, *, in_switch: bool) -> float:
        """Return the seconds of an all-reduce over a tree; ``local_s``: the time that links inside a node need.

        ``in_switch``: whether switches inside the node reduce, so that channels do not limit the tree.
        """
        two = path.nodes == TREE_NODES
        crossings = 1 if two else 2
        if not in_switch:
            channels = path.bytes_per_s / self._network.nic_bytes_per_s.value
            rate = channels * TREE_CHANNEL_BYTES_PER_S[0 if two else 1]
            local_s = max(local_s, 2 * size_bytes / rate)
        levels = ceil(log2(path.nodes))
        network_s = self._network.latency_s.value
        rate = path.bytes_per_s * self._steady
        corrected = TREE_RATE * between(TREE_CORRECTION_BYTES, TREE_CORRECTION, size_bytes)
        simple = BASE_S + 2 * ((path.per_node - 1) * NVLINK_TREE_S + levels * network_s)
        simple += max(local_s, crossings * size_bytes / (rate * corrected))
        short = 2 * ((path.per_node - 1) * LL_NVLINK_S + levels * network_s * LL_TREE_SHARE)
        short += max(local_s, crossings * size_bytes / min(LL_BYTES_PER_S, rate * LL_TREE_RATE))
        return min(simple, short)

    def _short_latency_s(self, path: Path) -> float:
        """Return the seconds that a message takes around a ring with the low-latency protocol."""
        hop = self._network.latency_s.value * LL_RING_SHARE
        return path.nodes * (path.per_node - 1) * LL_NVLINK_S + (path.nodes - 1) * hop

    def _overhead_bytes(self, whole: float, latency_s: float) -> float:
        """Return the overhead of a ring, in bytes at the rate of a node's cards."""
        known = self._latencies
        i = bisect_right(known, latency_s)
        if 0 < i < len(known):
            share = (latency_s - known[i - 1]) / (known[i] - known[i - 1])
            below, above = self._measured(i - 1, whole), self._measured(i, whole)
            return below + share * (above - below)
        nearest = 0 if i == 0 else len(known) - 1
        longer = latency_s / known[nearest]
        return self._measured(nearest, whole / longer) * longer

    def _measured(self, ring: int, whole: float) -> float:
        """Return a measured ring's overhead, at least that of every shorter ring."""
        return max(shorter(whole) for shorter in self._rings[: ring + 1])
