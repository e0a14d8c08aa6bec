"""Whether this machine can run a plan, asked before anything is allocated.

Refused, with what was got and wanted and nothing substituted: a program that is not the one the plan pins, more ranks
than were started, kernels that are missing here, dtypes the device cannot compute in, memory that is not there, and
kernels that fail when they are tried on a few tokens.
"""

from __future__ import annotations

from memo_exec.distributed.own_program import rank_program
from memo_exec.distributed.place import Place
from memo_exec.distributed.world import Launch
from memo_exec.machine.attention_kernels import check_kernels, try_kernels
from memo_exec.machine.library_scratch import library_scratch
from memo_exec.machine.machine import Machine
from memo_exec.machine.memory_budget import Needs, check_memory, needs_of
from memo_exec.machine.placement_file import has_library_slots
from memo_sim.contract.codec import of_file
from memo_sim.contract.errors import BadInput, CannotRun, Infeasible
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Decisions, Plan
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower, program_sha256

DTYPES = {"cpu": ("fp32", "bf16"), "cuda": ("bf16",)}
"""What kernels compute in: attention on CUDA has no fp32, and fp16 would need a scaled loss, which is not built."""

MOST_INSTRUCTIONS = 2_000_000
"""Of one step; each is bound to its buffers in Python before the first step."""

ONE_DEVICE = (
    "plan for one device: memo-sim what-if --cluster a800-1x1 --tp 1 --cp 1 --dp 1 (memo-sim list clusters: how others "
    "are named; memo-exec calibrate -o here.json: this machine's)"
)


def checked_program(plan: Plan, *, where: str, rank: int = 0) -> Program:
    """Return the program that a plan's decisions lower to for one of its ranks.

    Raises:
        BadInput: when it is not the one the plan pins, nothing lowers, or swapped tokens end inside a row block.
        CannotRun: when the step is too long for Python to bind.
    """
    try:
        with of_file(where):
            _check_length(plan.decisions, where)
            programs = lower(plan.decisions)
    except Infeasible as error:
        raise BadInput(
            error.what,
            where=f"{where}: {error.where or 'decisions'}",
            got=error.got,
            wanted=error.wanted,
            hint="the plan was edited: make it again with memo-sim what-if -o",
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
    return rank_program(plan.decisions, Place(plan.decisions.layout, rank))


def _check_length(decisions: Decisions, where: str) -> None:
    """Refuse a step that Python would bind for hours."""
    few = min(decisions.layout.pp, decisions.micro_batches)  # schedules of stages take no fewer at once
    one = max(program.instruction_count for program in lower(decisions, micro_batches=few)) // few
    if one * decisions.micro_batches > MOST_INSTRUCTIONS:
        raise CannotRun(
            "the step has more instructions than the executor plays",
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
    """Return what the program needs, when this machine has it; ``placement`` is the arena it will run in.

    ``lent``: libraries get their workspaces from the arena.

    Raises:
        CannotRun: naming the first thing that is missing.
    """
    check_kernels(decisions, program, machine)
    _check_dtype(decisions, machine)
    if lent and placement is not None and not has_library_slots(program, placement):
        raise CannotRun(
            "the plan's arena has no slots to serve libraries from",
            where="$.decisions.replay_allocator",
            got="false",
            wanted="true",
            hint="plan with memo-sim what-if --replay-allocator, or run without it",
        )
    needs = needs_of(program, machine, placement, lent=lent)
    check_memory(needs, machine)
    if machine.device == "cuda":  # torch's kernels for CPUs are in every build
        try_kernels(decisions, machine)
        return needs
    if decisions.dtype == "fp32":  # its products take nothing, its attention the tiles
        return needs
    scratch = library_scratch(decisions, program, machine.compute_threads)
    needs = needs_of(program, machine, placement, lent=lent, library_scratch=scratch)
    check_memory(needs, machine)
    return needs


def check_ranks(decisions: Decisions, launch: Launch) -> None:
    """Refuse another number of processes than the plan's layout has.

    Raises:
        CannotRun: saying how to start them.
    """
    wanted = decisions.layout.devices
    if launch.world == wanted:
        return
    alone = f"memo-exec run PLAN, without torchrun; {ONE_DEVICE}" if wanted == 1 else ""
    raise CannotRun(
        f"the plan's layout needs {wanted} ranks"
        if launch.world == 1
        else "other ranks were started than the plan's layout has",
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
