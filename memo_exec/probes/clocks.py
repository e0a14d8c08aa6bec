"""Clocks, power and driver of a GPU while it is measured, read by nvidia-smi every second beside the probes.

A rate belongs to the clocks it was measured at: the profile's provenance keeps their median and range, the power state
and the power drawn. Where there is no nvidia-smi it says so.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from tempfile import TemporaryFile

import torch

FIELDS = ("driver_version", "pstate", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit")
PERIOD_MS = 1000


@contextmanager
def watched(device: torch.device) -> Iterator[dict[str, str]]:
    """Yield a dictionary that holds, once the block has ended, what was read meanwhile; empty for a CPU."""
    found: dict[str, str] = {}
    if device.type != "cuda":
        yield found
        return
    program = shutil.which("nvidia-smi")
    if program is None:
        found["clocks"] = "not known: no nvidia-smi"
        yield found
        return
    uuid = torch.cuda.get_device_properties(device).uuid
    command = [program, f"--id=GPU-{uuid}", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    with TemporaryFile("w+") as output:
        process = subprocess.Popen([*command, f"--loop-ms={PERIOD_MS}"], stdout=output, stderr=subprocess.DEVNULL)
        try:
            yield found
        finally:
            process.terminate()
            process.wait()
            output.seek(0)
            found.update(summary(output.read()))


def summary(text: str) -> dict[str, str]:
    """Return driver, power state, clocks (MHz) and power (W) from nvidia-smi's lines.

    A line that was cut off when the program ended is left out.
    """
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    lines = [cells for cells in lines if len(cells) == len(FIELDS)]
    if not lines:
        return {"clocks": "not known: nvidia-smi printed nothing"}
    columns = dict(zip(FIELDS, zip(*lines, strict=True), strict=True))
    return {
        "driver": columns["driver_version"][-1],
        "power_state": ", ".join(sorted(set(columns["pstate"]))),
        "sm_clock_mhz": f"{_range(columns['clocks.sm'])}, at most {columns['clocks.max.sm'][-1]}",
        "memory_clock_mhz": _range(columns["clocks.mem"]),
        "power_w": f"{_range(columns['power.draw'])}, limit {columns['power.limit'][-1]}",
    }


def _range(cells: tuple[str, ...]) -> str:
    """Return median and range; what is no number (``[N/A]``) as it was printed."""
    try:
        numbers = [float(cell) for cell in cells]
    except ValueError:
        return cells[-1]
    return f"{median(numbers):g} ({min(numbers):g} to {max(numbers):g})"
