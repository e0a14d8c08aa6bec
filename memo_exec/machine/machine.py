"""Describes this machine: the device and its memory, the host memory that the container may use, and versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PACKAGES = ("torch", "triton", "numpy", "safetensors", "flash-attn", "flash-attn-4", "transformer-engine")


GENERATIONS = {(8, 0): "Ampere", (9, 0): "Hopper", (10, 0): "Blackwell", (10, 3): "Blackwell"}
"""Architectures of data-centre GPUs by compute capability (NVIDIA's table of CUDA GPUs)."""


@dataclass(frozen=True)
class Machine:
    """The device that plans run on here, and its host."""

    device: Literal["cuda", "cpu"]
    name: str
    devices: int
    compute_threads: int
    """Threads inside one operator on a CPU. Each copy lane has one thread."""
    device_memory_bytes: int
    device_free_bytes: int
    host_memory_bytes: int
    host_available_bytes: int
    sharing: int = 1
    """How many ranks of this job share the host's memory and cores."""
    generation: str = ""
    """The vendor's name of the architecture; empty on a CPU and on a GPU that is not in ``GENERATIONS``."""


def this_machine(*, sharing: int = 1) -> Machine:
    """Return what this process can use: the current accelerator when there is one, else the CPU.

    ``sharing`` is the number of ranks on this host.
    """
    import torch

    from memo_exec.interpreter.lanes import intra_op_threads
    from memo_sim.program.ir.instruction import Lane

    total, available = host_memory_bytes(), host_available_bytes()
    if torch.cuda.is_available():
        device_free, device_total = torch.cuda.mem_get_info()
        name, devices = torch.cuda.get_device_name(), torch.cuda.device_count()
        generation = GENERATIONS.get(torch.cuda.get_device_capability(), "")
        return Machine("cuda", name, devices, 1, device_total, device_free, total, available, sharing, generation)
    threads = intra_op_threads(Lane.COMPUTE, torch.device("cpu"), sharing)
    return Machine("cpu", cpu_name(), 1, threads, total, available, total, available, sharing)


def cpu_name() -> str:
    """Return the processor's name, or its architecture when the system does not report a name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of host memory this process may use: the machine's, or the container's limit if lower."""
    machine = _meminfo(root).get("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for limit, _ in _cgroup_memory(root))])


def host_available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of host memory still free for this process: the lower of the machine's and the container's."""
    machine = _meminfo(root).get("MemAvailable") or host_memory_bytes(root)
    return max(0, min([machine, *(limit - used for limit, used in _cgroup_memory(root))]))


def _meminfo(root: Path) -> dict[str, int]:
    """Return /proc/meminfo in bytes; empty where there is none."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, _, value in pairs if value.strip()}


def _cgroup_memory(root: Path) -> list[tuple[int, int]]:
    """Return (limit, used) in bytes of every cgroup around this process that has a limit.

    Inactive page cache does not count as used, because the kernel can drop it.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        group = base / path.lstrip("/")
        # Inside a container the named group may not be visible. Then the base directory is the container's own group.
        for place in (group, *(p for p in group.parents if p.is_relative_to(base))):
            pair = _limit_and_use(place, limit, used, cache)
            if pair is not None:
                found.append(pair)
    return found


def _limit_and_use(group: Path, limit: str, used: str, cache: str) -> tuple[int, int] | None:
    """Return (limit, used) of one cgroup in bytes, None when it has no limit."""
    try:
        limit_bytes, used_bytes = int((group / limit).read_text()), int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or "max"
        return None
    return limit_bytes, max(0, used_bytes - int(stat.get(cache, 0)))


def versions() -> dict[str, str]:
    """Return the versions of Python, the system and the installed packages among ``PACKAGES``."""
    found = {"python": platform.python_version(), "system": f"{sys.platform} {platform.machine()}"}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def library_versions() -> dict[str, str]:
    """Return the versions of the GPU libraries that torch uses here; empty without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    found = {"cuda": str(torch.version.cuda), "cudnn": str(cudnn)}
    if torch.distributed.is_nccl_available():
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["nccl"] = ".".join(str(part) for part in version)
    return found
