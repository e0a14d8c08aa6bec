"""How work that takes long tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Is told (done, all) whenever one more is done."""
