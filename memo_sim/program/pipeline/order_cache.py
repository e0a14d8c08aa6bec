"""Cache of stage orders, shared by plans that differ only in their number of swapped tokens.

A search plays one layout at several alphas. Between two alphas, the templates have other rows, but the same
names and slots, and the instances are equal. Placing them takes most of a lowering's time.

      pp 64, alpha .5   placed     pp 64, alpha .6   cached     pp 64, alpha 0   placed (no template copies rows)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from msgspec.structs import replace

from memo_sim.program.ir.instances import Instances
from memo_sim.program.ir.instruction import Family, Template
from memo_sim.program.pipeline.stage_parts import StageParts

MOST_INSTANCES = 200_000
"""Maximum number of cached instances; the least recently used plan is dropped first, but never the last one."""
Placed = tuple[Instances, tuple[int, ...]]
"""The instances of a stage, and the number of each pass's first instance."""
_kept: OrderedDict[Hashable, dict[Hashable, Placed]] = OrderedDict()


def cached_orders(parts: StageParts) -> dict[Hashable, Placed] | None:
    """Return the orders of stages that were placed for plans like this one, by ``order_key``; the caller adds to them.

    None where plans are not cached: each subsequence may swap another number of tokens.
    """
    decisions, shape = parts.decisions, parts.shape
    if decisions.layout.subsequences > 1:
        return None
    ranks = shape.cp_rank, shape.ulysses_rank, shape.tp_rank
    key = replace(decisions, swapped_tokens=0), parts.micro_batches, ranks
    found = _kept.setdefault(key, {})
    _kept.move_to_end(key)
    while len(_kept) > 1 and sum(len(each[0]) for plan in _kept.values() for each in plan.values()) > MOST_INSTANCES:
        _kept.popitem(last=False)
    return found


def order_key(parts: StageParts, families: list[Family], templates: list[Template], *, rounding: bool) -> Hashable:
    """Return what a stage's order depends on beside ``cached_orders``: what there is to place, and what it binds.

    ``rounding``: whether layers use rounding buffers.
    """
    bound = tuple((f.name, f.count, f.kind, f.layer_kind) for f in families)
    placed = tuple((t.name, t.kind, t.slots) for t in templates)
    return parts.stage.index, parts.with_end, rounding, bound, placed


def forget() -> None:
    """Empty the cache."""
    _kept.clear()
