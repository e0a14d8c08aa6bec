"""Order of ranks in a layout: the mesh coordinates of a rank and the members of its groups.

Both the prices of collectives and the process groups use this order. The tensor-parallel coordinate varies fastest,
then METP, Ulysses, context-parallel and data-parallel; the pipeline stage varies slowest. The stride of a group is the
distance between its consecutive ranks:

    tp        1
    metp      tp
    ulysses   tp*metp
    cp        tp*metp*ulysses
    dp        tp*metp*ulysses*cp
    pp        tp*metp*ulysses*cp*dp
    grads     tp*metp    ranks that hold the same parameters of a layer: ulysses x cp x dp
    ends      tp         ranks that hold the same embedding and head: metp x ulysses x cp x dp
    shard     tp*metp    consecutive ranks of grads that ZeRO shards over, if not over all of them (zero_ranks)
    replicate tp*metp*zero_ranks     ranks of grads that hold the same shard
    ep        tp*metp    consecutive ranks of grads that divide a layer's experts, as in Megatron-LM
    expert_grads  tp*metp*ep         ranks of grads that hold the same experts
    expert_shard     tp*metp*ep      consecutive ranks of expert_grads inside a shard group, which share experts' states
    expert_replicate tp*metp*zero_ranks     ranks of expert_grads that hold the same shard of the same experts
    with expert_tp 1, ep and expert_grads divide the ranks of tp as well: strides 1 and ep

    tp 4, cp 2, dp 2:   tp group of rank 0: 0 1 2 3    cp: 0 4    dp: 0 8    grads: 0 4 8 12
    with zero_ranks 2:  shard group of rank 0: 0 4    replicate: 0 8
    with ep 2:          ep group of rank 0: 0 4    expert_grads: 0 8
    with ep 8, expert_tp 1:   ep group of rank 0: 0 1 2 3 4 5 6 7    expert_grads: 0 8
"""

from __future__ import annotations

from math import gcd, prod
from typing import Literal

from memo_sim.contract.plan import Layout

AXES = ("tp", "metp", "ulysses", "cp", "dp", "pp")
"""Axes of a layout, the fastest-varying one first."""

TIED = "tied"
"""The group of one rank on the first and one on the last pipeline stage, which hold a tied embedding."""
GRADS: Literal["grads"] = "grads"
"""The group that spans ulysses, cp and dp."""
ENDS = "ends"
"""The group that spans metp, ulysses, cp and dp."""
SHARD: Literal["shard"] = "shard"
"""The group of ``Layout.shards`` consecutive ranks of ``grads`` that ZeRO shards over (torch's dp_shard)."""
REPLICATE: Literal["replicate"] = "replicate"
"""The group of ranks of ``grads`` that hold the same shard, one of each group that shards (torch's dp_replicate)."""

EP: Literal["ep"] = "ep"
"""The group of ``Layout.ep`` consecutive ranks of ``grads`` that divide the experts of a layer.

Where ranks of tp have whole experts, they are among these (``Layout.whole_experts``)."""
EXPERT_GRADS: Literal["expert_grads"] = "expert_grads"
"""The group of ranks that hold the same experts, one of each ``ep`` group."""
EXPERT_SHARD: Literal["expert_shard"] = "expert_shard"
"""The group of ``Layout.expert_shards`` consecutive ranks of ``expert_grads`` that ZeRO shards over."""
EXPERT_REPLICATE: Literal["expert_replicate"] = "expert_replicate"
"""The group of ranks of ``expert_grads`` that hold the same shard."""


def stride(group: str, layout: Layout) -> int:
    """Return the distance between consecutive ranks of ``group``: an axis, or one of the groups named above."""
    if group == TIED:
        return stride("pp", layout) * max(1, layout.pp - 1)
    if group == REPLICATE:
        return stride(GRADS, layout) * layout.shards
    if group in (EXPERT_GRADS, EXPERT_SHARD, EXPERT_REPLICATE):
        apart = stride(EP, layout) * layout.ep
        return apart * (layout.expert_shards if group == EXPERT_REPLICATE else 1)
    if group == EP and layout.whole_experts:
        return 1
    first = {GRADS: "ulysses", SHARD: "ulysses", EP: "ulysses", ENDS: "metp"}.get(group, group)
    return prod(degree(axis, layout) for axis in AXES[: AXES.index(first)])


def degree(group: str, layout: Layout) -> int:
    """Return the number of ranks in ``group``."""
    if group == TIED:
        return min(2, layout.pp)
    if group == ENDS:
        return layout.metp * layout.replicas
    if group in (SHARD, REPLICATE):
        return layout.shards if group == SHARD else layout.shard_copies
    if group == EXPERT_GRADS:
        return layout.expert_replicas
    if group in (EXPERT_SHARD, EXPERT_REPLICATE):
        return layout.expert_shards if group == EXPERT_SHARD else layout.shard_copies
    return layout.replicas if group == GRADS else int(getattr(layout, group))


def coordinate(group: str, layout: Layout, rank: int) -> int:
    """Return the mesh coordinate of ``rank``: its index in its ``group``."""
    return rank // stride(group, layout) % degree(group, layout)


def members(group: str, layout: Layout, rank: int) -> list[int]:
    """Return the ranks of ``rank``'s group, in the order of their coordinates."""
    step = stride(group, layout)
    first = rank - coordinate(group, layout, rank) * step
    return [first + i * step for i in range(degree(group, layout))]


def least_dp(layout: Layout) -> int:
    """Return the least data parallelism with which ranks that divide experts make up whole groups."""
    return layout.ep // gcd(layout.ep, layout.expert_ranks // layout.dp)
