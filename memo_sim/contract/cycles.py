"""How often a process looks for cycles: objects that refer to each other and are no longer used.

A lowering makes thousands of objects, and no cycles. Looking as often as Python does unasked is a tenth of a search's
time. Looking once more at its end, before the system takes all memory back, is 0.15 s of a search's 3 s.
"""

from __future__ import annotations

import atexit
import gc

LOOKED_FOR_AFTER = 50_000
"""New objects after which Python looks."""


def look_seldom() -> None:
    """Let this process look as commands do, and not at its end; one that a user has started decides for itself."""
    gc.set_threshold(LOOKED_FOR_AFTER)
    atexit.unregister(gc.freeze)  # a process may ask for this several times
    atexit.register(gc.freeze)
