"""Times a call: repeats it after a warm-up, and returns the median of the repeats and their spread.

    seconds = median of repeats        spread = (largest - smallest, without the outermost tenths) / 2 / median

On a CPU, a call has ended when it returns. On CUDA, events enclose each call, and a matrix product of ``FILLER`` x
``FILLER`` runs before it. So the call is queued before the device reaches it, and the clocks are those of a busy step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

import torch

WARM_UPS = 2

LONG_S = 0.02
"""A call of so many seconds needs no warm-up: what only a first call on a CPU does takes 0.1 ms."""

FILLER = 8192
"""Rows and columns of the product before each call on a GPU; it takes one or two milliseconds at full power."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured duration; ``spread`` is half the range of the repeats, relative to their median."""

    seconds: float
    spread: float


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to repeat a call: for ``seconds``, but at least ``repeats`` times and at most ``most`` times.

    A slow call stops before ``repeats`` once ``patience_s`` seconds have passed.
    """

    repeats: int = 3
    seconds: float = 0.01
    most: int = 40
    patience_s: float = 0.1


def time_call(
    call: Callable[[int], None], device: torch.device, effort: Effort, prepare: Callable[[int], None] | None = None
) -> Sample:
    """Return the time of ``call(i)``; ``prepare(i)`` runs before it and is not timed.

    Where one repeat is enough, a long first call on a CPU is that repeat.
    """
    begin = time.perf_counter()
    for i in range(WARM_UPS):
        if prepare is not None:
            prepare(i)
        start = time.perf_counter()
        call(i)
        first_s = time.perf_counter() - start
        if effort.most == 1 and first_s > LONG_S and device.type != "cuda":
            return sample_of([first_s])
        if time.perf_counter() - begin > effort.patience_s / 2:
            break
    return sample_of(
        _on_cuda(call, device, effort, prepare) if device.type == "cuda" else _on_cpu(call, effort, prepare)
    )


def _on_cpu(call: Callable[[int], None], effort: Effort, prepare: Callable[[int], None] | None) -> list[float]:
    found: list[float] = []
    begin = time.perf_counter()
    while not _enough(found, begin, effort):
        if prepare is not None:
            prepare(len(found))
        start = time.perf_counter()
        call(len(found))
        found.append(time.perf_counter() - start)
    return found


def _on_cuda(
    call: Callable[[int], None], device: torch.device, effort: Effort, prepare: Callable[[int], None] | None
) -> list[float]:
    # Random numbers, because a product of equal numbers draws less power.
    factor = torch.randn((FILLER, FILLER), dtype=torch.bfloat16, device=device)
    product = torch.empty_like(factor)
    torch.cuda.synchronize()
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    begin = time.perf_counter()
    while not _enough(pairs, begin, effort):
        torch.mm(factor, factor, out=product)
        if prepare is not None:
            prepare(len(pairs))
        start, end = _event(), _event()
        start.record()
        call(len(pairs))
        end.record()
        pairs.append((start, end))
        end.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def back_to_back(call: Callable[[int], None], device: torch.device, stop: Callable[[], bool]) -> list[float]:
    """Return the time of each call, made back to back until ``stop`` returns true; at least one call.

    On CUDA, the next call is issued while the previous one runs, and a time is measured from end to end.
    """
    if device.type != "cuda":
        found: list[float] = []
        while not found or not stop():
            start = time.perf_counter()
            call(len(found))
            found.append(time.perf_counter() - start)
        return found
    ends = [_event()]
    ends[0].record()
    while len(ends) < 3 or not stop():
        call(len(ends) - 1)
        ends.append(_event())
        ends[-1].record()
        ends[-2].synchronize()
    ends[-1].synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(ends)]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _enough(found: list[float] | list[tuple[torch.cuda.Event, torch.cuda.Event]], begin: float, effort: Effort) -> bool:
    """Return whether there are enough repeats."""
    if not found:
        return False
    passed = time.perf_counter() - begin
    if len(found) < effort.repeats:
        return passed > effort.patience_s
    return len(found) >= effort.most or passed > effort.seconds


def of_passes(samples: Sequence[Sample]) -> Sample:
    """Combine samples taken at different times: the median, and the larger of their half range and mean spread.

    The median ignores a pass that other load has slowed.
    """
    middles = sorted(sample.seconds for sample in samples)
    middle = median(middles)
    between = (middles[-1] - middles[0]) / 2 / middle if middle > 0 else 0.0
    return Sample(middle, max(between, fmean(sample.spread for sample in samples)))


def sample_of(durations: list[float]) -> Sample:
    """Return the median of ``durations`` and their spread, which leaves out the outermost (interrupts, other load)."""
    ordered = sorted(durations)
    middle = median(ordered)
    cut = max(1, len(ordered) // 10) if len(ordered) >= 5 else 0
    inner = ordered[cut : len(ordered) - cut]
    return Sample(middle, (inner[-1] - inner[0]) / 2 / middle if middle > 0 else 0.0)
