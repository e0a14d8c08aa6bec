"""Finds the longest sequence that fits, in steps of a number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def last_that_fits(
    plan: Callable[[int], T | None], step_tokens: int, most_steps: int, *, first_steps: int = 1
) -> tuple[int, T | None]:
    """Return the largest multiple of ``step_tokens`` for which ``plan`` finds a plan, and that plan.

    ``plan`` gets a number of tokens and returns None where nothing fits. Lengths are doubled from ``first_steps`` on,
    then bisected. Assumes that a length fits if a longer one fits. Returns 0 and None where not even one step fits.
    """
    known: dict[int, T | None] = {}

    def found(steps: int) -> T | None:
        if steps not in known:
            known[steps] = plan(steps * step_tokens)
        return known[steps]

    low, high = 0, first_steps
    while high <= most_steps and found(high) is not None:
        low, high = high, 2 * high
    high = min(high, most_steps + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if found(middle) is not None else (low, middle)
    return low * step_tokens, known.get(low)
