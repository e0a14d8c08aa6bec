"""Checks that this machine has the products in FP8 that a plan asks for, and that every operand has one scale.

A product reads rows that were quantised together: only those have one scale, and only their copy by columns is one
matrix. What the program reads otherwise is refused: rows that ranks gathered, each with a scale of its own, or that are
swapped or rebuilt in part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from memo_exec.kernels.fp8 import WHOLE
from memo_exec.machine.machine import Machine
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.plan import Decisions
from memo_sim.program.analysis.columns import expand
from memo_sim.program.ir.instruction import Mode
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Fp8Gemm

LEAST_CAPABILITY: Final = (9, 0)
"""Hopper: the first device with FP8 that memo has rates for. Ada (8.9) has the products, and no plan is made for it."""
MOST_CAPABILITY: Final = (9, 9)
"""Plans for Blackwell (10.0) have one copy for every layout of operands, which no kernel here reads."""

_EXPORT = "make the plan without --fp8, or memo-sim export PLAN --to megatron-lm, which runs FP8"
_OPERANDS = ("x", "grad", "weight")

Range = tuple[int, int]


def check_recipe(decisions: Decisions, where: str) -> None:
    """Refuse recipes and layouts of FP8 that have no kernels on any machine.

    Raises:
        CannotRun: with what there is.
    """
    if decisions.fp8 not in ("none", "tensor"):
        raise CannotRun(
            "memo-exec has kernels for FP8 with one scale a tensor, from its own values; other recipes are priced only",
            where=f"{where}: $.decisions.fp8",
            got=decisions.fp8,
            wanted="tensor or none",
            hint=f"make the plan with --fp8 tensor; or {_EXPORT}",
        )
    if decisions.fp8_params:
        raise CannotRun(
            "memo-exec keeps bf16 weights beside their FP8 copies; weights in FP8 alone are priced only",
            where=f"{where}: $.decisions.fp8_params",
            got="true",
            wanted="false",
            hint=f"make the plan without --fp8-params; or {_EXPORT}",
        )
    if decisions.fp8_experts:
        raise CannotRun(
            "memo-exec has no grouped products in FP8; experts in FP8 are priced only",
            where=f"{where}: $.decisions.fp8_experts",
            got="true",
            wanted="false",
            hint="make the plan without --fp8-experts",
        )
    if decisions.fp8 != "none" and decisions.model.latent is not None:
        raise CannotRun(
            "memo-exec has no kernels for FP8 with latent attention; such plans are priced only",
            where=f"{where}: $.decisions.fp8",
            got=f"{decisions.fp8} with a model with latent attention",
            wanted="none",
            hint="make the plan without --fp8",
        )
    if decisions.fp8 == "tensor" and decisions.fp8_layouts != "tn":
        raise CannotRun(
            "memo-exec has kernels for FP8 with Hopper's layout of operands alone; other layouts are priced only",
            where=f"{where}: $.decisions.fp8_layouts",
            got=decisions.fp8_layouts,
            wanted="tn",
            hint=f"make the plan for a cluster of H100 or H200; or {_EXPORT}",
        )


def refuse_fp8(decisions: Decisions, where: str, why: str) -> None:
    """Refuse products in FP8 for a command that has no meaning for them.

    Raises:
        CannotRun: with ``why``, when the plan has such products.
    """
    if decisions.fp8 != "none":
        raise CannotRun(
            why, where=f"{where}: $.decisions.fp8", got=decisions.fp8, wanted="none", hint="make the plan without --fp8"
        )


def check_fp8(decisions: Decisions, program: Program, machine: Machine) -> None:
    """Refuse a plan with products in FP8 that this machine, or the kernels, cannot compute.

    Raises:
        CannotRun: with the first thing that is missing.
    """
    if decisions.fp8 == "none":
        return
    check_recipe(decisions, "plan")
    if why := _device_lacks(machine):
        raise CannotRun(
            "products in FP8 cannot run here", where="$.decisions.fp8", got=why, wanted="an H100 or H200", hint=_EXPORT
        )
    check_operands(program)


def _device_lacks(machine: Machine) -> str:
    if machine.device == "cpu":
        return "a CPU, for which they are not supported"
    capability = torch.cuda.get_device_capability()
    if LEAST_CAPABILITY <= capability <= MOST_CAPABILITY:
        return ""
    return f"a GPU of compute capability {capability[0]}.{capability[1]}, and kernels need 9.0"


def check_operands(program: Program) -> None:
    """Refuse a program whose products in FP8 read rows that have not one scale, or have sizes that are not multiples.

    Raises:
        CannotRun: with the first such product.
    """
    for template in program.templates:
        for instruction in template.instructions:
            work = instruction.work
            if isinstance(work, Fp8Gemm) and any(size % WHOLE for size in (work.m, work.n, work.k)):
                raise CannotRun(
                    f"products in FP8 need sizes that are multiples of {WHOLE}",
                    where="$.decisions.fp8",
                    got=f"{instruction.name}: {work.m} x {work.n} x {work.k}",
                    wanted=f"multiples of {WHOLE}",
                    hint="another --tp, or make the plan without --fp8",
                )
    if found := _without_scale(program):
        raise CannotRun(
            "a product in FP8 reads rows that were not quantised together, so they have several scales",
            where="$.decisions.fp8",
            got=found,
            wanted="every operand quantised by one instruction",
            hint="a plan without sequence parallelism, and with swapping of all rows or none; or make it without --fp8",
        )


def _without_scale(program: Program) -> str:
    """Return the first product in FP8 that reads rows without one scale, and what wrote them; "" without one."""
    columns = expand(program)
    families = program.all_families
    narrow = {number for number, family in enumerate(families) if family.dtype in ("e4m3", "e5m2")}
    buffers, family = columns.operand_buffer.tolist(), columns.buffer_family.tolist()
    first, end = columns.operand_first.tolist(), columns.operand_end.tolist()
    scales: dict[int, dict[Range, str]] = {}
    """By buffer, the ranges of its rows that have one scale or none, and the operator that wrote each."""
    row = 0
    for name, instruction in program.walk():
        ranges = {}
        for operand in instruction.operands:
            if family[buffers[row]] in narrow:
                ranges[operand.role] = (buffers[row], (first[row], end[row]), operand.mode)
            row += 1
        if not ranges:
            continue
        if isinstance(instruction.work, Fp8Gemm):
            for role in _OPERANDS:
                if role in ranges:
                    buffer, rows, _ = ranges[role]
                    held = scales.get(buffer, {})
                    if held.get(rows) not in _QUANTISE and not _is_weight(held, rows):
                        return f"{name}: {role}, written by {_writers(held, rows)}"
        written = instruction.op
        if written in _MOVES:
            buffer, rows, _ = ranges["source"]
            written = scales.get(buffer, {}).get(rows, written)
        for buffer, rows, mode in ranges.values():
            if mode is not Mode.READ:
                held = scales.get(buffer, {})
                scales[buffer] = {at: op for at, op in held.items() if not _overlap(at, rows)} | {rows: written}
    return ""


_QUANTISE = ("fp8.quantize", "params.quantize")
_MOVES = ("d2h", "h2d")


def _is_weight(written: dict[Range, str], rows: Range) -> bool:
    """Return whether the rows are part of weights, which are quantised by one instruction, each with a scale."""
    return any(op == "params.quantize" and at[0] <= rows[0] and rows[1] <= at[1] for at, op in written.items())


def _writers(written: dict[Range, str], rows: Range) -> str:
    ops: Iterable[str] = dict.fromkeys(op for at, op in written.items() if _overlap(at, rows))
    return " and ".join(ops) or "nothing"


def _overlap(one: Range, two: Range) -> bool:
    return one[0] < two[1] and two[0] < one[1]
