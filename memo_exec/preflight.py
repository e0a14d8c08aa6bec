"""Whether this machine can run a plan, asked before anything is allocated.

Refused, with what was got and wanted and nothing substituted: a program that is not the one the plan pins, kernels that
are missing here, dtypes the device cannot compute in, more ranks than were started, a placement that is not the one the
plan pins or that is wrong, and memory that is not there. The container's limit counts as the host's memory, not the
machine's.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memo_exec.machine import Machine
from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput, CannotRun, Infeasible
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Decisions, Plan
from memo_sim.contract.units import format_bytes
from memo_sim.program.check_placement import check_placement
from memo_sim.program.columns import Flags, expand
from memo_sim.program.liveness import Liveness, live_bytes, liveness, peak
from memo_sim.program.lower import lower, program_sha256
from memo_sim.program.program import Program
from memo_sim.program.requests import requests_of

DTYPES = {"cpu": ("fp32", "bf16"), "cuda": ("bf16",)}
"""What kernels compute in: attention on CUDA has no fp32, and fp16 would need a scaled loss, which is not built."""

CUDA_RESERVE_BYTES = 2**29
"""Device bytes that the context and libraries take after the check."""


MOST_INSTRUCTIONS = 2_000_000
"""Of one step; each is bound to its buffers in Python before the first step."""

SHOWN_FAULTS = 3
"""Of a wrong placement, in the message."""


@dataclass(frozen=True)
class Needs:
    """Bytes a program asks for: on its device, and on the host."""

    device_bytes: int
    host_bytes: int


def checked_program(plan: Plan, *, where: str) -> Program:
    """Return the program that a plan's decisions lower to.

    Raises:
        BadInput: when it is not the one the plan pins.
        CannotRun: when the decisions cannot be lowered.
    """
    try:
        _check_length(plan.decisions)
        programs = lower(plan.decisions)
    except Infeasible as error:
        raise CannotRun(
            error.what, where=f"{where}: {error.where or 'decisions'}", got=error.got, wanted=error.wanted
        ) from None
    found = program_sha256(programs)
    if found != plan.program_sha256:
        raise BadInput(
            "the plan's decisions lower to another program than the one it pins",
            where=f"{where}: $.program_sha256",
            got=plan.program_sha256[:16],
            wanted=found[:16],
            hint="the plan was edited, or made by another version: price it again with memo-sim what-if --plan",
        )
    return programs[0]


def _check_length(decisions: Decisions) -> None:
    """Refuse a step that Python would bind for hours."""
    one = lower(decisions, micro_batches=1)[0].instruction_count
    if one * decisions.micro_batches > MOST_INSTRUCTIONS:
        raise Infeasible(
            "the step has more instructions than the executor plays",
            where="global_batch",
            got=f"{decisions.micro_batches} micro-batches of about {one} instructions",
            wanted=f"at most {MOST_INSTRUCTIONS} instructions",
        )


def placement_path(plan_path: Path) -> Path:
    """Return where the placement of a plan lies: ``plan.placement.json`` beside ``plan.json``."""
    return plan_path.with_name(f"{plan_path.stem}.placement.json")


def checked_placement(plan: Plan, program: Program, plan_path: Path) -> Placement | None:
    """Return the placement that a plan runs in; None when the plan is for the caching allocator.

    Raises:
        CannotRun: when the plan pins none, or none lies beside it.
        BadInput: when it is another than the plan pins, or wrong for ``program``.
    """
    if plan.decisions.memory_policy == "caching":
        return None
    path = placement_path(plan_path)
    if not plan.placement_sha256:
        raise CannotRun(
            "the plan wants planned memory and pins no placement",
            where=f"{plan_path}: $.placement_sha256",
            wanted="the hash of the placement beside it",
            hint=f"make the plan with memo-sim what-if -o {plan_path}, or memory_policy caching",
        )
    if not path.is_file():
        raise CannotRun(
            "the plan wants planned memory and its placement is not there",
            where=str(path),
            wanted=f"the placement {plan.placement_sha256[:16]}",
            hint=f"memo-sim plan-memory {plan_path} -o {path}",
        )
    placement = codec.read(path, Placement)
    found = codec.sha256_of(placement)
    if found != plan.placement_sha256:
        raise BadInput(
            "the placement beside the plan is not the one the plan pins",
            where=str(path),
            got=found[:16],
            wanted=plan.placement_sha256[:16],
            hint="make plan and placement again with memo-sim what-if -o",
        )
    if faults := check_placement(placement, requests_of(program)):
        more = f" (and {len(faults) - SHOWN_FAULTS} more)" if len(faults) > SHOWN_FAULTS else ""
        raise BadInput(
            "the placement is wrong for the plan's program",
            where=str(path),
            got="; ".join(faults[:SHOWN_FAULTS]) + more,
            wanted="every buffer at an address of its own while it lives",
            hint="make plan and placement again with memo-sim what-if -o",
        )
    return placement


def check(decisions: Decisions, program: Program, machine: Machine, placement: Placement | None = None) -> Needs:
    """Return what the program needs, when this machine has it; ``placement`` is the arena it will run in.

    Raises:
        CannotRun: naming the first thing that is missing.
    """
    _check_ranks(decisions)
    _check_kernels(decisions, program, machine)
    _check_dtype(decisions, machine)
    needs = needs_of(program, machine, placement)
    _check_memory(needs, machine)
    return needs


def _check_ranks(decisions: Decisions) -> None:
    wanted, ranks = decisions.layout.devices, os.environ.get("WORLD_SIZE", "1")
    if not (ranks.isascii() and ranks.isdigit()):
        raise CannotRun("WORLD_SIZE is not a number of ranks", got=repr(ranks), wanted="what torchrun sets, or none")
    started = int(ranks)
    if wanted > 1:
        raise CannotRun(
            "the plan's layout needs several ranks, which the executor does not play yet",
            where="$.decisions.layout",
            got=f"{wanted} devices",
            wanted="1",
            hint="plan for one device: memo-sim what-if --tp 1 --cp 1 --dp 1",
        )
    if started != wanted:
        raise CannotRun(
            "more ranks were started than the plan's layout has",
            where="$.decisions.layout",
            got=f"WORLD_SIZE {started}",
            wanted=wanted,
            hint=f"torchrun --nproc_per_node {wanted}, or no torchrun",
        )


def _check_kernels(decisions: Decisions, program: Program, machine: Machine) -> None:
    from memo_exec.kernels import KERNELS

    missing = sorted({i.op for t in program.templates for i in t.instructions} - set(KERNELS))
    if missing:
        raise CannotRun("the plan's program has operators without a kernel", got=", ".join(missing))
    kernel, available = decisions.kernels.attention, attention_kernels(machine)
    reason = available.get(kernel, "no such kernel in this version")
    if reason:
        fitting = ", ".join(name for name, why_not in available.items() if not why_not)
        raise CannotRun(
            "the plan's attention kernel cannot be used here",
            where="$.decisions.kernels.attention",
            got=f"{kernel}: {reason}",
            wanted=fitting or "an attention kernel for this device",
            hint="another kernel is another plan: memo-exec calibrate -o here.json, then what-if --cluster here.json",
        )


def attention_kernels(machine: Machine) -> dict[str, str]:
    """Return for every attention kernel why it cannot be used on this machine's device; "" when it can."""
    from memo_exec.kernels.attention import BACKENDS

    return {name: _why_not(name, machine) for name in BACKENDS}


