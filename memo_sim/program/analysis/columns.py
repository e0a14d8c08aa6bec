"""Expands a program to integer columns: one row per instruction, and rows of operands.

An operand in a part of a region (``Family.region``) is a range of the region's buffer. A region has rows of one byte.

Instructions have one row each. Operands are many more, and those of a template's own buffers are the same in every
instance but for the numbers of the instruction and of the buffer. So there are two forms:

    expand    every operand of the step has a row: what looks at single operands
    fold      a template's own operands have their rows once, for all of its instances: what looks at whole programs

These arrays are the only form of a program that is as long as the step. Everything that looks at all instructions
(edges, liveness, the engine) works on them. So arrays that are kept have 32 bits (``NUMBER``) where they number
instructions, lanes, instances, buffers or segments; a program with more of them is refused. What follows from the
instances is computed when it is asked for. Sizes and ranges of rows have 64 bits: a region has billions of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from memo_sim.contract.errors import Infeasible
from memo_sim.program.ir.instruction import Family, Operand, Template
from memo_sim.program.ir.program import Program

NUMBER = np.int32
"""The type of numbers of instructions, lanes, instances, buffers and segments; 2**31 of them need 8 GiB an array."""

Ints = NDArray[np.signedinteger[Any]]
Flags = NDArray[np.bool_]
Entry = TypeVar("Entry", bound=np.generic)


@dataclass(frozen=True)
class Operands:
    """Rows of operands in program order, which come again at each of ``starts``.

    Repetition n has the same rows with its instructions counted from ``starts[n]``, in the n-th buffers after the
    first repetition's.
    """

    instruction: Ints
    """Number of the instruction, from the start of a repetition."""
    buffer: Ints
    """Number of the buffer among those of a repetition."""
    first: Ints
    end: Ints
    mode: Ints
    lane: Ints
    """Lane of every instruction of a repetition, those without a row too."""
    bases: Ints
    """The buffers of the first repetition, numbered through the program."""
    dynamic: Flags
    """Whether their device memory is allocated and freed during the step."""
    starts: Ints

    @property
    def first_and_last(self) -> tuple[Ints, Ints]:
        """The first and the last instruction of a repetition that touches each buffer.

        Where none does, they are the number of all instructions and -1. Of several rows of a buffer, the one that is
        assigned last stays.
        """
        first = np.full(len(self.bases), len(self.lane), dtype=NUMBER)
        last = np.full(len(self.bases), -1, dtype=NUMBER)
        first[self.buffer[::-1]] = self.instruction[::-1]
        last[self.buffer] = self.instruction
        return first, last

    def instructions(self, numbers: Ints) -> Ints:
        """Return instructions of a repetition, numbered through the program, in every repetition."""
        found: Ints = (self.starts[:, None] + numbers).ravel()
        return found

    def buffers(self, chosen: Flags) -> Ints:
        """Return the chosen buffers of a repetition, numbered through the program, in every repetition."""
        found: Ints = (np.arange(len(self.starts))[:, None] + self.bases[chosen]).ravel()
        return found


@dataclass(frozen=True)
class InstructionColumns:
    """The lane of every instruction in program order, and where each instance begins.

    The properties are arrays over instructions that follow from this; each access makes a new one.
    """

    lane: Ints
    template_of: Ints
    """The template of every instance."""
    starts: Ints
    """The first instruction of every instance, and the number of all instructions."""

    @property
    def instance(self) -> Ints:
        """The instance of every instruction."""
        return np.repeat(np.arange(len(self.template_of), dtype=NUMBER), np.diff(self.starts))

    @property
    def template(self) -> Ints:
        """The template of every instruction."""
        return np.repeat(self.template_of, np.diff(self.starts))

    @property
    def position(self) -> Ints:
        """The place of every instruction in its template."""
        return np.arange(len(self.lane), dtype=NUMBER) - np.repeat(self.starts[:-1], np.diff(self.starts))

    def by_template(self, rows: Sequence[NDArray[Entry]]) -> NDArray[Entry]:
        """Return for every instruction the entry of its template's row at its position."""
        joined = np.concatenate([rows[0][:0], *rows])
        length = np.array([len(each) for each in rows], dtype=np.int64)
        shift = (np.cumsum(length) - length)[self.template_of] - self.starts[:-1]
        entry = np.repeat(shift.astype(NUMBER), length[self.template_of])
        entry += np.arange(len(entry), dtype=NUMBER)
        return joined.take(entry)

    @property
    def of_instructions(self) -> InstructionColumns:
        """These arrays alone, without what a subclass adds."""
        return InstructionColumns(self.lane, self.template_of, self.starts)


