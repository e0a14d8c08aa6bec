"""The longest stretch of a model's layers that repeats, and a shorter model in which it repeats less often.

A stretch has a period p: each of its layers has the shape of the layer p before. Layers alternate between two rounding
buffers, so what is left out is a number of windows, each of an even number of periods' layers.

      layers        w w w | n n n n n n n n n n n n n n        period 1, windows of 2
      fewer         w w w | n n n n n n                        4 windows left out

      layers        s s s s s f s s s s s f s s s s s f ...    period 6, windows of 6
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import lcm

from memo_sim.contract.layer_shape import LayerShape
from memo_sim.program.layout.swap_schedule import ROUNDING_BUFFERS


@dataclass(frozen=True, slots=True)
class RepeatedLayers:
    """Fewer layers that stand for all: layers [first, end) repeat, and ``times`` windows of them were left out."""

    shapes: tuple[LayerShape, ...]
    """The layers that are left."""
    first: int
    end: int
    window: int
    """Layers of a window."""
    times: int


def repeated_layers(shapes: Sequence[LayerShape], *, windows: int, beside: int) -> RepeatedLayers:
    """Return fewer layers that stand for ``shapes``; all of them, with 0 times, where none repeat often enough.

    ``windows`` windows stay in the repeated stretch, and ``beside`` more layers.
    """
    return _repeated(tuple(shapes), windows, beside)


@lru_cache(maxsize=256)
def _repeated(shapes: tuple[LayerShape, ...], windows: int, beside: int) -> RepeatedLayers:
    best, best_left_out = RepeatedLayers(shapes, 0, len(shapes), ROUNDING_BUFFERS, 0), 0
    periods = (1,) if len(set(shapes)) == 1 else range(1, len(shapes) // windows + 1)
    for period in periods:
        window, first = lcm(period, ROUNDING_BUFFERS), 0
        equal = [one == other for one, other in zip(shapes, shapes[period:], strict=False)]
        for same, run in groupby(equal):
            length = len(list(run))
            end = first + length + period
            times = (end - first - windows * window - beside) // window
            if same and times * window > best_left_out:
                left_out = best_left_out = times * window
                fewer = shapes[:first] + shapes[first + left_out :]
                best = RepeatedLayers(fewer, first, end - left_out, window, times)
            first += length
    return best