def _why_not(kernel: str, machine: Machine) -> str:
    wanted = "cpu" if kernel == "torch-flash-cpu" else "cuda"
    if machine.device != wanted:
        return f"it plays on {wanted}, this device is {machine.device}"
    if kernel == "flash2":
        return _flash_attn_missing()
    if kernel == "torch-cudnn":
        import torch

        found = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
        return "" if found else "this torch has no cuDNN"
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


def _check_dtype(decisions: Decisions, machine: Machine) -> None:
    supported = list(DTYPES[machine.device])
    if machine.device == "cuda":
        import torch

        if not torch.cuda.is_bf16_supported():
            supported.remove("bf16")
    if decisions.dtype not in supported:
        raise CannotRun(
            "the device does not compute in the plan's dtype",
            where="$.decisions.dtype",
            got=decisions.dtype,
            wanted=" or ".join(supported),
        )


def needs_of(program: Program, machine: Machine, placement: Placement | None = None) -> Needs:
    """Return the bytes the program will ask for here.

    With a placement these are the arena and, beside it, the workspaces that libraries allocate themselves.
    """
    lives = liveness(program, expand(program))
    device = peak(live_bytes(lives, device=True)).bytes
    host = peak(live_bytes(lives, device=False)).bytes
    if placement is not None:
        device = placement.arena_bytes + _outside_bytes(program, lives)
    elif machine.device == "cpu":
        device = max(device, _kept_by_size(lives))
    return Needs(device, host)


