"""Where the ranks of a group lie: in one node or over several nodes, and how many groups share a node's cards.

Ranks are ordered as in ``program/layout/rank_order.py``.

    tp 4, cp 2, dp 2 on nodes of eight:   node 0 [0 1 2 3 | 4 5 6 7]   node 1 [8 9 10 11 | 12 13 14 15]
    groups of rank 0:   tp 0 1 2 3    cp 0 4    dp 0 8    grads 0 4 8 12 (two ranks per node; four such groups share its
    cards)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memo_sim.contract.plan import Layout
from memo_sim.program.ir.work import Group
from memo_sim.program.layout.rank_order import (
    EXPERT_REPLICATE,
    EXPERT_SHARD,
    REPLICATE,
    SHARD,
    degree,
    stride,
)


@dataclass(frozen=True, slots=True)
class Placement:
    """A group of ``ranks`` ranks over ``nodes`` nodes, ``per_node`` in each; ``together`` such groups share a node.

    ``span``: nodes from its first to its last, with those that it passes over.
    """

    ranks: int
    per_node: int
    nodes: int
    together: int
    span: int


def hop(source: int, target: int, layout: Layout, devices_per_node: int) -> Placement:
    """Return the placement of a p2p pair between two pipeline stages; it crosses nodes if any pair of ranks does.

    All ranks of the stage send at the same time, so those of one node share its cards.
    """
    step = stride("pp", layout)
    ranks = range(source * step, (source + 1) * step)
    away = any(r // devices_per_node != (r + (target - source) * step) // devices_per_node for r in ranks)
    span = 1 + -(-abs(target - source) * step // devices_per_node) if away else 1
    return Placement(2, 1 if away else 2, 2 if away else 1, min(step, devices_per_node), span)


def place(group: Group, ranks: int, layout: Layout, devices_per_node: int) -> Placement:
    """Return the placement of a group of ``ranks`` ranks on nodes of ``devices_per_node`` devices."""
    if group in (SHARD, REPLICATE, EXPERT_SHARD, EXPERT_REPLICATE):
        return _widest(group, layout, devices_per_node)
    per_node = min(ranks, max(1, -(-devices_per_node // stride(group, layout))))
    used = min(devices_per_node, layout.devices)
    nodes = -(-ranks // per_node)
    span = nodes if nodes == 1 else max(nodes, -(-ranks * stride(group, layout) // devices_per_node))
    return Placement(ranks, per_node, nodes, max(1, used // per_node), span)


def _widest(group: Group, layout: Layout, devices_per_node: int) -> Placement:
    """Return the placement of the group that lies on most nodes, with the most groups that share a node's cards there.

    Groups of ``zero_ranks`` replicas may begin anywhere in a node, so ranks are counted. All groups of a layout run at
    the same time, and ranks wait for the slowest.

        zero_ranks 6 on nodes of eight:   node 0 [0 0 0 0 0 0 1 1]   node 1 [1 1 1 1 2 2 2 2]   group 1 is on two nodes
    """
    step, ranks = stride(group, layout), degree(group, layout)
    every = np.arange(layout.devices)
    nodes = (every[every // step % ranks == 0, np.newaxis] + step * np.arange(ranks)) // devices_per_node
    # A group's ranks go up, and so do its nodes.
    begins = np.diff(nodes, axis=1, prepend=-1) > 0
    counts = begins.sum(axis=1)
    most = int(counts.max())
    of_widest = nodes[int(counts.argmax())]
    among = counts == most
    together = np.bincount(nodes[among][begins[among]])
    span = int(of_widest[-1] - of_widest[0]) + 1
    return Placement(ranks, int(np.bincount(of_widest).max()), most, int(together.max()), span)
