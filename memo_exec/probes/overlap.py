"""What compute loses while the ranks' collectives or exchanges run beside it.

    slowdown = a layer's time beside calls back to back / its time alone, slowest rank

The number of layers and of calls is agreed among the ranks before, so that none waits for a call that another does not
make; the calls last half as long again as the layers would alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Literal

from memo_exec.probes import collectives
from memo_exec.probes.copies import Lanes
from memo_exec.probes.grid import Grid
from memo_exec.probes.ranks import Ranks
from memo_exec.probes.timing import Sample, back_to_back, sample_of
from memo_sim.contract.hardware import CollectiveKind, Quantity
from memo_sim.program.ir.instruction import Lane

Slowed = Literal["copy", "collective", "p2p"]
"""What a profile names as running beside compute."""

KINDS: dict[Slowed, CollectiveKind] = {"collective": "all_reduce", "p2p": "send_recv"}

PASSES = 3
FEWEST_LAYERS = 5
COVER = 1.5
"""How much longer than the layers alone the calls beside them last."""


def slowdowns(
    ranks: Ranks, lanes: Lanes, grid: Grid, layer: Callable[[int], None], source: str
) -> dict[Slowed, Quantity]:
    """Return the factor on compute's time beside each kind; every rank calls this.

    Raises:
        CannotRun: when another rank stops.
    """
    group = ranks.group(ranks.world)
    found = {}
    for name, kind in KINDS.items():
        call = collectives.call_of(kind, ranks, ranks.world, grid.copied_bytes, group)
        with ranks.answered():
            one_call = collectives.time_calls(ranks, call, group, grid.message_s).seconds
        ratios = sorted(
            _ratio(ranks, lanes, grid.beside_s, layer, partial(_repeat, call, one_call)) for _ in range(PASSES)
        )
        middle = ratios[PASSES // 2]
        found[name] = Quantity(value=max(1.0, middle), source=source, spread=(ratios[-1] - ratios[0]) / 2 / middle)
    return found


def _repeat(call: Callable[[], None], one_call_s: float, seconds: float) -> None:
    """Make calls that together last about so long alone; ranks that agree on the times make equally many."""
    for _ in range(max(1, ceil(seconds / one_call_s))):
        call()


def _ratio(
    ranks: Ranks, lanes: Lanes, seconds: float, layer: Callable[[int], None], calls: Callable[[float], None]
) -> float:
    """Return a layer's time beside ``calls`` over its time alone."""
    guess = ranks.slowest(lanes.inside(Lane.COMPUTE, partial(_layers, layer, lanes, FEWEST_LAYERS))).seconds
    count = max(FEWEST_LAYERS, ceil(seconds / guess))
    alone = ranks.slowest(lanes.inside(Lane.COMPUTE, partial(_layers, layer, lanes, count))).seconds
    beside = lanes.submit(Lane.COMPUTE, partial(_layers, layer, lanes, count))
    with ranks.answered():
        calls(COVER * count * alone)
    slowed = ranks.slowest(beside.result()).seconds
    return slowed / alone


def _layers(layer: Callable[[int], None], lanes: Lanes, count: int) -> Sample:
    """Return how long one of ``count`` layers in a row takes, the first and the last left out."""
    left = iter(range(count - 1))
    durations = back_to_back(layer, lanes.device, lambda: next(left, None) is None)
    return sample_of(durations[1:-1] or durations)