@dataclass(frozen=True)
class FoldedColumns(InstructionColumns):
    """Arrays over instructions and over buffers, and operands with those of equal instances once."""

    operands: tuple[Operands, ...]
    buffer_bytes: Ints
    buffer_family: Ints
    buffer_dynamic: Flags


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
    def operands(self) -> tuple[Operands, ...]:
        """All operands, as rows that come once."""
        return (
            Operands(
                instruction=self.operand_instruction,
                buffer=self.operand_buffer,
                first=self.operand_first,
                end=self.operand_end,
                mode=self.operand_mode,
                lane=self.lane,
                bases=np.arange(len(self.buffer_bytes), dtype=np.int64),
                dynamic=self.buffer_dynamic,
                starts=np.zeros(1, dtype=np.int64),
            ),
        )


def expand(program: Program) -> Columns:
    """Return the columns of ``program``, with a row for every operand of the step."""
    laid = _instructions(program)
    sizes, families, dynamic = _buffers(program)
    row = _rows_of(program, lambda template: [True] * len(template.slots))
    taken, instance = _taken(row.lengths, laid.template_of)
    buffers, first_slot = _slots(program, laid.template_of, own=True)
    return Columns(
        **vars(laid),
        operand_instruction=laid.starts.astype(np.int64)[instance] + row.position[taken],
        operand_buffer=buffers[first_slot[instance] + row.slot[taken]],
        operand_first=row.first[taken],
        operand_end=row.end[taken],
        operand_mode=row.mode[taken],
        buffer_bytes=sizes,
        buffer_family=families,
        buffer_dynamic=dynamic,
    )


def fold(program: Program) -> FoldedColumns:
    """Return the columns of ``program``, with the operands of each template's own buffers once."""
    laid = _instructions(program)
    sizes, families, dynamic = _buffers(program)
    row = _rows_of(program, lambda template: [not own for own in _own_slots(template)])
    taken, instance = _taken(row.lengths, laid.template_of)
    bound, first_slot = _slots(program, laid.template_of, own=False)
    used, number = np.unique(bound, return_inverse=True)
    shared = Operands(
        instruction=laid.starts[instance] + row.position[taken],
        buffer=number.astype(NUMBER)[first_slot[instance] + row.slot[taken]],
        first=row.first[taken],
        end=row.end[taken],
        mode=row.mode[taken],
        lane=laid.lane,
        bases=used,
        dynamic=dynamic[used],
        starts=np.zeros(1, dtype=NUMBER),
    )
    del taken, instance, bound, number
    own = _rows_of(program, _own_slots)
    ends = np.cumsum(own.lengths).tolist()
    found = [shared]
    for number_of_template, (template, end) in enumerate(zip(program.templates, ends, strict=True)):
        mine = slice(end - own.lengths[number_of_template], end)
        at = laid.starts[:-1][laid.template_of == number_of_template]
        if mine.start == end or not len(at):
            continue
        names = [slot for slot, is_own in zip(template.slots, _own_slots(template), strict=True) if is_own]
        bases = np.array([program.family_bases[f"{template.name}/{name}"] for name in names], dtype=np.int64)
        found.append(
            Operands(
                instruction=own.position[mine],
                buffer=own.slot[mine],
                first=own.first[mine],
                end=own.end[mine],
                mode=own.mode[mine],
                lane=np.array([int(i.lane) for i in template.instructions], dtype=NUMBER),
                bases=bases,
                dynamic=dynamic[bases],
                starts=at,
            )
        )
    return FoldedColumns(
        **vars(laid),
        operands=tuple(found),
        buffer_bytes=sizes,
        buffer_family=families,
        buffer_dynamic=dynamic,
    )


def check_numbered(count: int, of: str) -> None:
    """Refuse a program that has more of something than ``NUMBER`` can number.

    Raises:
        Infeasible: with both numbers.
    """
    if count > (most := int(np.iinfo(NUMBER).max)):
        raise Infeasible(
            f"the plan's program has too many {of}",
            where="decisions",
            got=f"{count:,}",
            wanted=f"at most {most:,}",
            hint="fewer micro-batches, or METP, ring or subsequences over fewer ranks",
        )


def _instructions(program: Program) -> InstructionColumns:
    """Return the columns of instructions."""
    lanes = [np.array([int(i.lane) for i in template.instructions], dtype=NUMBER) for template in program.templates]
    template_of = program.template_of
    lengths = np.array([len(each) for each in lanes], dtype=np.int64)
    starts = np.append(0, np.cumsum(lengths[template_of]))
    check_numbered(int(starts[-1]), "instructions")
    starts = starts.astype(NUMBER)
    none = InstructionColumns(np.zeros(0, dtype=NUMBER), template_of, starts)
    return replace(none, lane=none.by_template(lanes))


