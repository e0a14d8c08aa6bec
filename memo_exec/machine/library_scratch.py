"""Measures the scratch that a CPU's matrix library allocates inside products and attention.

torch plays bf16 products on a CPU with oneDNN, which allocates and frees a scratchpad in every call; bf16 attention
packs its operands for the same library. The sizes depend on the instruction set, the shapes and the threads. A program
is the same on every machine, so it cannot declare them. Measured with torch 2.13, bytes allocated inside a bf16 product
of two 1024 x 1024 matrices with 1 and 4 threads:

    AMX            1,053,696   2,116,480   blocks of the operands in the processor's format
    AVX-512 BF16     132,096     527,232   the same, smaller blocks
    AVX-512        4,194,432   4,194,432   the result in fp32
    AVX2                   0           0

Products in fp32 take nothing on any of them. The executor therefore plays each different product and attention of a
bf16 program once, before the run, and counts the largest scratch in the reserve. They follow each other on the compute
lane, so no two of them need memory at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch.autograd.profiler import profile

from memo_exec.kernels import KERNELS, LIBRARY_SCRATCH, Context, Kernel
from memo_exec.machine.distinct_instructions import call_on_zeros, distinct_instructions
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.instruction import Family, Instruction
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Attention, BatchedGemm, Gemm, GroupedGemm, LinearLoss

MEASURED = Gemm | BatchedGemm | GroupedGemm | LinearLoss | Attention
"""Works that a matrix library plays."""

OTHER_ROWS_BYTES = 4096
"""By how much oneDNN's scratchpad for fewer rows, or rows at another address, may exceed that for all rows."""

KINETO_LOG_LEVEL = "KINETO_LOG_LEVEL"
QUIET = "6"
"""Above every level of torch's profiler, which otherwise prints two lines on standard error whenever it runs."""


def library_scratch(
    decisions: Decisions, program: Program, threads: int, *, kernels: Mapping[str, Kernel] = KERNELS
) -> dict[str, int]:
    """Return by operator the most bytes that one instruction allocates on this CPU beyond what the program declares.

    ``threads`` is how many the compute lane uses inside one operator.
    """
    context = Context(decisions, torch.device("cpu"))
    own = torch.get_num_threads()
    torch.set_num_threads(threads)
    found: dict[str, int] = {}
    try:
        for instruction, families in distinct_instructions(program, _is_measured).items():
            size = _undeclared(kernels[instruction.op], instruction, context, families)
            found[instruction.op] = max(found.get(instruction.op, 0), size)
    finally:
        torch.set_num_threads(own)
    return found


def _is_measured(instruction: Instruction) -> bool:
    return isinstance(instruction.work, MEASURED)


def _undeclared(kernel: Kernel, instruction: Instruction, context: Context, families: tuple[Family, ...]) -> int:
    """Play an instruction on zeros; return by how much its allocations exceed the workspace that it declares."""
    library = instruction.op in LIBRARY_SCRATCH
    pairs = zip(instruction.operands, families, strict=True)
    declared = sum(family.bytes for operand, family in pairs if library and operand.role == "workspace")
    call = call_on_zeros(instruction, families, context)
    if isinstance(instruction.work, GroupedGemm):
        call["ends"].fill_(instruction.work.rows)  # one expert has all rows: the largest product that there may be
    with _quiet(), torch.inference_mode(), profile(profile_memory=True, use_kineto=False) as seen:
        kernel(call)
    assert seen.kineto_results is not None
    changes: list[int] = [event.nbytes() for event in seen.kineto_results.events() if event.name() == "[memory]"]
    most = max(0, max(accumulate(changes, initial=0)) - declared)
    return most + OTHER_ROWS_BYTES if most and isinstance(instruction.work, GroupedGemm) else most


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's profiler from printing, unless the user has chosen what it prints."""
    if KINETO_LOG_LEVEL in os.environ:
        yield
        return
    os.environ[KINETO_LOG_LEVEL] = QUIET
    try:
        yield
    finally:
        del os.environ[KINETO_LOG_LEVEL]
