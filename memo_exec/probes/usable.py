"""Selects the kernels that calibration measures: it tries each one, and records why an installed one fails."""

from __future__ import annotations

from dataclasses import dataclass, field

from memo_exec.machine.attention_kernels import attention_kernels, tried_attention_kernels
from memo_exec.machine.machine import Machine
from memo_exec.machine.rowwise_kernels import rowwise_kernels, tried_losses, tried_rowwise_kernels
from memo_exec.probes.grid import Grid
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.knobs import Loss, RowwiseKernel


@dataclass(frozen=True)
class Usable:
    """Kernels to measure; ``left_out`` has the reason for each one that is installed but failed, by name."""

    attention: list[str]
    rowwise: list[RowwiseKernel]
    left_out: dict[str, str]
    losses: list[Loss] = field(default_factory=list)
    """Losses with the classifier's product inside whose kernels are of Triton."""


def usable(machine: Machine, grid: Grid) -> Usable:
    """Return the kernels that work on this machine; attention must work with every head size of the grid.

    Raises:
        CannotRun: if no attention kernel works.
    """
    missing = attention_kernels(machine) | _by_name(rowwise_kernels(machine))
    faults = {
        name: next((f"heads of {size}: {why_not}" for size, why_not in found.items() if why_not), "")
        for name, found in tried_attention_kernels(machine, grid.dtype, grid.head_dims).items()
    }
    rowwise = tried_rowwise_kernels(machine)
    attention = [name for name, fault in faults.items() if not fault]
    if not attention:
        reasons = "; ".join(f"{name}: {missing[name] or fault}" for name, fault in faults.items())
        raise CannotRun("no attention kernel works on this device", got=f"{machine.name} ({reasons})")
    losses = tried_losses(machine)
    failed = faults | _by_name(rowwise) | {str(name): fault for name, fault in losses.items()}
    missing |= dict.fromkeys(map(str, losses), missing["triton"])
    left_out = {name: fault for name, fault in failed.items() if fault and not missing[name]}
    kept = [name for name, fault in rowwise.items() if not fault]
    return Usable(attention, kept, left_out, [name for name, fault in losses.items() if not fault])


def _by_name(found: dict[RowwiseKernel, str]) -> dict[str, str]:
    return {str(name): why_not for name, why_not in found.items()}
