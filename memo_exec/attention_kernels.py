"""Which attention kernels can be used on a machine, and why the others cannot."""

from __future__ import annotations

import importlib.util
from importlib import import_module

from memo_exec.kernels import KERNELS
from memo_exec.kernels.attention import BACKENDS
from memo_exec.machine import Machine
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.plan import Decisions
from memo_sim.program.head_groups import flash3_head_dim
from memo_sim.program.program import Program


def check_kernels(decisions: Decisions, program: Program, machine: Machine) -> None:
    """Refuse a program with operators or attention that nothing here plays; nothing is substituted.

    Raises:
        CannotRun: naming them, and the attention kernels that can be used.
    """
    missing = sorted({i.op for t in program.templates for i in t.instructions} - set(KERNELS))
    if missing:
        raise CannotRun("the plan's program has operators without a kernel", got=", ".join(missing))
    if decisions.kernels.rowwise == "triton" and (reason := _triton_missing(machine)):
        raise CannotRun(
            "the plan's row-wise kernels cannot be used here",
            where="$.decisions.kernels.rowwise",
            got=f"triton: {reason}",
            wanted="torch",
            hint="another kernel is another plan: price it again with kernels.rowwise torch",
        )
    kernel, available = decisions.kernels.attention, attention_kernels(machine)
    reason = available.get(kernel, "no such kernel in this version") or _unsupported(decisions)
    if reason:
        fitting = ", ".join(name for name, why_not in available.items() if not why_not)
        raise CannotRun(
            "the plan's attention kernel cannot be used here",
            where="$.decisions.kernels.attention",
            got=f"{kernel}: {reason}",
            wanted=fitting or "an attention kernel for this device",
            hint="another kernel is another plan: memo-exec calibrate -o here.json, then what-if --cluster here.json",
        )


def _triton_missing(machine: Machine) -> str:
    """Return why Triton's kernels cannot be used here; "" when they can."""
    if machine.device != "cuda":
        return f"it plays on cuda, this device is {machine.device}"
    return "" if importlib.util.find_spec("triton") else "triton is not installed (CUDA builds of torch bring it)"


def attention_kernels(machine: Machine) -> dict[str, str]:
    """Return for every attention kernel why it cannot be used on this machine's device; "" when it can."""
    return {name: _why_not(name, machine) for name in BACKENDS}


def _why_not(kernel: str, machine: Machine) -> str:
    wanted = "cpu" if kernel == "torch-flash-cpu" else "cuda"
    if machine.device != wanted:
        return f"it plays on {wanted}, this device is {machine.device}"
    if kernel in ("flash3", "flash4", "te-fused"):
        return str(import_module(BACKENDS[kernel]).missing())
    if kernel == "flash2":
        return _flash_attn_missing()
    if kernel == "torch-flash":
        from torch.nn import attention

        active = attention.current_flash_attention_impl()
        return f"{active} plays torch's flash operators in this process" if active else ""
    if kernel == "torch-cudnn":
        import torch

        found = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
        return "" if found else "this torch has no cuDNN"
    return ""


def _unsupported(decisions: Decisions) -> str:
    """Return why a library that is there has no kernel for these heads; "" when it has."""
    kernel, head_dim = decisions.kernels.attention, decisions.model.head_dim
    if kernel == "torch-cudnn" and decisions.deterministic:
        return "torch does not ask cuDNN for its deterministic backward"
    if kernel not in ("flash3", "flash4", "te-fused"):
        return ""
    if head_dim % 8 or head_dim > 256:
        return f"heads of {head_dim}: it has multiples of 8 up to 256"
    if kernel == "flash3" and decisions.deterministic and flash3_head_dim(head_dim) == 256:
        return f"heads of {head_dim}: its deterministic backward has up to 192"
    return ""


def _flash_attn_missing() -> str:
    """Return "" when flash-attn 2's low-level calls can be imported (flash-attn 4 brings the package without them)."""
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    try:
        from flash_attn.flash_attn_interface import _flash_attn_backward, flash_attn_gpu
    except (ImportError, OSError) as error:
        return f"flash-attn cannot be imported: {error}"
    return "" if _flash_attn_backward and flash_attn_gpu else "flash-attn lacks its low-level calls"
