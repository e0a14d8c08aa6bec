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
IN_A_ROUND = 2 + len(BOTH)
"""Measurements in a pass: both copies at once, compute alone, compute beside each copy."""

Call = Callable[[int], None]


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


def all_devices(ranks: Ranks, lanes: Lanes, grid: Grid) -> AllDevices:
    """Measure copies while all ranks copy; every rank calls this."""
    copiers = {lane: lanes.copier(lane, grid.copied_bytes) for lane in BOTH}
    one_way = {}
    for lane in BOTH:
        found = []
        for _ in range(PASSES):
            ranks.wait()
            found.append(ranks.slowest(lanes.together(grid.beside_s, {lane: copiers[lane]})[lane]))
        one_way[lane] = of_passes(found)
    ranks.wait()
    duplex = lanes.together(grid.beside_s, copiers)
    moved = ranks.total(sum(grid.copied_bytes / duplex[lane].seconds for lane in BOTH))
    fastest = ranks.world * max(grid.copied_bytes / sample.seconds for sample in one_way.values())
    return AllDevices(grid.copied_bytes, one_way, max(moved, fastest))


def measurements(grid: Grid) -> int:
    """Return the number of measurements that ``one_device`` makes."""
    return len(BOTH) * len(grid.copy_bytes) + PASSES * IN_A_ROUND


def one_device(lanes: Lanes, grid: Grid, layer: Call, source: str, tell: Callable[[int], None]) -> Copies:
    """Measure the copies of one device; compute repeats ``layer`` beside them.

    ``tell`` receives the number of measurements done so far, out of ``measurements(grid)``.
    """
    numbers = count(1)

    def told() -> None:
        tell(next(numbers))

    curves = {}
    for lane in BOTH:
        samples = []
        for size in grid.copy_bytes:
            samples.append(lanes.alone(lane, size, Effort(seconds=0.2)))
            told()
        rates = [size / sample.seconds for size, sample in zip(grid.copy_bytes, samples, strict=True)]
        spread = sum(sample.spread for sample in samples) / len(samples)
        curves[lane] = Curve(x=[float(size) for size in grid.copy_bytes], y=rates, source=source, spread=spread)
    copiers = {lane: lanes.copier(lane, grid.copied_bytes) for lane in BOTH}
    rounds = [_round(lanes, grid, layer, copiers, told) for _ in range(PASSES)]
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


@dataclass(frozen=True)
class _Round:
    """One pass: copies in both directions at once, copies beside compute, and the factor on compute's time."""

    duplex: dict[Lane, Sample]
    beside: dict[Lane, Sample]
    slowdown: float


def _round(lanes: Lanes, grid: Grid, layer: Call, copiers: dict[Lane, Call], told: Callable[[], None]) -> _Round:
    """Run both copy lanes at once, then each at the same time as a layer's operators."""

    def together(work: dict[Lane, Call]) -> dict[Lane, Sample]:
        found = lanes.together(grid.beside_s, work)
        told()
        return found

    duplex = together(copiers)
    alone = together({Lane.COMPUTE: layer})[Lane.COMPUTE]
    both = {lane: together({Lane.COMPUTE: layer, lane: copier}) for lane, copier in copiers.items()}
    slowed = [found[Lane.COMPUTE].seconds / alone.seconds for found in both.values()]
    return _Round(duplex, {lane: found[lane] for lane, found in both.items()}, sum(slowed) / len(slowed))
