"""Changes an eager framework's buffers into those of Hugging Face's modules under accelerate's FSDP2 and checkpoint.

A program's layer is memo-exec's: each operator keeps what its own backward reads. Autograd keeps what the backward of
every operator of a module reads, from the layer's recompute to that backward. Beside the program's buffers those are,
for ``n`` elements of an operator (transformers, models/qwen3/modeling_qwen3.py; torch, derivatives.yaml):

    RMS norm     4n for its input in fp32, which ``pow`` and the product with ``rsqrt`` save; 2n for the normalised
                 rows, which the product with the weight saves
    Q, K norm    the same two; the second stands where the program has the norm's raw input
    SwiGLU       2n for the result of SiLU, which the product with the other half saves; in experts too, whose other
                 saved tensors the program has itself (``program/layers/huggingface_experts.py``)

The norm's own input is not saved: the residual sum is freed once its fp32 copy exists. What the checkpoint's recompute
returns is not kept either (``checkpoint_wrapper`` is non-reentrant).

accelerate's FSDP2 differs from the program's ZeRO 3 (utils/fsdp_utils.py, ``fsdp2_prepare_model``;
utils/dataclasses.py, ``set_mixed_precision``; huggingface/accelerate@16cb6eb):

    parameters   the shards are the fp32 master weights, and a gather casts them: ``zero_params`` cast, which a question
                 with these modules gets, and which the program has itself
    classifier   TRL gathers its weight by ``full_tensor()``, so autograd sums its gradient over the ranks before the
                 last layer's backward (huggingface/trl#6077), not beside it
    host         ``CPUOffloadPolicy`` is the only way to put optimizer states on the host. Parameters and gradients go
                 there too

Not modelled: the transfers of parameters and gradients under ``CPUOffloadPolicy``, which take a second of the minutes
that such a step has; and the fp32 sums of torch's context parallelism (``convert_to_f32``), whose buffers the program's
all-gather has in another form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from memo_sim.contract.plan import Decisions
from memo_sim.memory.eager_framework import FP32_BYTES, Added, starts_of, with_added
from memo_sim.program.analysis.columns import Columns
from memo_sim.program.analysis.liveness import Liveness
from memo_sim.program.arena.requests import BufferNames
from memo_sim.program.ir.instruction import Instruction, Template
from memo_sim.program.ir.kinds import BlockKind, FamilyKind, Phase, TemplateKind
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.layout.rules.modules import saves_of_modules

READ_AGAIN = {"rms_norm": "stats", "qk_norm": "raw", "swiglu": "x", "experts.swiglu": "x"}
"""Operators whose modules save more than the program keeps, with the operand by which their backward is known."""


@dataclass(frozen=True)
class _Saved:
    """A tensor that autograd saves at one instruction of a template, until another one; both by position."""

    name: str
    first: int
    last: int
    bytes: int


def module_buffers(
    program: Program, columns: Columns, lives: Liveness, names: BufferNames, decisions: Decisions
) -> tuple[Liveness, BufferNames]:
    """Return the buffers of ``lives`` as Hugging Face's modules and accelerate have them, and their names by number."""
    lives = _residual_sums(program, columns, _classifier(program, columns, _states(program, lives, decisions)))
    # Where layers keep what modules save, the program has it (program/layers/huggingface.py).
    added = [] if saves_of_modules(decisions) else list(_saved_tensors(program, columns, lives))
    return with_added(lives, added), names.with_added([new.name for new in added])


def _saved_tensors(program: Program, columns: Columns, lives: Liveness) -> Iterator[Added]:
    """Yield what autograd saves in each layer's recompute."""
    saved = {number: _saved(template) for number, template in enumerate(program.templates)}
    for base, instance in zip(starts_of(program, columns), program.instances, strict=True):
        for each in saved[instance.template]:
            at = int(np.searchsorted(columns.operand_instruction, base + each.first))
            like = int(columns.operand_buffer[at])
            yield Added(f"{each.name}[{base + each.first}]", base + each.first, base + each.last, each.bytes, like)


