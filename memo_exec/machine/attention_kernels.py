"""Lists the attention kernels that a machine can use, with the reason why the others cannot be used."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from importlib import import_module

import torch
from torch.nn import attention

from memo_exec.kernels import KERNELS
from memo_exec.kernels.attention import BACKENDS
from memo_exec.machine.kernel_trial import Heads, attention_fails, forms_of, triton_fails
from memo_exec.machine.machine import Machine
from memo_exec.machine.rowwise_kernels import rowwise_kernels
from memo_sim.contract.attention_kernels import ATTENTION_KERNELS
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.knobs import DtypeName, Loss, RowwiseKernel
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.program import Program
from memo_sim.program.operators.framework_kernels import library_of
from memo_sim.program.operators.head_groups import flash3_head_dim

LEAST_CAPABILITY = 8
"""Lowest major compute capability of flash-attn 2, torch's build of it and cuDNN's fused attention."""

_ANOTHER_KERNEL = (
    "make a plan with another kernel: memo-exec calibrate -o here.json, then memo-sim what-if --cluster here.json"
)


def check_kernels(decisions: Decisions, program: Program, machine: Machine) -> None:
    """Refuse a plan whose kernels this machine lacks. No kernel is substituted.

    Raises:
        CannotRun: when an operator has no kernel, or the plan's row-wise or attention kernel cannot be used here. The
            message names the kernels that can be used.
    """
    kernel = decisions.kernels.attention
    known = ATTENTION_KERNELS.get(kernel)
    if known is not None and not known.executed:
        raise _refused_attention(kernel, f"{known.title} can be priced, not run", attention_kernels(machine))
    missing = sorted({i.op for t in program.templates for i in t.instructions} - set(KERNELS))
    if missing:
        raise CannotRun("some operators of the plan's program have no kernel", got=", ".join(missing))
    rowwise = decisions.kernels.rowwise
    reason = rowwise_kernels(machine).get(rowwise, "memo-exec has no such kernels; a framework's can only be simulated")
    if reason:
        raise _refused_rowwise(rowwise, reason)
    if _needs_triton_loss(decisions, machine) and (reason := rowwise_kernels(machine)["triton"]):
        raise _refused_loss(decisions.loss, reason)
    if decisions.fp8_experts and machine.device == "cuda" and (reason := rowwise_kernels(machine)["triton"]):
        raise _refused_experts(reason)
    available = attention_kernels(machine)
    reason = available.get(kernel, "no such kernel in this version") or _unsupported(decisions)
    if reason:
        raise _refused_attention(kernel, reason, available)


def try_kernels(decisions: Decisions, machine: Machine) -> None:
    """Run the plan's kernels on a few tokens, and refuse those that do not work here.

    Raises:
        CannotRun: with the library's error, or the relative error of its result.
    """
    kernel, rowwise, device = decisions.kernels.attention, decisions.kernels.rowwise, torch.device(machine.device)
    heads = Heads.of(decisions.model)
    for form in forms_of(decisions):
        deterministic = decisions.deterministic
        if reason := attention_fails(kernel, heads, decisions.dtype, device, form, deterministic=deterministic):
            raise _refused_attention(kernel, reason, attention_kernels(machine) | {kernel: reason})
    if rowwise == "triton" and (reason := triton_fails(device)):
        raise _refused_rowwise(rowwise, reason)
    if _needs_triton_loss(decisions, machine) and (reason := triton_fails(device, decisions.loss)):
        raise _refused_loss(decisions.loss, reason)
    if decisions.fp8_experts and (reason := triton_fails(device)):
        raise _refused_experts(reason)


def tried_attention_kernels(machine: Machine, dtype: DtypeName, head_dims: Iterable[int]) -> dict[str, dict[int, str]]:
    """Return, for every attention kernel and head size, why it cannot be used here; "" when it can."""
    device = torch.device(machine.device)
    return {
        name: {size: why_not or attention_fails(name, Heads(2, 1, size), dtype, device) for size in head_dims}
        for name, why_not in attention_kernels(machine).items()
    }


def _refused_rowwise(kernel: RowwiseKernel, reason: str) -> CannotRun:
    return CannotRun(
        "the plan's row-wise kernels cannot be used here",
        where="$.decisions.kernels.rowwise",
        got=f"{kernel}: {reason}",
        wanted="torch",
        hint="make a plan with --rowwise torch" if library_of(kernel) else _ANOTHER_KERNEL,
    )


def _needs_triton_loss(decisions: Decisions, machine: Machine) -> bool:
    """Return whether the loss has Triton's kernels: linear-triton always; fused on CUDA, with a whole vocabulary."""
    fused = decisions.loss == "fused" and decisions.layout.tp == 1 and machine.device == "cuda"
    return fused or decisions.loss == "linear-triton"


