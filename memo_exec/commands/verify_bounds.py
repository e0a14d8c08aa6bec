"""Bounds of the options of ``memo-exec verify``; it loads nothing, because the command line reads it for its help."""

from __future__ import annotations

BOUNDS = {"seed": (0, 2**32 - 1), "steps": (1, 10), "layers": (1, 64)}
"""Least and most of each: a CPU plays so many steps and layers in minutes."""
