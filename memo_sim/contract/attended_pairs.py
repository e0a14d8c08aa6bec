"""How many pairs of a query and a key attention has in a window."""

from __future__ import annotations


def pairs_in_window(queries: int, keys: int, window: int) -> int:
    """Return the pairs of a query and a key that it sees: its own key and those before it, ``window`` at most.

    The queries belong to the last of ``keys`` keys. ``window`` times the queries, less what the first ones lack.
    """
    lacking = window - 1 - (keys - queries)
    rows = max(0, min(queries, lacking))
    return queries * window - rows * lacking + rows * (rows - 1) // 2