def _refused_experts(reason: str) -> CannotRun:
    return CannotRun(
        "products of experts in FP8 are a Triton kernel, which cannot be used here",
        where="$.decisions.fp8_experts",
        got=f"true: {reason}",
        wanted="false",
        hint="install Triton, or make the plan without --fp8-experts",
    )


def _refused_loss(loss: Loss, reason: str) -> CannotRun:
    own = "linear" if loss == "linear-triton" else "blocks"
    return CannotRun(
        "the plan's loss cannot be used here",
        where="$.decisions.loss",
        got=f"{loss}: {reason}",
        wanted="auto, blocks, eager-fp32, vocab-parallel, checkpointed, checkpointed-fp32 or linear",
        hint=f"make the plan with memo-sim what-if --loss {own}",
    )


def _refused_attention(kernel: str, reason: str, available: dict[str, str]) -> CannotRun:
    return CannotRun(
        "the plan's attention kernel cannot be used here",
        where="$.decisions.kernels.attention",
        got=f"{kernel}: {reason}",
        wanted=", ".join(name for name, why_not in available.items() if not why_not)
        or "an attention kernel for this device",
        hint=_ANOTHER_KERNEL,
    )


def attention_kernels(machine: Machine) -> dict[str, str]:
    """Return, for every attention kernel, why it cannot be used on this machine's device; "" when it can."""
    return {name: _why_not(name, machine) for name in BACKENDS}


def _why_not(kernel: str, machine: Machine) -> str:
    wanted = "cpu" if kernel == "torch-flash-cpu" else "cuda"
    if machine.device != wanted:
        return f"it runs on {wanted}, this device is {machine.device}"
    if kernel in ("flash3", "flash4", "te-fused"):
        return str(import_module(BACKENDS[kernel]).missing())
    if kernel == "torch-flash-cpu":
        return ""
    return _MISSING[kernel]() or _too_old()


def _too_old() -> str:
    """Return why the device is too old for kernels that need ``LEAST_CAPABILITY``; "" when it is not."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (LEAST_CAPABILITY, 0)
    if major >= LEAST_CAPABILITY:
        return ""
    return f"it needs compute capability {LEAST_CAPABILITY}.0 or higher, this device has {major}.{minor}"


def _torch_flash_missing() -> str:
    active = attention.current_flash_attention_impl()
    return f"{active} has replaced torch's flash operators in this process" if active else ""


def _cudnn_missing() -> str:
    return "" if torch.backends.cudnn.is_available() else "this build of torch has no cuDNN"  # type: ignore[no-untyped-call]


def _unsupported(decisions: Decisions) -> str:
    """Return why an installed library has no kernel for the plan's heads; "" when it has one."""
    kernel, head_dim = decisions.kernels.attention, decisions.model.head_dim
    if kernel == "torch-cudnn" and decisions.deterministic:
        return "torch does not use cuDNN's deterministic backward"
    if kernel == "torch-flash-cpu":
        return ""
    if head_dim % 8 or head_dim > 256:
        return f"head_dim is {head_dim}, it supports multiples of 8 up to 256"
    if kernel == "flash3" and decisions.deterministic and flash3_head_dim(head_dim) == 256:
        return f"head_dim is {head_dim}, its deterministic backward supports up to 192"
    return ""


def _flash_attn_missing() -> str:
    """Return "" when flash-attn 2's low-level calls can be imported, else the reason.

    flash-attn 4 installs the same package without these calls.
    """
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    try:
        from flash_attn.flash_attn_interface import _flash_attn_backward, flash_attn_gpu
    except (ImportError, OSError) as error:
        return f"flash-attn cannot be imported: {error}"
    return "" if _flash_attn_backward and flash_attn_gpu else "flash-attn lacks its low-level calls"


_MISSING = {"flash2": _flash_attn_missing, "torch-flash": _torch_flash_missing, "torch-cudnn": _cudnn_missing}
