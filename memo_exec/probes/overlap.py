"""Measures how much collectives and send-receive slow compute that runs at the same time.

    slowdown = time of a layer beside back-to-back calls / time of the layer alone, on the slowest rank

The ranks agree on the number of layers and of calls in advance, so that no rank waits for a call that another does not
make. The calls together last 1.5 times as long as the layers alone.
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
"""The profile's names for operations that slow compute."""

KINDS: dict[Slowed, CollectiveKind] = {"collective": "all_reduce", "p2p": "send_recv"}

PASSES = 3
FEWEST_LAYERS = 5
COVER = 1.5
"""Total duration of the calls, relative to the layers alone."""


def slowdowns(
    ranks: Ranks,
    lanes: Lanes,
    grid: Grid,
    layer: Callable[[int], None],
    source: str,
    *,
    over: Callable[[], bool] = lambda: False,
) -> dict[Slowed, Quantity]:
    """Return the factor by which each kind lengthens compute; every rank calls this.

    ``over`` says whether time is short, so that it is measured once.

    Raises:
        CannotRun: if another rank stops.
    """
    group = ranks.group(ranks.world)
    found = {}
    for name, kind in KINDS.items():
        call = collectives.call_of(kind, ranks, ranks.world, grid.copied_bytes, group)
        with ranks.answered():
            one_call = collectives.time_calls(ranks, call, group, grid.message_s).seconds
        ratios: list[float] = []
        while len(ratios) < PASSES and not (ratios and ranks.any(over())):
            ratios.append(_ratio(ranks, lanes, grid.beside_s, layer, partial(_repeat, call, one_call)))
        ratios.sort()
        middle = ratios[len(ratios) // 2]
        found[name] = Quantity(value=max(1.0, middle), source=source, spread=(ratios[-1] - ratios[0]) / 2 / middle)
    return found


def _repeat(call: Callable[[], None], one_call_s: float, seconds: float) -> None:
    """Make calls that together last about ``seconds``; ranks with equal arguments make equally many calls."""
    for _ in range(max(1, ceil(seconds / one_call_s))):
        call()


def _ratio(
    ranks: Ranks, lanes: Lanes, seconds: float, layer: Callable[[int], None], calls: Callable[[float], None]
) -> float:
    """Return the time of a layer beside ``calls``, divided by its time alone."""
    guess = ranks.slowest(lanes.inside(Lane.COMPUTE, partial(_layers, layer, lanes, FEWEST_LAYERS))).seconds
    count = max(FEWEST_LAYERS, ceil(seconds / guess))
    alone = ranks.slowest(lanes.inside(Lane.COMPUTE, partial(_layers, layer, lanes, count))).seconds
    beside = lanes.submit(Lane.COMPUTE, partial(_layers, layer, lanes, count))
    with ranks.answered():
        calls(COVER * count * alone)
    slowed = ranks.slowest(beside.result()).seconds
    return slowed / alone


def _layers(layer: Callable[[int], None], lanes: Lanes, count: int) -> Sample:
    """Return the time per layer of ``count`` layers in a row, without the first and the last."""
    left = iter(range(count - 1))
    durations = back_to_back(layer, lanes.device, lambda: next(left, None) is None)
    return sample_of(durations[1:-1] or durations)
