"""Cache of stage orders, shared by plans that differ only in their number of swapped tokens.

A search plays one layout at several alphas. Between two alphas, the templates have other rows, but the same
names and slots, and the instances are equal. Placing them takes most of a lowering's time.

      pp 64, alpha .5   placed     pp 64, alpha .6   cached     pp 64, alpha 0   placed (no template copies rows)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from msgspec.structs import replace

from memo_sim.program.ir.instances import Instances
from memo_sim.program.ir.instruction import Families, Template
from memo_sim.program.pipeline.stage_parts import StageParts

MOST_INSTANCES = 200_000
"""Maximum number of cached instances; the least recently used plan is dropped first, but never the last one."""
Placed = tuple[Instances, tuple[int, ...]]
"""The instances of a stage, and the number of each pass's first instance."""


class _Orders:
    """The orders that are kept, by plan."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, dict[Hashable, Placed]] = OrderedDict()
        self._instances = 0
        """Number of all kept instances."""

    def forget(self) -> None:
        """Drop all."""
        self._kept.clear()
        self._instances = 0

    def of(self, plan: Hashable, key: Hashable, place: Callable[[], Placed]) -> Placed:
        """Return the order of ``key`` for a plan, which ``place`` makes where it is not kept."""
        known = self._kept.setdefault(plan, {})
        self._kept.move_to_end(plan)
        if key not in known:
            known[key] = made = place()
            self._instances += len(made[0])
            while len(self._kept) > 1 and self._instances > MOST_INSTANCES:
                _, dropped = self._kept.popitem(last=False)
                self._instances -= sum(len(instances) for instances, _ in dropped.values())
        return known[key]


_orders = _Orders()


def cached_order(parts: StageParts, key: Hashable, place: Callable[[], Placed]) -> Placed:
    """Return the order of a stage that was placed for a plan like this one, or else what ``place`` makes.

    ``key``: that of ``order_key``. Plans with subsequences are not cached: each subsequence may swap another number of
    tokens.
    """
    decisions, shape = parts.decisions, parts.shape
    if decisions.layout.subsequences > 1:
        return place()
    ranks = shape.cp_rank, shape.ulysses_rank, shape.tp_rank
    return _orders.of((replace(decisions, swapped_tokens=0), parts.micro_batches, ranks), key, place)


def order_key(parts: StageParts, families: Families, templates: list[Template], *, rounding: bool) -> Hashable:
    """Return what a stage's order depends on beside its plan: what there is to place, and what it binds.

    ``rounding``: whether layers use rounding buffers.
    """
    bound = tuple((f.name, f.count, f.kind, f.layer_kind) for f in families.values())
    placed = tuple((t.name, t.kind, t.slots) for t in templates)
    return parts.stage.index, parts.with_end, rounding, bound, placed


def forget() -> None:
    """Empty the cache."""
    _orders.forget()
