"""Facts about this machine, and how fast it pins host memory.

    python -m benchmarks.gpu.facts --pin-gib 32

Writes ``machine.json`` to the results folder. Without a GPU the memory is mapped but not pinned.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

import msgspec
import torch

from benchmarks.gpu.results import results_folder
from memo_exec.machine.machine import host_available_bytes, library_versions, this_machine, versions
from memo_exec.memory.pinned import mapping, pin, unpin
from memo_sim.contract.errors import MemoError
from memo_sim.contract.units import GIB

QUERY = "name,driver_version,power.limit,clocks.max.sm,pcie.link.gen.current,pcie.link.width.current"
MOST_SHARE = 0.5
"""Largest share of the free host memory that is pinned."""


TEXT = (
    "Write facts about this machine, and how fast it pins host memory, to machine.json in the results folder. Without a"
    " GPU the memory is mapped but not pinned."
)


def main() -> int:
    """Write the facts and print them; return 6 if the memory cannot be pinned."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.facts", description=TEXT)
    parser.add_argument("--pin-gib", type=float, default=32.0, help="GiB of host memory to pin")
    options = parser.parse_args()
    folder = results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {
        "machine": asdict(this_machine()),
        "versions": versions() | library_versions(),
        "gpu": _gpu(),
    }
    status = 0
    try:
        facts["pinning"] = _pinning(int(options.pin_gib * GIB))
    except MemoError as error:
        facts["pinning"], status = str(error), error.exit_code
    text = msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n"
    (folder / "machine.json").write_bytes(text)
    sys.stdout.write(text.decode())
    return status


def _gpu() -> str:
    """Return what the driver reports, or "" without one."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _pinning(wanted_bytes: int) -> dict[str, float]:
    """Return bytes, seconds to map, pin and unpin them, and the rate of pinning in bytes per second."""
    size = min(wanted_bytes, int(MOST_SHARE * host_available_bytes()))
    begin = time.perf_counter()
    memory = mapping(size)
    mapped = time.perf_counter()
    found = {"bytes": float(size), "map_s": mapped - begin}
    if not torch.cuda.is_available():
        return found
    torch.cuda.init()  # type: ignore[no-untyped-call]
    begin = time.perf_counter()
    pin(memory)
    pinned = time.perf_counter()
    unpin(memory)
    found |= {"pin_s": pinned - begin, "unpin_s": time.perf_counter() - pinned}
    return found | {"pin_bytes_per_s": size / found["pin_s"]}


if __name__ == "__main__":
    sys.exit(main())