def _outside_bytes(program: Program, lives: Liveness) -> int:
    """Return the most bytes of library workspaces that live at once: torch's allocator hands them out."""
    from memo_exec.schedule import library_workspaces

    chosen: Flags = np.zeros(len(lives.bytes), dtype=np.bool_)
    chosen[list(library_workspaces(program))] = True
    change = np.zeros(lives.instructions + 2, dtype=np.int64)
    np.add.at(change, lives.birth[chosen], lives.bytes[chosen])
    np.add.at(change, lives.death[chosen] + 1, -lives.bytes[chosen])
    return int(np.cumsum(change).max(initial=0))


def _kept_by_size(lives: Liveness) -> int:
    """Return what the CPU's store comes to hold: it hands blocks of one size out again and returns none."""
    used = lives.on_device & (lives.death >= lives.birth)
    lasting = used & (lives.birth < 0)
    total = int(lives.bytes[lasting].sum())
    dynamic = used & ~lasting
    for size in np.unique(lives.bytes[dynamic]).tolist():
        chosen = dynamic & (lives.bytes == size)
        change = np.zeros(lives.instructions + 2, dtype=np.int64)
        np.add.at(change, lives.birth[chosen], 1)
        np.add.at(change, lives.death[chosen] + 1, -1)
        total += size * int(np.cumsum(change).max())
    return total


def _check_memory(needs: Needs, machine: Machine) -> None:
    if machine.device == "cpu":
        wanted = needs.device_bytes + needs.host_bytes
        if wanted > machine.host_available_bytes:
            raise CannotRun(
                "the plan needs more memory than this host has free (on a CPU, device and host memory are one)",
                got=f"{format_bytes(machine.host_available_bytes)} free of {format_bytes(machine.host_memory_bytes)}",
                wanted=f"{format_bytes(needs.device_bytes)} device + {format_bytes(needs.host_bytes)} host",
                hint="a shorter sequence, or recompute instead of swap",
            )
        return
    if needs.device_bytes + CUDA_RESERVE_BYTES > machine.device_free_bytes:
        raise CannotRun(
            "the plan needs more device memory than is free",
            got=f"{format_bytes(machine.device_free_bytes)} free of {format_bytes(machine.device_memory_bytes)}",
            wanted=f"{format_bytes(needs.device_bytes)} and {format_bytes(CUDA_RESERVE_BYTES)} for libraries",
            hint="plan with --device-memory-gib, or stop what else uses the device",
        )
    if needs.host_bytes > machine.host_available_bytes:
        raise CannotRun(
            "the plan swaps more than this host's free memory (the container's limit counts)",
            got=f"{format_bytes(machine.host_available_bytes)} free of {format_bytes(machine.host_memory_bytes)}",
            wanted=format_bytes(needs.host_bytes),
            hint="plan with --host-memory-gib, or a smaller --alpha",
        )
