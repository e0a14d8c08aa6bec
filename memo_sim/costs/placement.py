"""Where the ranks of a group lie: in one node or over several, and what leaves a node at the same time.

Ranks are ordered as ``program/ranks.py`` says.

    tp 4, cp 2, dp 2 on nodes of eight:   node 0 [0 1 2 3 | 4 5 6 7]   node 1 [8 9 10 11 | 12 13 14 15]
    tp group of rank 0: 0 1 2 3    cp: 0 4    dp: 0 8    grads: 0 4 8 12 (two a node; four such groups share its cards)
"""

from __future__ import annotations

from dataclasses import dataclass

from memo_sim.contract.plan import Layout
from memo_sim.program.ir.work import Group
from memo_sim.program.layout.rank_order import stride


@dataclass(frozen=True, slots=True)
class Placement:
    """A group of ``ranks`` on ``nodes`` nodes, ``per_node`` of them in each; ``together`` such groups share a node."""

    ranks: int
    per_node: int
    nodes: int
    together: int


def hop(source: int, target: int, layout: Layout, devices_per_node: int) -> Placement:
    """Return where a pair of ranks lies that hand over from one pipeline stage to another: across nodes if any pair is.

    All ranks of the stage hand over at once, so those of one node share its cards.
    """
    step = stride("pp", layout)
    ranks = range(source * step, (source + 1) * step)
    away = any(r // devices_per_node != (r + (target - source) * step) // devices_per_node for r in ranks)
    return Placement(2, 1 if away else 2, 2 if away else 1, min(step, devices_per_node))


def place(group: Group, ranks: int, layout: Layout, devices_per_node: int) -> Placement:
    """Return where a group of ``ranks`` lies on nodes of ``devices_per_node``."""
    per_node = min(ranks, max(1, -(-devices_per_node // stride(group, layout))))
    used = min(devices_per_node, layout.devices)
    return Placement(ranks, per_node, -(-ranks // per_node), max(1, used // per_node))
