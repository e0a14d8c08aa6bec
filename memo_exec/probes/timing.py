"""How long a call takes: repeated after a warm-up, the middle of the repeats, and how far they spread.

    seconds = median of repeats        spread = (largest - smallest, the outermost tenth left out) / 2 / median

On a CPU a call has ended when it returns. On CUDA events lie around each call, and a product of ``FILLER`` numbers
squared is played before it: the call is issued before the device comes to it, and the clocks are those of a busy step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

import torch

WARM_UPS = 2

FILLER = 8192
"""Rows and columns of the product before each call on a GPU: a millisecond or two, and full power."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured duration; ``spread`` is the relative half range of the repeats."""

    seconds: float
    spread: float


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to repeat: until ``seconds`` have passed, at least ``repeats`` times and at most ``most`` times.

    A call so long that fewer of it take more than ``patience_s`` is repeated no more.
    """

    repeats: int = 3
    seconds: float = 0.01
    most: int = 40
    patience_s: float = 0.1


def time_call(
    call: Callable[[int], None], device: torch.device, effort: Effort, prepare: Callable[[int], None] | None = None
) -> Sample:
    """Return how long ``call(i)`` takes; ``prepare(i)`` runs before it and is not timed."""
    begin = time.perf_counter()
    for i in range(WARM_UPS):
        if prepare is not None:
            prepare(i)
        call(i)
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
    # Random numbers: a product of equal ones draws less power.
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
    """Return how long each call takes while they follow one another without a gap, until ``stop``; at least one.

    On CUDA the next call is issued while the one before runs, and the time is that from end to end.
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
    """Return whether the repeats suffice."""
    if not found:
        return False
    passed = time.perf_counter() - begin
    if len(found) < effort.repeats:
        return passed > effort.patience_s
    return len(found) >= effort.most or passed > effort.seconds


def of_passes(samples: Sequence[Sample]) -> Sample:
    """Return the middle of samples taken at different times, and the larger of their range and their own spreads.

    A neighbour that slows one pass does not count.
    """
    middles = sorted(sample.seconds for sample in samples)
    middle = median(middles)
    between = (middles[-1] - middles[0]) / 2 / middle if middle > 0 else 0.0
    return Sample(middle, max(between, fmean(sample.spread for sample in samples)))


def sample_of(durations: list[float]) -> Sample:
    """Return the middle of ``durations`` and their spread, the outermost left out (a noisy neighbour, an interrupt)."""
    ordered = sorted(durations)
    middle = median(ordered)
    cut = max(1, len(ordered) // 10) if len(ordered) >= 5 else 0
    inner = ordered[cut : len(ordered) - cut]
    return Sample(middle, (inner[-1] - inner[0]) / 2 / middle if middle > 0 else 0.0)
