"""Lists the implementations of the row-wise operators that a machine can use, with the reason why others cannot."""

from __future__ import annotations

import importlib.util

import torch

from memo_exec.machine.kernel_trial import triton_fails
from memo_exec.machine.machine import Machine
from memo_sim.contract.knobs import Loss, RowwiseKernel


def rowwise_kernels(machine: Machine) -> dict[RowwiseKernel, str]:
    """Return, for every implementation, why it cannot be imported for this machine's device; "" when it can."""
    return {"torch": "", "triton": _triton_missing(machine)}


def tried_rowwise_kernels(machine: Machine) -> dict[RowwiseKernel, str]:
    """Return the same as ``rowwise_kernels``, after also trying the implementations that can be imported."""
    found = rowwise_kernels(machine)
    found["triton"] = found["triton"] or triton_fails(torch.device(machine.device))
    return found


def tried_losses(machine: Machine) -> dict[Loss, str]:
    """Return, for every loss that Triton alone plays, why it cannot be used on this machine; "" when it can."""
    device = torch.device(machine.device)
    return {"linear-triton": _triton_missing(machine) or triton_fails(device, "linear-triton")}


def _triton_missing(machine: Machine) -> str:
    if machine.device != "cuda":
        return f"it runs on cuda, this device is {machine.device}"
    return "" if importlib.util.find_spec("triton") else "triton is not installed (CUDA builds of torch include it)"
