"""Returns freed memory of the C library's heap to the system."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def return_freed() -> None:
    """Return freed host memory to the system, which the C library may keep for reuse; do nothing if it cannot."""
    with suppress(OSError, AttributeError):  # only glibc can
        ctypes.CDLL(None).malloc_trim(0)
