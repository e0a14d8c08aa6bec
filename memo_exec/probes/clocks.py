"""Records a GPU's clocks, power and driver during calibration, by running nvidia-smi once a second.

A measured rate holds only for the clocks at which it was measured. So the profile's provenance keeps the median and the
range of the clocks, the power state and the power drawn. If nvidia-smi is missing, the provenance says so.
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
    """Yield a dictionary that is filled with the readings when the block ends; it stays empty for a CPU."""
    found: dict[str, str] = {}
    if device.type != "cuda":
        yield found
        return
    program = shutil.which("nvidia-smi")
    if program is None:
        found["clocks"] = "unknown: nvidia-smi is not installed"
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
    """Return driver, power state, clocks (MHz) and power (W) from nvidia-smi's output.

    It skips a last line that was cut off when the program ended.
    """
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    lines = [cells for cells in lines if len(cells) == len(FIELDS)]
    if not lines:
        return {"clocks": "unknown: nvidia-smi printed nothing"}
    columns = dict(zip(FIELDS, zip(*lines, strict=True), strict=True))
    return {
        "driver": columns["driver_version"][-1],
        "power_state": ", ".join(sorted(set(columns["pstate"]))),
        "sm_clock_mhz": f"{_range(columns['clocks.sm'])}, maximum {columns['clocks.max.sm'][-1]}",
        "memory_clock_mhz": _range(columns["clocks.mem"]),
        "power_w": f"{_range(columns['power.draw'])}, limit {columns['power.limit'][-1]}",
    }


def _range(cells: tuple[str, ...]) -> str:
    """Return median and range of the readings, or the text itself if they are not numbers (``[N/A]``)."""
    try:
        numbers = [float(cell) for cell in cells]
    except ValueError:
        return cells[-1]
    return f"{median(numbers):g} ({min(numbers):g} to {max(numbers):g})"
