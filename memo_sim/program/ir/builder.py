"""Builds templates: slots are added by name, operands are token ranges, and each ``emit`` adds one instruction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.instruction import BufferClass, Family, Instruction, Lane, Mode, Operand, Template
from memo_sim.program.ir.kinds import BlockKind, FamilyKind, Phase, TemplateKind
from memo_sim.program.ir.work import Work


class Rows(msgspec.Struct, frozen=True, gc=False):
    """A token range of a slot; with a role and a mode it becomes an operand."""

    slot: str
    first: int
    tokens: int


Access = tuple[Rows, Mode]


def reads(rows: Rows) -> Access:
    """Return ``rows`` as a read operand."""
    return rows, Mode.READ


def writes(rows: Rows) -> Access:
    """Return ``rows`` as a written operand."""
    return rows, Mode.WRITE


def accumulates(rows: Rows) -> Access:
    """Return ``rows`` as an operand that is read and written in place."""
    return rows, Mode.ACCUMULATE


@dataclass
class TemplateBuilder:
    """Collects the slots and instructions of one template; a slot has its family's name unless another is given."""

    name: str
    phase: Phase
    kind: TemplateKind = TemplateKind.OTHER
    block: BlockKind | None = None
    layer_kind: int | None = None
    run: str = ""
    """The run of a parameter block that the following instructions update or add to."""
    further: bool = False
    """Whether the following instructions belong to the call of an earlier one."""
    row_blocks: tuple[tuple[int, int], ...] = ()
    """(first row, rows) of the row blocks that no call of a collective crosses (``operators/library_calls.py``)."""
    _slots: dict[str, str] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _tokens: dict[str, int] = field(default_factory=dict)
    _features: dict[str, int] = field(default_factory=dict)
    _dtypes: dict[str, str] = field(default_factory=dict)
    _classes: dict[str, BufferClass] = field(default_factory=dict)
    _firsts: dict[str, int] = field(default_factory=dict)
    _own: list[Family] = field(default_factory=list)
    _kinds: dict[str, FamilyKind] = field(default_factory=dict)
    _scratch: set[str] = field(default_factory=set)
    _cuts: list[int] = field(default_factory=list)
    _instructions: list[Instruction] = field(default_factory=list)
    _names: Mapping[str, str] = field(default_factory=dict)
    _suffix: str = ""

    def under(self, names: Mapping[str, str], suffix: str) -> TemplateBuilder:
        """Return a builder of the same template that renames slots by ``names`` and appends ``suffix`` to instructions.

        It serves groups of heads, which repeat the same instructions. Each group has its own scratch buffers.
        """
        return replace(self, _names=names, _suffix=suffix)

    def _real(self, slot: str) -> str:
        if slot in self._scratch:
            return slot + self._suffix
        return self._names.get(slot, slot)

    def bind(self, family: Family, *, slot: str | None = None, tokens: int | None = None, first: int = 0) -> str:
        """Add a slot that each instance binds to one buffer of the shared ``family``; return the slot's name.

        ``tokens``: the number of rows that this template uses, by default all. ``first``: the buffer's row that is row
        0 in the template.
        """
        slot = slot or family.name
        if first:
            self._firsts[slot] = first
        self._slots[slot] = family.name
        self._kinds[slot] = family.kind
        self._numbers.setdefault(slot, len(self._numbers))
        self._tokens[slot] = family.tokens - first if tokens is None else tokens
        self._features[slot] = family.features
        self._dtypes[slot] = family.dtype
        self._classes[slot] = family.buffer_class
        return slot

    def own(
        self,
        name: str,
        buffer_class: BufferClass,
        dtype: str,
        tokens: int,
        features: int,
        *,
        space: Literal["device", "host"] = "device",
    ) -> str:
        """Add a buffer of which each instance has its own; return the slot's name."""
        real = self._real(name)
        self._own.append(Family(real, buffer_class, dtype, tokens, features, space=space, kind=FamilyKind.OWN))
        self._slots[real] = real
        self._numbers.setdefault(real, len(self._numbers))
        self._tokens[real] = tokens
        self._features[real] = features
        self._dtypes[real] = dtype
        self._classes[real] = buffer_class
        return name

    def scratch(self, name: str, size: int) -> Access | None:
        """Add a workspace of ``size`` bytes and return it as a written operand; None when there is none."""
        if not size:
            return None
        self._scratch.add(name)
        return writes(self.all(self.own(name, BufferClass.WORKSPACE, "fp32", 1, -(-size // 4))))

    def has(self, slot: str) -> bool:
        """Return whether ``slot`` was added before."""
        return self._real(slot) in self._slots

    def bound_to(self, kind: FamilyKind) -> list[str]:
        """Return the slots that are bound to families of a kind, in the order in which they were added."""
        return [slot for slot, bound in self._kinds.items() if bound is kind]

    def cut(self) -> None:
        """Begin a layer's second half with the next instruction; only the first call counts (``helper_stage.py``)."""
        self._cuts.append(len(self._instructions))

    def features(self, slot: str) -> int:
        """Return the number of features of a token of ``slot``."""
        return self._features[self._real(slot)]

    def dtype(self, slot: str) -> str:
        """Return the dtype of ``slot``."""
        return self._dtypes[self._real(slot)]

    def buffer_class(self, slot: str) -> BufferClass:
        """Return the class of the buffer of ``slot``."""
        return self._classes[self._real(slot)]

    def row_bytes(self, slot: str) -> int:
        """Return the bytes of a token of ``slot``."""
        return self.features(slot) * DTYPE_BYTES[self.dtype(slot)]

    def all(self, slot: str) -> Rows:
        """Return all tokens of ``slot``."""
        return Rows(slot, 0, self._tokens[self._real(slot)])

    def emit(self, name: str, op: str, lane: Lane, work: Work, **operands: Access | None) -> None:
        """Append an instruction; operands that are None, for example a missing bias, are left out."""
        numbers, firsts, real = self._numbers, self._firsts, self._real
        listed = tuple(
            [
                Operand(
                    role,
                    numbers[slot := real(access[0].slot)],
                    access[0].first + firsts.get(slot, 0),
                    access[0].tokens,
                    access[1],
                )
                for role, access in operands.items()
                if access is not None
            ]
        )
        name = f"{self.phase}/{name}{self._suffix}"
        self._instructions.append(Instruction(name, op, lane, work, listed, self.phase, self.run, self.further))

    def build(self) -> Template:
        """Return the finished template."""
        return Template(
            self.name,
            tuple(self._slots.values()),
            tuple(self._own),
            tuple(self._instructions),
            self.kind,
            self.block,
            self.layer_kind,
            cut=min(self._cuts, default=0),
        )

    @property
    def bound_slots(self) -> list[str]:
        """Names of the slots that an instance has to bind, in slot order."""
        own = {f.name for f in self._own}
        return [slot for slot in self._slots if slot not in own]
