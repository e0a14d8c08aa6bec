"""Calls a single kernel without a program, and counts the memory that torch allocates during a call."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from memo_exec.kernels import KERNELS, Call, Context, Kernel, StepScalars
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.instruction import Instruction, Lane, Mode, Operand
from memo_sim.program.ir.work import Rowwise, Work


def play(
    op: str,
    decisions: Decisions,
    tensors: dict[str, Tensor | None],
    *,
    work: Work | None = None,
    first: int = 0,
    workspace_bytes: int = 0,
    scalars: StepScalars | None = None,
    device: str = "cpu",
    name: str = "",
    subsequence: int = 0,
    rank: int = 0,
    kernels: Mapping[str, Kernel] = KERNELS,
) -> Call:
    """Run one kernel; ``first`` is every operand's first token, ``name`` the instruction's name, ``rank`` this rank."""
    given = {role: tensor for role, tensor in tensors.items() if tensor is not None}
    if workspace_bytes:
        given["workspace"] = torch.full((workspace_bytes // 4,), float("nan"), device=device)
    operands = tuple(Operand(role, i, first, len(t), Mode.READ) for i, (role, t) in enumerate(given.items()))
    instruction = Instruction(name or f"fwd/{op}", op, Lane.COMPUTE, work or Rowwise(op, 1, 0, 0), operands)
    context = Context(decisions, torch.device(device), scalars or StepScalars(), rank)
    call = Call(instruction, context, given, subsequence)
    with torch.inference_mode():
        kernels[op](call)
    return call


def allocations(action: Callable[[], Any]) -> list[int]:
    """Return the sizes of all blocks that torch's CPU allocator allocates during ``action``."""
    return [change for change in memory_changes(action) if change > 0]


def memory_changes(action: Callable[[], Any]) -> list[int]:
    """Return the sizes of the blocks that torch's CPU allocator allocates and (negative) frees, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        action()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]"]
