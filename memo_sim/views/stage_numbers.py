"""Counts pipeline stages from 1 in text for people. Documents, names of files and identifiers count them from 0.

>>> from_one("stage0: device memory runs out; pipeline bubble (stage 1)")
'stage 1: device memory runs out; pipeline bubble (stage 2)'
"""

from __future__ import annotations

import re

_NAMED = re.compile(r"(?<![\w./-])stage(\d+)(?![\w.-])|(?<=\()stage (\d+)(?=\))")
"""A stage as a program's name, and as the cause of a wait; not in names of files."""


def from_one(text: str) -> str:
    """Return ``text`` from a document with its stages counted from 1."""
    return _NAMED.sub(lambda found: f"stage {int(found[1] or found[2]) + 1}", text)
