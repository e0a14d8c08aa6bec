"""Names of the systems that search for memo itself; ``planning/presets.py`` describes all systems.

The other systems are layouts and policies of their authors.
"""

from __future__ import annotations

DEFAULT_SYSTEM = "every-layout"
"""The system of a question that names none."""

NARROWER = "any"
"""The same policies on fewer layouts: a quicker search."""

OPEN = (NARROWER, DEFAULT_SYSTEM)
"""Systems that search what memo knows, the narrower one first. Their name says nothing of a framework."""