def _saved(template: Template) -> list[_Saved]:
    """Return the tensors that autograd saves in one instance of a template."""
    found = []
    for at, instruction in enumerate(template.instructions):
        work = instruction.work
        if instruction.phase is not Phase.RECOMPUTE or not isinstance(work, Rowwise) or work.kind not in READ_AGAIN:
            continue
        last = _backward_of(template, at)
        if last is None:
            continue
        narrow, wide = work.elements * work.element_bytes, work.elements * FP32_BYTES
        if not work.kind.endswith("swiglu") and narrow < wide:
            found.append(_Saved(f"{instruction.op}.wide", at, last, wide))
        if work.kind != "qk_norm":
            found.append(_Saved(f"{instruction.op}.saved", at, last, narrow))
    return found


def _backward_of(template: Template, at: int) -> int | None:
    """Return the last instruction of an operator's backward; None when the operator is repeated before."""
    mine = template.instructions[at]
    role, last = READ_AGAIN[mine.op], None
    for later in range(at + 1, len(template.instructions)):
        other = template.instructions[later]
        if not _same_rows(mine, other, role):
            continue
        if other.op == mine.op:
            break
        if other.op == f"{mine.op}.bwd":
            last = later
    return last


def _same_rows(one: Instruction, other: Instruction, role: str) -> bool:
    """Return whether the operands ``role`` of two instructions share rows of a buffer."""
    mine, theirs = (next((o for o in each.operands if o.role == role), None) for each in (one, other))
    if mine is None or theirs is None or mine.slot != theirs.slot:
        return False
    return mine.first < theirs.first + theirs.tokens and theirs.first < mine.first + mine.tokens


def _residual_sums(program: Program, columns: Columns, lives: Liveness) -> Liveness:
    """Return the buffers with residual sums that die at their last read before a norm's backward."""
    death, starts = lives.death.copy(), starts_of(program, columns)
    reads = {number: _norm_inputs(template) for number, template in enumerate(program.templates)}
    for base, instance in zip(starts, program.instances, strict=True):
        for last, operand in reads[instance.template]:
            at = int(np.searchsorted(columns.operand_instruction, base + last)) + operand
            death[columns.operand_buffer[at]] = base + last
    return replace(lives, death=death)


def _norm_inputs(template: Template) -> list[tuple[int, int]]:
    """Return, for each buffer of the template's own that a norm reads, its last other reader and that operand."""
    own = {family.name for family in template.own}
    last: dict[int, tuple[int, int]] = {}
    read: set[int] = set()
    for at, instruction in enumerate(template.instructions):
        for position, operand in enumerate(instruction.operands):
            if template.slots[operand.slot] not in own:
                continue
            if operand.role == "x" and instruction.op == "rms_norm.bwd":
                read.add(operand.slot)
            else:
                last[operand.slot] = (at, position)
    return [last[slot] for slot in sorted(read & last.keys())]


def _classifier(program: Program, columns: Columns, lives: Liveness) -> Liveness:
    """Return the buffers with whole gradients of embedding and classifier that die once the ranks have summed them."""
    death = lives.death.copy()
    kinds = (BlockKind.HEAD, BlockKind.EMBED)
    whole = np.array([f.kind is FamilyKind.WHOLE_GRADS and f.block in kinds for f in program.all_families])
    for base, instance in zip(starts_of(program, columns), program.instances, strict=True):
        template = program.templates[instance.template]
        if template.kind is not TemplateKind.SCATTER or template.block not in kinds:
            continue
        end = base + len(template.instructions)
        first, last = np.searchsorted(columns.operand_instruction, (base, end))
        numbers = columns.operand_buffer[first:last]
        numbers = numbers[whole[columns.buffer_family[numbers]]]
        death[numbers] = end - 1
    return replace(lives, death=death)


def absent_states(decisions: Decisions) -> frozenset[FamilyKind]:
    """Return the kinds of states that accelerate moves to the host (``CPUOffloadPolicy``), and the program does not."""
    if decisions.modules != "huggingface" or decisions.states != "host":
        return frozenset()
    return frozenset((FamilyKind.PARAMS, FamilyKind.GRADS))


def _states(program: Program, lives: Liveness, decisions: Decisions) -> Liveness:
    """Return the buffers with size 0 for the shards that accelerate has on the host."""
    gone, sizes = absent_states(decisions), lives.bytes.copy()
    absent = np.array([f.kind in gone for f in program.all_families], dtype=np.bool_)
    sizes[absent[lives.family] & lives.on_device] = 0
    return replace(lives, bytes=sizes)
