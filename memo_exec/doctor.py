"""What is here, for a person who wants to know why a plan does not run: device, memory, kernels, versions."""

from __future__ import annotations

from memo_exec.attention_kernels import attention_kernels
from memo_exec.machine import this_machine, versions
from memo_exec.preflight import DTYPES
from memo_sim.contract.units import format_bytes


def report() -> str:
    """Return one line a fact."""
    machine = this_machine()
    lines = [("device", f"{machine.name} ({machine.device}), {machine.devices} visible")]
    if machine.device == "cpu":
        lines.append(("compute threads", f"{machine.compute_threads}, and one for each copy lane"))
    else:
        free, total = format_bytes(machine.device_free_bytes), format_bytes(machine.device_memory_bytes)
        lines.append(("device memory", f"{free} free of {total}"))
    free, total = format_bytes(machine.host_available_bytes), format_bytes(machine.host_memory_bytes)
    lines.append(("host memory", f"{free} free of {total} (the container's limit counts)"))
    lines.append(("dtypes", ", ".join(DTYPES[machine.device])))
    for name, why_not in attention_kernels(machine).items():
        lines.append((f"attention {name}", why_not or "available"))
    lines += list(versions().items())
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)
