"""Reports what this machine has and can run: device, memory, kernels, versions.

The report helps a user to find out why a plan does not run.
"""

from __future__ import annotations

from memo_exec.machine.attention_kernels import attention_kernels, tried_attention_kernels
from memo_exec.machine.machine import Machine, this_machine, versions
from memo_exec.machine.preflight import DTYPES
from memo_exec.machine.rowwise_kernels import tried_rowwise_kernels
from memo_sim.contract.units import format_bytes

HEAD_DIMS = (64, 128, 256)
"""Head sizes with which attention kernels are tried."""


def report() -> str:
    """Return the report as text, one fact per line."""
    machine = this_machine()
    lines = [("device", f"{machine.name} ({machine.device}), {machine.devices} visible")]
    if machine.device == "cpu":
        lines.append(("compute threads", f"{machine.compute_threads}, plus one for each copy lane"))
    else:
        free, total = format_bytes(machine.device_free_bytes), format_bytes(machine.device_memory_bytes)
        lines.append(("device memory", f"{free} free of {total}"))
    free, total = format_bytes(machine.host_available_bytes), format_bytes(machine.host_memory_bytes)
    lines.append(("host memory", f"{free} free of {total} (the container's limit counts)"))
    lines.append(("dtypes", ", ".join(DTYPES[machine.device])))
    lines += [(f"attention {name}", text) for name, text in _attention(machine).items()]
    lines += [(f"row-wise {name}", fault or "available") for name, fault in tried_rowwise_kernels(machine).items()]
    lines += list(versions().items())
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _attention(machine: Machine) -> dict[str, str]:
    """Return, for each attention kernel, why it is missing, or the head sizes with which it works and fails."""
    missing = attention_kernels(machine)
    found = {}
    for name, faults in tried_attention_kernels(
        machine, "fp32" if machine.device == "cpu" else "bf16", HEAD_DIMS
    ).items():
        works = ", ".join(str(size) for size, fault in faults.items() if not fault)
        wrong = [f"head size {size}: {fault}" for size, fault in faults.items() if fault]
        tried = [f"available with head sizes {works}"] if works else []
        found[name] = missing[name] or "; ".join(tried + wrong)
    return found
