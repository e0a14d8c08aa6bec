"""Checks that this machine can run a plan, before anything is allocated.

A plan is refused, and nothing is substituted, in these cases:

- its decisions lower to another program than the one it pins;
- it needs another number of ranks than were started;
- a kernel is missing here, or fails when it is tried on a few tokens;
- the device cannot compute in the plan's dtype, or has no products in FP8 for a plan that has them;
- too little memory is free.
"""

from __future__ import annotations

from collections.abc import Callable

from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import rank_program
from memo_exec.distributed.world import Launch
from memo_exec.machine.attention_kernels import check_kernels, try_kernels
from memo_exec.machine.fp8_products import check_fp8, check_recipe
from memo_exec.machine.library_scratch import library_scratch
from memo_exec.machine.machine import Machine
from memo_exec.machine.memory_budget import Needs, check_memory, needs_of
from memo_exec.machine.placement_file import has_library_slots
from memo_sim.contract.codec import of_file
from memo_sim.contract.errors import BadInput, CannotRun, Infeasible
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Decisions, Plan
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import check_pinned, lower

DTYPES = {"cpu": ("fp32", "bf16"), "cuda": ("bf16",)}
"""The dtypes in which kernels compute. Attention on CUDA has no fp32; fp16 would need loss scaling, which we lack."""

MOST_INSTRUCTIONS = 2_000_000
"""Largest number of instructions in a step. Python binds each to its buffers before the first step."""

ONE_DEVICE = (
    "plan for one device: memo-sim what-if --cluster a800-1x1 --tp 1 --cp 1 --dp 1 (memo-sim list clusters shows the "
    "other clusters; memo-exec calibrate -o here.json measures this machine)"
)


def checked_program(plan: Plan, *, where: str, rank: int = 0) -> Program:
    """Return the program that a plan's decisions lower to for one of its ranks.

    Raises:
        BadInput: when the decisions cannot be lowered, or lower to another program than the one the plan pins.
        CannotRun: when the plan's recipe of FP8 has no kernels, or the step has more than ``MOST_INSTRUCTIONS``
            instructions.
    """
    check_recipe(plan.decisions, where)
    pinned_programs(plan, where=where, check=lambda: _check_length(plan.decisions, where))
    return rank_program(plan.decisions, MeshCoordinates(plan.decisions.layout, rank))


def pinned_programs(plan: Plan, *, where: str, check: Callable[[], None] = lambda: None) -> tuple[Program, ...]:
    """Return the programs that a plan pins, of all stages; ``check`` looks at the decisions before they are lowered.

    Raises:
        BadInput: when the decisions cannot be lowered, or lower to another program than the one the plan pins.
    """
    try:
        with of_file(where):
            check()
            programs = lower(plan.decisions)
    except Infeasible as error:
        raise BadInput(
            error.what,
            where=f"{where}: {error.where or 'decisions'}",
            got=error.got,
            wanted=error.wanted,
            hint="the plan was edited: make it again with memo-sim what-if -o",
        ) from None
    check_pinned(plan, programs, where=where)
    return programs


def _check_length(decisions: Decisions, where: str) -> None:
    """Refuse a step with so many instructions that binding them in Python would take hours."""
    few = min(decisions.layout.pp, decisions.micro_batches)  # the smallest number that pipeline schedules accept
    one = max(program.instruction_count for program in lower(decisions, micro_batches=few)) // few
    if one * decisions.micro_batches > MOST_INSTRUCTIONS:
        raise CannotRun(
            "the step has more instructions than the executor can play",
            where=f"{where}: global_batch",
            got=f"{decisions.micro_batches} micro-batches of about {one} instructions",
            wanted=f"at most {MOST_INSTRUCTIONS} instructions",
        )


def check(
    decisions: Decisions,
    program: Program,
    machine: Machine,
    placement: Placement | None = None,
    *,
    lent: bool = False,
) -> Needs:
    """Check kernels, dtype and memory, and return the memory that the program needs.

    ``placement`` is the arena in which it runs. With ``lent``, the arena also serves the workspaces of libraries.

    Raises:
        CannotRun: for the first requirement that this machine does not meet.
    """
    check_fp8(decisions, program, machine)
    check_kernels(decisions, program, machine)
    _check_dtype(decisions, machine)
    if lent and placement is not None and not has_library_slots(program, placement):
        raise CannotRun(
            "the plan's arena has no slots for the workspaces of libraries",
            where="$.decisions.replay_allocator",
            got="false",
            wanted="true",
            hint="make the plan with memo-sim what-if --replay-allocator, or run without --replay-allocator",
        )
    needs = needs_of(program, machine, placement, lent=lent)
    check_memory(needs, machine)
    if machine.device == "cuda":  # every build of torch has its CPU kernels, so they need no trial
        try_kernels(decisions, machine)
        return needs
    if decisions.dtype == "fp32":  # its products take nothing, its attention the tiles
        return needs
    scratch = library_scratch(decisions, program, machine.compute_threads)
    needs = needs_of(program, machine, placement, lent=lent, library_scratch=scratch)
    check_memory(needs, machine)
    return needs


def check_ranks(decisions: Decisions, launch: Launch) -> None:
    """Refuse a number of processes that differs from the plan's number of ranks.

    Raises:
        CannotRun: the message says how to start the right number.
    """
    wanted = decisions.layout.devices
    if launch.world == wanted:
        return
    alone = f"run memo-exec run PLAN without torchrun, or {ONE_DEVICE}" if wanted == 1 else ""
    raise CannotRun(
        f"the plan's layout needs {wanted} ranks"
        if launch.world == 1
        else "the number of ranks that were started is not that of the plan's layout",
        where="$.decisions.layout",
        got=f"WORLD_SIZE {launch.world}" if launch.world > 1 else "1 process",
        wanted=wanted,
        hint=alone or f"torchrun --nproc_per_node {wanted} -m memo_exec run PLAN",
    )


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
