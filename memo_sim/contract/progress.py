"""The callback that long-running work uses to report its progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (done, all) after each finished item."""
