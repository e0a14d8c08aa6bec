"""Expands a program to integer columns: one row per instruction, and one row per operand.

An operand in a part of a region (``Family.region``) is a range of the region's buffer. A region has rows of one byte.

These arrays are the only form of a program that is as long as the step. Everything that looks at all instructions
(edges, liveness, the engine) works on them. Operands are most of their bytes; what only asks where instructions are
keeps ``InstructionColumns``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from memo_sim.program.ir.instruction import Family, Operand
from memo_sim.program.ir.program import Program

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class InstructionColumns:
    """Arrays over instructions: lane, instance, template and position in it, in program order."""

    lane: Ints
    instance: Ints
    template: Ints
    position: Ints


@dataclass(frozen=True)
class Columns(InstructionColumns):
    """Arrays over instructions and over operands, in program order, and over buffers."""

    operand_instruction: Ints
    operand_buffer: Ints
    operand_first: Ints
    operand_end: Ints
    operand_mode: Ints
    buffer_bytes: Ints
    buffer_family: Ints
    buffer_dynamic: Flags
    """Whether a buffer's device memory is allocated and freed during the step."""

    @property
    def instructions(self) -> InstructionColumns:
        """The arrays over instructions alone."""
        return InstructionColumns(self.lane, self.instance, self.template, self.position)


def expand(program: Program) -> Columns:
    """Return the columns of ``program``."""
    templates = program.templates
    lengths = np.array([len(t.instructions) for t in templates], dtype=np.int64)
    template_of = np.array([i.template for i in program.instances], dtype=np.int64)
    instance_length = lengths[template_of]
    starts = np.concatenate(([0], np.cumsum(instance_length)[:-1])).astype(np.int64)
    total = int(instance_length.sum())
    instance = np.repeat(np.arange(len(template_of), dtype=np.int64), instance_length)
    position = np.arange(total, dtype=np.int64) - starts[instance]
    lane_table = np.zeros((len(templates), int(lengths.max(initial=1))), dtype=np.int64)
    for t, template in enumerate(templates):
        lane_table[t, : len(template.instructions)] = [int(i.lane) for i in template.instructions]
    template_column = template_of[instance]

    operands = _operands(program, template_of, starts)
    families = program.all_families
    counts = [f.count for f in families]
    return Columns(
        lane=lane_table[template_column, position],
        instance=instance,
        template=template_column,
        position=position,
        operand_instruction=operands[0],
        operand_buffer=operands[1],
        operand_first=operands[2],
        operand_end=operands[3],
        operand_mode=operands[4],
        buffer_bytes=np.repeat(np.array([f.bytes for f in families], dtype=np.int64), counts),
        buffer_family=np.repeat(np.arange(len(families), dtype=np.int64), counts),
        buffer_dynamic=np.repeat(
            np.array([f.space == "device" and f.lifetime == "dynamic" for f in families], dtype=np.bool_), counts
        ),
    )


def _operands(program: Program, template_of: Ints, starts: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return the operand columns of all instances in program order; ``starts`` are the instances' first instructions.

    One table holds the rows of all templates. Every instance takes the rows of its own template:

        templates   A: a0 a1 | B: b0 b1 b2        instances   A B A  ->  a0 a1 b0 b1 b2 a0 a1
    """
    templates = program.templates
    parts = {f.name: f for f in program.families if f.region}
    rows = [
        (p, o.slot, *_rows(o, parts.get(template.slots[o.slot])), int(o.mode))
        for template in templates
        for p, i in enumerate(template.instructions)
        for o in i.operands
    ]
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    row, instance = _taken([sum(len(i.operands) for i in t.instructions) for t in templates], template_of)
    position, slot, first, end, mode = (table[row, column] for column in range(5))
    buffers, first_slot = _bound_buffers(program, template_of)
    return starts[instance] + position, buffers[first_slot[instance] + slot], first, end, mode


def _rows(operand: Operand, part: Family | None) -> tuple[int, int]:
    """Return the first row of an operand in its buffer, and the row after it."""
    if part is None:
        return operand.first, operand.first + operand.tokens
    first = part.offset + operand.first * part.row_bytes
    return first, first + operand.tokens * part.row_bytes


def _taken(lengths: list[int], template_of: Ints) -> tuple[Ints, Ints]:
    """Return the table rows that the instances take, one instance after another, and the instance of each row."""
    length = np.array(lengths, dtype=np.int64)
    taken = length[template_of]
    instance = np.repeat(np.arange(len(template_of), dtype=np.int64), taken)
    shift = (np.cumsum(length) - length)[template_of] - (np.cumsum(taken) - taken)
    return np.arange(len(instance), dtype=np.int64) + shift[instance], instance


def _bound_buffers(program: Program, template_of: Ints) -> tuple[Ints, Ints]:
    """Return the buffer of every slot of every instance, and the position of each instance's first slot.

    A slot of a shared family has the buffer that the instance names. A slot of the template's own family has the buffer
    of this instance.
    """
    templates, bases = program.templates, dict(program.family_bases)
    bases |= {f.name: bases[f.region] for f in program.families if f.region}
    base, is_own = [], []
    for template in templates:
        own = {f.name for f in template.own}
        base += [bases[f"{template.name}/{s}" if s in own else s] for s in template.slots]
        is_own += [s in own for s in template.slots]
    slots = [len(t.slots) for t in templates]
    row, instance = _taken(slots, template_of)
    order = np.argsort(template_of, kind="stable")
    uses = np.bincount(template_of, minlength=len(templates))
    number = np.empty(len(template_of), dtype=np.int64)
    number[order] = np.arange(len(order)) - np.repeat(np.cumsum(uses) - uses, uses)
    index, bound = number[instance], ~np.array(is_own, dtype=np.bool_)[row]
    index[bound] = np.fromiter(chain.from_iterable(i.indices for i in program.instances), np.int64, int(bound.sum()))
    taken = np.array(slots, dtype=np.int64)[template_of]
    return np.array(base, dtype=np.int64)[row] + index, np.cumsum(taken) - taken
