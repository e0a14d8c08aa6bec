"""Pairs of two lists of parameters: the default run plays some that cover both lists, the slow run all."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest


def covering(ones: Collection[Any], others: Collection[Any], *, every: int = 0) -> list[Any]:
    """Return all pairs as parameters; only those on the diagonals, which name each value once or more, are not slow.

    For tests of which each value alone finds what is wrong, and the pair adds little. ``every``: how far the diagonals
    lie apart, by default as many pairs as the shorter list has values.

        >>> [pair.values for pair in covering("ab", "123") if not pair.marks]
        [('a', '1'), ('a', '3'), ('b', '2')]
    """
    apart = every or min(len(ones), len(others))
    return [
        pytest.param(one, other, marks=() if (row - column) % apart == 0 else pytest.mark.slow)
        for row, one in enumerate(ones)
        for column, other in enumerate(others)
    ]
