"""Chooses a plan's attention kernel, and its number of head groups."""

from __future__ import annotations

import msgspec

from memo_sim.contract.attention_kernels import ATTENTION_KERNELS, FLASH, FLASH_GENERATIONS, takes_values
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.costs.attention import of_year
from memo_sim.planning.fp8 import check_fp8
from memo_sim.planning.question import Question
from memo_sim.program.arena.library_workspaces import beside_arena, groups_beside
from memo_sim.program.attention.attention import longest_keys
from memo_sim.program.attention.plain import PLAIN
from memo_sim.program.ir.work import Attention
from memo_sim.program.layout.attention_chunks import in_chunks
from memo_sim.program.layout.rules.attention_kernels import PLANNED_PLAIN_ATTENTION
from memo_sim.program.layout.shape import Shape
from memo_sim.program.operators.head_groups import fewest_head_groups


def head_groups(shape: Shape, base: Decisions, kernel: str) -> int:
    """Return the smallest number of head groups whose attention stays within the kernel's integers.

    When its workspace lies outside the arena, there may be more groups, to keep the workspace small.

    Raises:
        Infeasible: when no number of groups is enough.
    """
    shape = shape.attention
    chunk = base.attention_chunk_tokens // base.layout.ring if in_chunks(base) else 0  # a rank's tokens of a sequence
    work = Attention(
        batch=base.micro_batch,
        q_tokens=chunk or shape.tokens // base.micro_batch,
        k_tokens=chunk or longest_keys(base, shape) // base.micro_batch,
        mask="causal",
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=base.model.head_dim,
        backward=True,
        kernel=kernel,
        dtype=base.dtype,
        narrow_values=base.model.narrow_values,
    )
    fewest = fewest_head_groups(work)
    planned = msgspec.structs.replace(base, kernels=Kernels(attention=kernel))
    return groups_beside(work, fewest) if beside_arena(planned) else fewest


def attention_kernel(question: Question) -> str:
    """Return the kernel of the question: the one that it names, else the system's, else the fastest in backward.

    Where the model has windows, or sequences are packed from documents, and the question names no kernel, it is one
    that takes them, if there is one.
    A generation stands for the first of its kernels that the profile has for the question's dtype, ``flash`` for the
    newest generation that it has; of these, only kernels that take the model's heads.

    Raises:
        Infeasible: when plain attention is asked for with a planned arena, or the profile has no such kernel, or none
            of the question's products in FP8.
    """
    asked = question.pins.attention
    check_fp8(question.hardware, question.fp8)
    if asked == PLAIN:
        base = msgspec.structs.replace(question.decisions(Layout()), kernels=Kernels(attention=PLAIN))
        if PLANNED_PLAIN_ATTENTION.breaks(base):
            raise PLANNED_PLAIN_ATTENTION.refusal(base)
        return PLAIN
    fastest = _backward_rates(question)
    if not fastest:
        measured = sorted({table.dtype for table in question.hardware.attention})
        raise Infeasible(
            "the profile has no attention kernel for this dtype and year",
            where=question.hardware.name,
            got=f"{question.dtype}, libraries of {question.hardware.eager_libraries}",
            wanted=" or ".join(measured) or "a profile with attention kernels",
            hint=f"another --dtype or --libraries, --attention plain, or memo-exec calibrate --dtype {question.dtype}",
        )
    if asked in fastest:
        return asked
    fastest = _of_its_heads(question, fastest)
    if asked is None:
        able = {kernel: rate for kernel, rate in fastest.items() if _takes_masks(question, kernel)} or fastest
        own = (kernel for kernel in question.preset.attention if kernel in able)
        return next(own, max(able, key=lambda kernel: able[kernel]))
    generations = (*FLASH_GENERATIONS, "torch-flash-cpu") if asked == FLASH else (asked,)
    found = [
        name
        for generation in generations
        for name, kernel in ATTENTION_KERNELS.items()
        if kernel.generation == generation and name in fastest
    ]
    if not found:
        raise Infeasible(
            "the profile has no rates of this attention kernel",
            where=question.hardware.name,
            got=f"{asked}, {question.dtype}, libraries of {question.hardware.eager_libraries}",
            wanted=", ".join(sorted({PLAIN, *fastest, *(ATTENTION_KERNELS[name].generation for name in fastest)})),
            hint="another --attention",
        )
    return found[0]


def _takes_masks(question: Question, kernel: str) -> bool:
    """Return whether a kernel takes the windows of the question's model and the packed documents, if there are any."""
    windows = [shape.window for shape in question.model.layer_shapes if 0 < shape.window < question.seq_tokens]
    of = ATTENTION_KERNELS[kernel]
    return (not windows or of.windows) and (question.documents is None or of.documents)


def _of_its_heads(question: Question, rates: dict[str, float]) -> dict[str, float]:
    """Return the kernels that take the model's widths of keys and values; all of them where none does."""
    model = question.model
    return {k: rate for k, rate in rates.items() if takes_values(k, model.head_dim, model.value_dim)} or rates


def _backward_rates(question: Question) -> dict[str, float]:
    """Return the highest backward rate of each kernel of the question's dtype, in FLOP/s."""
    found: dict[str, float] = {}
    for table in of_year(question.hardware.attention, question.hardware.eager_libraries):
        if table.dtype == question.dtype and table.attention_pass == "backward":
            found[table.kernel] = max(found.get(table.kernel, 0.0), *(row[2] for row in table.rows))
    return found
