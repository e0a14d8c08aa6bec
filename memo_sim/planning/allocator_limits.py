"""Limits PyTorch's allocator to less than the device where that makes a step shorter.

Every allocation retry releases the whole cache, and the bytes that are still needed are asked for again. With more
memory retries are fewer, but each releases more. So the step time is a sawtooth over the memory, and a device with more
memory can be slower as it is (llama3-8b, 32K, tp 4, dp 2, full recompute on eight H100):

    GiB     44     48     52     56     60     64     72
    s     6.85   6.93   6.99   6.97   7.02   7.02   7.01

More memory can even make a plan fail, because the free bytes of the cache lie in blocks of other sizes (fragmentation).
A user can leave memory unused (``torch.cuda.set_per_process_memory_fraction``), so the best plan need not become
slower. The search therefore tries lower limits. They depend on nothing but their own size, so a larger device tries
what a smaller one tries, too. There are eight for each power of two:

    ... 28, 30, 32, 36, 40, 44, 48, 52, 56, 60, 64, 72, 80, 88 ... GiB
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.contract.units import GIB
from memo_sim.engine.simulate import ALLOCATOR
from memo_sim.planning.outcome import Evaluated

STEPS = 8
"""Limits for each power of two, at equal distances of whole GiB."""

MOST_SAVED = 0.5
"""A plan is played under limits if it could be the best after losing this share of its waits for the allocator.

Limits have saved up to a quarter (llama3-8b above: 2.77 s of waits at 60 GiB, 2.13 s at 44 GiB), and each costs a
replay of the step."""


def limits_gib(need_bytes: float, capacity_bytes: float) -> list[int]:
    """Return the limits from ``need_bytes`` to below ``capacity_bytes``, the largest first.

    >>> limits_gib(39 * 2**30, 62 * 2**30)
    [60, 56, 52, 48, 44, 40]
    """
    found, limit = [], 1
    while limit * GIB < capacity_bytes:
        if limit * GIB >= need_bytes:
            found.append(limit)
        limit += max(1, (1 << (limit.bit_length() - 1)) // STEPS)
    return found[::-1]


def with_best_limit(one: Evaluated, predict: Callable[[Decisions], Prediction], *, capacity_bytes: float) -> Evaluated:
    """Return a plan under the limit that makes it fastest, or makes it fit; the plan itself where no limit does.

    ``predict`` plays a plan.
    """
    best = one
    for limit in limits_gib(one.prediction.peak_device_bytes, capacity_bytes):
        decisions = msgspec.structs.replace(one.decisions, allocator_limit_gib=limit)
        found = replace(one, decisions=decisions, prediction=predict(decisions), unlimited=one.prediction)
        if found.rank_key[:3] < best.rank_key[:3] and found.prediction.status == "ok":
            best = found
        if found.prediction.status == "ok" and not found.prediction.allocation_retries:
            break
    return best


def may_gain(one: Evaluated, capacity_bytes: float) -> bool:
    """Return whether a limit may change a plan: it has retries, or lacks memory although its live bytes fit."""
    prediction = one.prediction
    if prediction.status == "gpu_oom":
        return prediction.peak_device_bytes < capacity_bytes
    return prediction.status == "ok" and prediction.allocation_retries > 0


def least_limited_s(one: Evaluated) -> float:
    """Return the shortest step that limits may give; every stage waits for its allocator as long as the slowest."""
    prediction = one.prediction
    waits_s = sum(s.seconds for s in prediction.stalls if s.waits_for == ALLOCATOR and s.lane == "compute")
    return (prediction.step_s or 0.0) - MOST_SAVED * one.decisions.layout.pp * waits_s
