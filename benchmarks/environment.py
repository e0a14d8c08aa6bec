"""The environment of measured processes."""

from __future__ import annotations

import os


def with_bytecode() -> dict[str, str]:
    """Return this process's environment, without a variable that keeps Python from writing bytecode to files.

    Without bytecode, every process compiles all of memo's source that it imports, which takes 0.6 s. A user has
    bytecode after the first command, so run once before measuring.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
