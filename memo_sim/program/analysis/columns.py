"""Expands a program to integer columns: one row per instruction, and rows of operands.

An operand in a part of a region (``Family.region``) is a range of the region's buffer. A region has rows of one byte.

Instructions have one row each. Operands are many more, and those of a template's own buffers are the same in every
instance but for the numbers of the instruction and of the buffer. So there are two forms:

    expand    every operand of the step has a row: what looks at single operands
    fold      a template's own operands have their rows once, for all of its instances: what looks at whole programs;
              those of all templates lie one after another, so that small programs need few calls of numpy

These arrays are the only form of a program that is as long as the step. Everything that looks at all instructions
(edges, liveness, the engine) works on them. So arrays that are kept have 32 bits (``NUMBER``) where they number
instructions, lanes, instances, buffers or segments; a program with more of them is refused. What follows from the
instances is computed when it is asked for. Sizes and ranges of rows have 64 bits: a region has billions of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from memo_sim.contract.errors import Infeasible
from memo_sim.program.ir.program import Program

NUMBER = np.int32
"""The type of numbers of instructions, lanes, instances, buffers and segments; 2**31 of them need 8 GiB an array."""

ZERO = np.zeros(1, dtype=NUMBER)

Ints = NDArray[np.signedinteger[Any]]
Flags = NDArray[np.bool_]
Entry = TypeVar("Entry", bound=np.generic)


def distinct(values: NDArray[Entry]) -> NDArray[Entry]:
    """Return the values that occur, in order; ``np.unique`` imports ``numpy.ma`` for it, which takes 20 ms."""
    ordered = np.sort(values)
    new = np.ones(len(ordered), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    return ordered[new]


@dataclass(frozen=True)
class Operands:
    """Rows of operands, part after part, each part in program order; parts touch no buffers of each other.

    A part comes again at each of its ``starts``. Repetition n has the same rows with its instructions counted from the
    n-th start, in the n-th buffers after the first repetition's.
    """

    instruction: Ints
    """Number of the instruction, counted through the parts."""
    buffer: Ints
    """Number of the buffer among those of the parts."""
    first: Ints
    end: Ints
    mode: Ints
    lane: Ints
    """Lane of every instruction of the parts, those without a row too."""
    bases: Ints
    """The buffers of the first repetitions, numbered through the program."""
    dynamic: Flags
    """Whether their device memory is allocated and freed during the step."""
    starts: tuple[Ints, ...]
    """By part."""
    first_instructions: Ints
    """By part: the number of its first instruction."""
    first_buffers: Ints

    @property
    def once(self) -> bool:
        """Whether there is one part, which comes once."""
        return len(self.starts) == 1 and len(self.starts[0]) == 1

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
        """Return instructions of the parts, numbered through the program, in every repetition.

        ``numbers``: (..., n), in the order of parts; arrays of as many instructions in each part stay side by side.
        """
        row = numbers[(0,) * (numbers.ndim - 1)]
        bounds = [*np.searchsorted(row, self.first_instructions).tolist(), len(row)]
        shape = (*numbers.shape[:-1], -1)
        found = [numbers[..., :0]]
        for first, starts, (begin, end) in zip(self.first_instructions, self.starts, pairwise(bounds), strict=True):
            if begin < end:
                found.append(((starts - first)[:, None] + numbers[..., None, begin:end]).reshape(shape))
        return np.concatenate(found, axis=-1)

    def buffers(self, chosen: Flags) -> Ints:
        """Return the chosen buffers of the parts, numbered through the program, in every repetition."""
        numbers = np.flatnonzero(chosen)
        bounds = [*np.searchsorted(numbers, self.first_buffers).tolist(), len(numbers)]
        bases = self.bases[numbers]
        found = [bases[:0]]
        for starts, (begin, end) in zip(self.starts, pairwise(bounds), strict=True):
            if begin < end:
                found.append((np.arange(len(starts))[:, None] + bases[begin:end]).ravel())
        return np.concatenate(found)


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
                starts=(ZERO,),
                first_instructions=ZERO,
                first_buffers=ZERO,
            ),
        )


def expand(program: Program) -> Columns:
    """Return the columns of ``program``, with a row for every operand of the step."""
    laid = _instructions(program, _lanes(program))
    sizes, families, dynamic = _buffers(program)
    slots, row = _Slots(program), _rows_of(program)
    taken, instance = _taken(np.bincount(row.template, minlength=len(program.templates)), laid.template_of)
    buffers, first_slot = slots.buffers(program, laid.template_of, own=True)
    first, end = slots.ranges(row)
    return Columns(
        **vars(laid),
        operand_instruction=laid.starts.astype(np.int64)[instance] + row.position[taken],
        operand_buffer=buffers[first_slot[instance] + row.slot[taken]],
        operand_first=first[taken],
        operand_end=end[taken],
        operand_mode=row.mode[taken],
        buffer_bytes=sizes,
        buffer_family=families,
        buffer_dynamic=dynamic,
    )


def fold(program: Program) -> FoldedColumns:
    """Return the columns of ``program``, with the operands of each template's own buffers once."""
    lanes = _lanes(program)
    laid = _instructions(program, lanes)
    sizes, families, dynamic = _buffers(program)
    slots, row = _Slots(program), _rows_of(program)
    first, end = slots.ranges(row)
    slot = slots.first[row.template] + row.slot
    number, own = slots.number[slot], slots.own[slot]
    shared = np.flatnonzero(~own)
    taken, instance = _taken(np.bincount(row.template[shared], minlength=len(program.templates)), laid.template_of)
    taken = shared.astype(NUMBER)[taken]
    bound, first_slot = slots.buffers(program, laid.template_of, own=False)
    used, place = np.unique(bound, return_inverse=True)
    of_instances = Operands(
        instruction=laid.starts[instance] + row.position[taken],
        buffer=place.astype(NUMBER)[first_slot[instance] + number[taken]],
        first=first[taken],
        end=end[taken],
        mode=row.mode[taken],
        lane=laid.lane,
        bases=used,
        dynamic=dynamic[used],
        starts=(ZERO,),
        first_instructions=ZERO,
        first_buffers=ZERO,
    )
    del taken, instance, bound, place
    lengths = np.array([len(template.instructions) for template in program.templates])
    first_instructions, first_buffers = (np.cumsum(lengths) - lengths).astype(NUMBER), slots.first_own.astype(NUMBER)
    played = np.bincount(laid.template_of, minlength=len(program.templates)) > 0
    mine, bases = np.flatnonzero(own & played[row.template]), slots.base[slots.own]
    of_templates = Operands(
        instruction=first_instructions[row.template[mine]] + row.position[mine],
        buffer=first_buffers[row.template[mine]] + number[mine],
        first=first[mine],
        end=end[mine],
        mode=row.mode[mine],
        lane=lanes,
        bases=bases,
        dynamic=np.append(dynamic, False)[bases],  # the last template's have none where it has no instances
        starts=tuple(laid.starts[:-1][laid.template_of == n] for n in range(len(program.templates))),
        first_instructions=first_instructions,
        first_buffers=first_buffers,
    )
    return FoldedColumns(
        **vars(laid),
        operands=(of_instances, of_templates) if len(mine) else (of_instances,),
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


def _lanes(program: Program) -> Ints:
    """Return the lanes of the instructions of all templates, one template after another."""
    return np.array([int(i.lane) for template in program.templates for i in template.instructions], dtype=NUMBER)


def _instructions(program: Program, lanes: Ints) -> InstructionColumns:
    """Return the columns of instructions; ``lanes``: of those of the templates."""
    template_of = program.template_of
    lengths = np.array([len(template.instructions) for template in program.templates], dtype=np.int64)
    starts = np.append(0, np.cumsum(lengths[template_of]))
    check_numbered(int(starts[-1]), "instructions")
    return InstructionColumns(lanes[_taken(lengths, template_of)[0]], template_of, starts.astype(NUMBER))


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
    """The operands of all templates, one template after another."""

    template: Ints
    position: Ints
    """Place of the instruction in its template."""
    slot: Ints
    first: Ints
    end: Ints
    mode: Ints


def _rows_of(program: Program) -> _Rows:
    """Return the operands of every template.

    One table holds the rows of all templates. Every instance takes the rows of its own template:

        templates   A: a0 a1 | B: b0 b1 b2        instances   A B A  ->  a0 a1 b0 b1 b2 a0 a1
    """
    rows = [template.operand_rows for template in program.templates]
    template = np.repeat(np.arange(len(rows), dtype=NUMBER), [len(each) for each in rows])
    position, slot, first, end, mode = np.ascontiguousarray(np.concatenate(rows).T)
    return _Rows(template, position.astype(NUMBER), slot.astype(NUMBER), first, end, mode.astype(NUMBER))


def _taken(lengths: Ints, template_of: Ints) -> tuple[Ints, Ints]:
    """Return the table rows that the instances use, one instance after another, and the instance of each row.

    ``lengths``: rows of each template.
    """
    taken = lengths[template_of]
    check_numbered(int(taken.sum()), "operands")
    instance = np.repeat(np.arange(len(template_of), dtype=NUMBER), taken)
    shift = ((np.cumsum(lengths) - lengths)[template_of] - (np.cumsum(taken) - taken)).astype(NUMBER)
    return np.arange(len(instance), dtype=NUMBER) + shift[instance], instance


class _Slots:
    """The slots of all templates, one template after another."""

    def __init__(self, program: Program) -> None:
        bases, parts = dict(program.family_bases), {f.name: f for f in program.families if f.region}
        bases |= {name: bases[f.region] for name, f in parts.items()}
        own, base, lengths, offset, scale = list[bool](), list[int](), list[int](), list[int](), list[int]()
        for template in program.templates:
            lengths.append(len(template.slots))
            for slot, mine in zip(template.slots, template.own_slots, strict=True):
                part = parts.get(slot)
                own.append(mine)
                base.append(bases[f"{template.name}/{slot}" if mine else slot])
                offset.append(part.offset if part else 0)
                scale.append(part.row_bytes if part else 1)
        self.lengths = np.array(lengths, dtype=np.int64)
        self.first = np.cumsum(self.lengths) - self.lengths
        """By template: the number of its first slot."""
        self.own = np.array(own, dtype=np.bool_)
        """By slot: whether it has a buffer of the template's own families."""
        owned_before = np.append(0, np.cumsum(self.own))
        self.first_own = owned_before[self.first]
        """By template: how many of these slots come before its own."""
        of = np.repeat(np.arange(len(lengths)), lengths)
        among_own = owned_before[:-1] - self.first_own[of]
        self.number = np.where(self.own, among_own, np.arange(len(own)) - self.first[of] - among_own).astype(NUMBER)
        """By slot: its place among those of its template that have such buffers, or among the others."""
        self.base = np.array(base, dtype=np.int64)
        """By slot: the first buffer of its family."""
        self._offset, self._scale = np.array(offset, dtype=np.int64), np.array(scale, dtype=np.int64)

    def ranges(self, rows: _Rows) -> tuple[Ints, Ints]:
        """Return the first row of each operand in its buffer, and the row after its last one."""
        slot = self.first[rows.template] + rows.slot
        offset, scale = self._offset[slot], self._scale[slot]
        return offset + rows.first * scale, offset + rows.end * scale

    def buffers(self, program: Program, template_of: Ints, *, own: bool) -> tuple[Ints, Ints]:
        """Return the buffer of every slot of every instance, and the position of each instance's first slot.

        A slot of a shared family has the buffer that the instance names. A slot of the template's own family has the
        buffer of this instance; without ``own``, these slots are left out.
        """
        bound = program.bound_indices
        owned = np.diff(np.append(self.first_own, self.own.sum()))
        chosen = np.arange(len(self.own)) if own else np.flatnonzero(~self.own)
        lengths = self.lengths if own else self.lengths - owned
        row, _ = _taken(lengths, template_of)
        taken = lengths[template_of]
        first_slot = np.cumsum(taken) - taken
        slot = chosen[row]
        if not own:
            return self.base[slot] + bound, first_slot
        order = np.argsort(template_of, kind="stable")
        uses = np.bincount(template_of, minlength=len(lengths))
        number = np.empty(len(template_of), dtype=np.int64)
        number[order] = np.arange(len(order)) - np.repeat(np.cumsum(uses) - uses, uses)
        index = np.repeat(number, taken)
        index[~self.own[slot]] = bound
        return self.base[slot] + index, first_slot
