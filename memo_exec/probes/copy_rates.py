"""Measures the copy rates of a profile: alone by size, both directions at once, beside compute, and on all ranks.

With one device, ``all_devices`` is the rate beside compute. With several, it is the slowest rank's rate while all of
them copy in the same direction. So it includes the effect of shared links and shared host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import msgspec

from memo_exec.probes.copies import Lanes
from memo_exec.probes.grid import Grid
from memo_exec.probes.ranks import Ranks
from memo_exec.probes.timing import Effort, Sample, of_passes
from memo_sim.contract.hardware import CopyRates, Curve, Quantity
from memo_sim.program.ir.instruction import Lane

BOTH = (Lane.D2H, Lane.H2D)
PASSES = 3
"""How often lanes run at the same time; a short disturbance affects at most one pass, and the median drops it."""
ALONE_S = 0.2
"""Seconds for which a copy alone is repeated."""
HURRIED = 0.25
"""The fraction of their seconds for which measurements are repeated once the time is over."""
IN_A_ROUND = 2 + len(BOTH)
"""Measurements in a pass: both copies at once, compute alone, compute beside each copy."""

Call = Callable[[int], None]
Over = Callable[[], bool]
"""Whether the time for copies is over."""


@dataclass(frozen=True)
class Copies:
    """Measured copy rates, how much a copy slows compute, and the host's rate with both directions at once."""

    rates: dict[Lane, CopyRates]
    slowdown: Quantity
    together_bytes_per_s: float

    def beside_all(self, shared: AllDevices, source: str) -> Copies:
        """Return the same rates with those of ``shared``, which all ranks reach at once."""
        rates = {
            lane: msgspec.structs.replace(found, all_devices=rate_of(shared.copied_bytes, shared.one_way[lane], source))
            for lane, found in self.rates.items()
        }
        return replace(self, rates=rates, together_bytes_per_s=shared.together_bytes_per_s)


@dataclass(frozen=True)
class AllDevices:
    """Time of one copy while every rank copies in the same direction, and the total rate in both directions."""

    copied_bytes: int
    one_way: dict[Lane, Sample]
    together_bytes_per_s: float


def rate_of(size_bytes: int, sample: Sample, source: str) -> Quantity:
    """Return a rate in bytes/s from a size and its duration."""
    return Quantity(value=size_bytes / sample.seconds, source=source, spread=sample.spread)


def all_devices(ranks: Ranks, lanes: Lanes, grid: Grid, *, over: Over = lambda: False) -> AllDevices:
    """Measure copies while all ranks copy; every rank calls this. Each direction once if time is ``over``."""
    copiers = {lane: lanes.copier(lane, grid.copied_bytes) for lane in BOTH}
    one_way = {}
    for lane in BOTH:
        found = []
        for _ in range(PASSES):
            ranks.wait()
            found.append(ranks.slowest(lanes.together(grid.beside_s, {lane: copiers[lane]})[lane]))
            if ranks.any(over()):
                break
        one_way[lane] = of_passes(found)
    ranks.wait()
    duplex = lanes.together(grid.beside_s, copiers)
    moved = ranks.total(sum(grid.copied_bytes / duplex[lane].seconds for lane in BOTH))
    fastest = ranks.world * max(grid.copied_bytes / sample.seconds for sample in one_way.values())
    return AllDevices(grid.copied_bytes, one_way, max(moved, fastest))


def measurements(grid: Grid) -> int:
    """Return the number of measurements that ``one_device`` makes."""
    return len(BOTH) * len(grid.copy_bytes) + PASSES * IN_A_ROUND


def one_device(
    lanes: Lanes, grid: Grid, layer: Call, source: str, tell: Callable[[int], None], *, over: Over = lambda: False
) -> Copies:
    """Measure the copies of one device; compute repeats ``layer`` beside them.

    ``tell`` receives the number of measurements done so far, out of ``measurements(grid)``. Once the time is ``over``,
    only the ends of the curves are measured, and one pass of what runs at the same time, each for a shorter time.
    """
    numbers = count(1)

    def told() -> None:
        tell(next(numbers))

    samples: dict[Lane, dict[int, Sample]] = {lane: {} for lane in BOTH}
    ends = {min(grid.copy_bytes), max(grid.copy_bytes)}
    for size in sorted(grid.copy_bytes, key=lambda size: size not in ends):
        for lane in BOTH:
            if size in ends or not over():
                samples[lane][size] = lanes.alone(lane, size, Effort(seconds=ALONE_S * (HURRIED if over() else 1.0)))
            told()
    curves = {lane: _curve(samples[lane], source) for lane in BOTH}
    copiers = {lane: lanes.copier(lane, grid.copied_bytes) for lane in BOTH}
    rounds: list[_Round] = []
    for _ in range(PASSES):
        if rounds and over():
            for _ in range(IN_A_ROUND):
                told()
        else:
            seconds = grid.beside_s * (HURRIED if over() else 1.0)
            rounds.append(_round(lanes, seconds, layer, copiers, told))
    duplex = {lane: of_passes([each.duplex[lane] for each in rounds]) for lane in BOTH}
    beside = {lane: of_passes([each.beside[lane] for each in rounds]) for lane in BOTH}
    slowed = sorted(each.slowdown for each in rounds)
    slowdown = Quantity(
        value=max(1.0, slowed[len(slowed) // 2]), source=source, spread=(slowed[-1] - slowed[0]) / 2 / slowed[0]
    )
    rates_by_lane = {
        lane: CopyRates(
            alone=curves[lane],
            duplex=rate_of(grid.copied_bytes, duplex[lane], source),
            all_devices=rate_of(grid.copied_bytes, beside[lane], source),
        )
        for lane in BOTH
    }
    summed = sum(rates_by_lane[lane].duplex.value for lane in BOTH)
    return Copies(rates_by_lane, slowdown, max(summed, *(max(curve.y) for curve in curves.values())))


def _curve(samples: dict[int, Sample], source: str) -> Curve:
    """Return the rates by size, from the time of a copy of each size."""
    sizes = sorted(samples)
    spread = sum(sample.spread for sample in samples.values()) / len(samples)
    rates = [size / samples[size].seconds for size in sizes]
    return Curve(x=[float(size) for size in sizes], y=rates, source=source, spread=spread)


@dataclass(frozen=True)
class _Round:
    """One pass: copies in both directions at once, copies beside compute, and the factor on compute's time."""

    duplex: dict[Lane, Sample]
    beside: dict[Lane, Sample]
    slowdown: float


def _round(lanes: Lanes, seconds: float, layer: Call, copiers: dict[Lane, Call], told: Callable[[], None]) -> _Round:
    """Run both copy lanes at once, then each at the same time as a layer's operators."""

    def together(work: dict[Lane, Call]) -> dict[Lane, Sample]:
        found = lanes.together(seconds, work)
        told()
        return found

    duplex = together(copiers)
    alone = together({Lane.COMPUTE: layer})[Lane.COMPUTE]
    both = {lane: together({Lane.COMPUTE: layer, lane: copier}) for lane, copier in copiers.items()}
    slowed = [found[Lane.COMPUTE].seconds / alone.seconds for found in both.values()]
    return _Round(duplex, {lane: found[lane] for lane, found in both.items()}, sum(slowed) / len(slowed))
