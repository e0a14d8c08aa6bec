"""The peak memory of a process."""

from __future__ import annotations

from pathlib import Path


def peak_mib(process: int | str = "self") -> int:
    """Return the peak of a process alone: a child's ``ru_maxrss`` starts at the peak of its parent."""
    (line,) = (line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) >> 10
