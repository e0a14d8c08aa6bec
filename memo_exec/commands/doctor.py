"""What is here, for a person who wants to know why a plan does not run: device, memory, kernels, versions."""

from __future__ import annotations

from memo_exec.machine.attention_kernels import attention_kernels, tried_attention_kernels
from memo_exec.machine.machine import Machine, this_machine, versions
from memo_exec.machine.preflight import DTYPES
from memo_exec.machine.rowwise_kernels import tried_rowwise_kernels
from memo_sim.contract.units import format_bytes

HEAD_DIMS = (64, 128, 256)
"""Head sizes that attention kernels are tried with."""


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
    lines += [(f"attention {name}", text) for name, text in _attention(machine).items()]
    lines += [(f"row-wise {name}", fault or "available") for name, fault in tried_rowwise_kernels(machine).items()]
    lines += list(versions().items())
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _attention(machine: Machine) -> dict[str, str]:
    """Return what each attention kernel can do: missing, or tried with every head size."""
    missing = attention_kernels(machine)
    found = {}
    for name, faults in tried_attention_kernels(
        machine, "fp32" if machine.device == "cpu" else "bf16", HEAD_DIMS
    ).items():
        works = ", ".join(str(size) for size, fault in faults.items() if not fault)
        wrong = [f"heads of {size}: {fault}" for size, fault in faults.items() if fault]
        tried = [f"available with heads of {works}"] if works else []
        found[name] = missing[name] or "; ".join(tried + wrong)
    return found
