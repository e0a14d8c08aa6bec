"""The distinct instructions of a program, and calls of single instructions on zeros, outside a step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memo_exec.kernels import LIBRARY_SCRATCH, Call, Context
from memo_exec.kernels.fp8_scales import FORMATS
from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_sim.program.ir.instruction import Family, Instruction
from memo_sim.program.ir.program import Program


def distinct_instructions(
    program: Program, wanted: Callable[[Instruction], bool]
) -> dict[Instruction, tuple[Family, ...]]:
    """Return one instruction for each different kernel call, with the families of its operands.

    Calls are equal when operator, work, and the operands' roles, shapes and dtypes are.
    """
    shared = {family.name: family for family in program.families}
    found: dict[tuple[object, ...], tuple[Instruction, tuple[Family, ...]]] = {}
    for template in program.templates:
        by_name = shared | {family.name: family for family in template.own}
        slots = [by_name[name] for name in template.slots]
        for instruction in filter(wanted, template.instructions):
            families = tuple(slots[operand.slot] for operand in instruction.operands)
            shapes = tuple(
                (operand.role, operand.tokens, family.features, family.dtype)
                for operand, family in zip(instruction.operands, families, strict=True)
            )
            found.setdefault((instruction.op, instruction.work, shapes), (instruction, families))
    return dict(found.values())


def call_on_zeros(instruction: Instruction, families: tuple[Family, ...], context: Context, *, layer: int = 0) -> Call:
    """Return a call whose operands are new zeros; workspaces that a library allocates itself are left out.

    ``layer``: one of the rank's layers that has the instruction.
    """
    tensors = {}
    for operand, family in zip(instruction.operands, families, strict=True):
        if instruction.op in LIBRARY_SCRATCH and operand.role == "workspace":
            continue
        shape = (operand.tokens,) if family.features == 1 else (operand.tokens, family.features)
        tensors[operand.role] = torch.zeros(shape, dtype=TORCH_DTYPES[family.dtype], device=context.device)
        if context.fp8 is not None and tensors[operand.role].dtype in FORMATS:
            context.fp8.stand_in(tensors[operand.role])
    return Call(instruction, context, tensors, layer=layer)
