"""Times a call on the device: its seconds back to back, the host's seconds to issue it, and the kernels it launches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

WARM_UPS = 3
LEAST_REPEATS = 5
PROFILED = 3


@dataclass(frozen=True)
class Kernel:
    """One kernel that a call launches; ``seconds`` is the mean of one launch."""

    name: str
    launches: float
    seconds: float


@dataclass(frozen=True)
class Measured:
    """One call; ``ideal_bytes`` counts every operand once, read or written."""

    subject: str
    library: str
    shape: dict[str, int]
    seconds: float
    host_s: float
    ideal_bytes: int
    kernels: list[Kernel]

    def json(self) -> dict[str, Any]:
        """Return the fields with the achieved bandwidth beside them."""
        return {**asdict(self), "ideal_bytes_per_s": self.ideal_bytes / self.seconds if self.ideal_bytes else None}


def synchronize(device: torch.device) -> None:
    """Wait for the device; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def busy_seconds(call: Callable[[], object], device: torch.device, span_s: float) -> float:
    """Return the seconds of one call when calls follow each other without a gap for ``span_s`` seconds."""
    for _ in range(WARM_UPS):
        call()
    synchronize(device)
    begin, count, times = time.perf_counter(), 0, []
    while count < LEAST_REPEATS or time.perf_counter() - begin < span_s:
        start = time.perf_counter()
        for _ in range(LEAST_REPEATS):
            call()
        synchronize(device)
        times.append((time.perf_counter() - start) / LEAST_REPEATS)
        count += LEAST_REPEATS
    return median(times)


def host_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that the host takes to issue one call, while the device still works on earlier ones."""
    found = []
    for _ in range(LEAST_REPEATS):
        synchronize(device)
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    synchronize(device)
    return median(found)


def kernels_of(call: Callable[[], object], device: torch.device) -> list[Kernel]:
    """Return the kernels that one call launches, the slowest first; none on a CPU."""
    if device.type != "cuda":
        return []
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
        for _ in range(PROFILED):
            call()
        synchronize(device)
    found = [
        Kernel(event.key, event.count / PROFILED, event.self_device_time_total / event.count / 1e6)
        for event in record.key_averages()
        if event.device_type == DeviceType.CUDA
        and event.self_device_time_total > 0
        and not event.is_user_annotation  # an optimizer's step is marked as one, over all its kernels
    ]
    return sorted(found, key=lambda kernel: -kernel.launches * kernel.seconds)


def measured(
    subject: str,
    library: str,
    shape: dict[str, int],
    call: Callable[[], object],
    device: torch.device,
    *,
    ideal_bytes: int = 0,
    span_s: float = 0.1,
) -> Measured:
    """Return one call's figures."""
    seconds = busy_seconds(call, device, span_s)
    host_s = host_seconds(call, device)
    return Measured(subject, library, shape, seconds, host_s, ideal_bytes, kernels_of(call, device))