def _buffers(program: Program) -> tuple[Ints, Ints, Flags]:
    """Return the bytes and the family of every buffer, and whether it is dynamic."""
    families = program.all_families
    counts = [f.count for f in families]
    check_numbered(sum(counts), "buffers")
    dynamic = np.array([f.space == "device" and f.lifetime == "dynamic" for f in families], dtype=np.bool_)
    sizes = np.array([f.bytes for f in families], dtype=np.int64)
    numbers = np.arange(len(families), dtype=NUMBER)
    return np.repeat(sizes, counts), np.repeat(numbers, counts), np.repeat(dynamic, counts)


@dataclass(frozen=True)
class _Rows:
    """The operands of all templates, one template after another; ``slot`` counts the chosen slots of a template."""

    lengths: list[int]
    """Rows of each template."""
    position: Ints
    slot: Ints
    first: Ints
    end: Ints
    mode: Ints


def _rows_of(program: Program, chosen: Callable[[Template], Sequence[bool]]) -> _Rows:
    """Return the operands of the ``chosen`` slots of every template.

    One table holds the rows of all templates. Every instance takes the rows of its own template:

        templates   A: a0 a1 | B: b0 b1 b2        instances   A B A  ->  a0 a1 b0 b1 b2 a0 a1
    """
    parts = {f.name: f for f in program.families if f.region}
    rows, lengths = list[tuple[int, ...]](), []
    for template in program.templates:
        flags = chosen(template)
        number = np.cumsum([0, *flags]).tolist()
        before = len(rows)
        rows += [
            (p, number[o.slot], *_range(o, parts.get(template.slots[o.slot])), int(o.mode))
            for p, i in enumerate(template.instructions)
            for o in i.operands
            if flags[o.slot]
        ]
        lengths.append(len(rows) - before)
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    position, slot, first, end, mode = (np.ascontiguousarray(table[:, column]) for column in range(5))
    return _Rows(lengths, position.astype(NUMBER), slot.astype(NUMBER), first, end, mode.astype(NUMBER))


def _range(operand: Operand, part: Family | None) -> tuple[int, int]:
    """Return the first row of an operand in its buffer, and the row after it."""
    if part is None:
        return operand.first, operand.first + operand.tokens
    first = part.offset + operand.first * part.row_bytes
    return first, first + operand.tokens * part.row_bytes


def _taken(lengths: list[int], template_of: Ints) -> tuple[Ints, Ints]:
    """Return the table rows that the instances use, one instance after another, and the instance of each row."""
    length = np.array(lengths, dtype=np.int64)
    taken = length[template_of]
    check_numbered(int(taken.sum()), "operands")
    instance = np.repeat(np.arange(len(template_of), dtype=NUMBER), taken)
    shift = ((np.cumsum(length) - length)[template_of] - (np.cumsum(taken) - taken)).astype(NUMBER)
    return np.arange(len(instance), dtype=NUMBER) + shift[instance], instance


def _own_slots(template: Template) -> list[bool]:
    """Return for each slot whether it has a buffer of the template's own families."""
    own = {f.name for f in template.own}
    return [s in own for s in template.slots]


def _slots(program: Program, template_of: Ints, *, own: bool) -> tuple[Ints, Ints]:
    """Return the buffer of every slot of every instance, and the position of each instance's first slot.

    A slot of a shared family has the buffer that the instance names. A slot of the template's own family has the buffer
    of this instance; without ``own``, these slots are left out.
    """
    templates, bases = program.templates, dict(program.family_bases)
    bases |= {f.name: bases[f.region] for f in program.families if f.region}
    base, is_own, slots = list[int](), list[bool](), []
    for template in templates:
        flags = _own_slots(template)
        chosen = [(s, mine) for s, mine in zip(template.slots, flags, strict=True) if own or not mine]
        base += [bases[f"{template.name}/{s}" if mine else s] for s, mine in chosen]
        is_own += [mine for _, mine in chosen]
        slots.append(len(chosen))
    row, instance = _taken(slots, template_of)
    order = np.argsort(template_of, kind="stable")
    uses = np.bincount(template_of, minlength=len(templates))
    number = np.empty(len(template_of), dtype=np.int64)
    number[order] = np.arange(len(order)) - np.repeat(np.cumsum(uses) - uses, uses)
    index, bound = number[instance], ~np.array(is_own, dtype=np.bool_)[row]
    index[bound] = program.bound_indices
    taken = np.array(slots, dtype=np.int64)[template_of]
    return np.array(base, dtype=np.int64)[row] + index, np.cumsum(taken) - taken
