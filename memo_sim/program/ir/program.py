"""A program: families of buffers, templates, and their instances in program order.

Instructions are numbered by expanding the instances in order. Ids such as ``m0/s0/l12/bwd/ffn_up.dgrad`` are derived
from places and instruction names, and not stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from msgspec.structs import replace

from memo_sim.program.ir.instances import Instances, Numbers
from memo_sim.program.ir.instruction import Family, Instance, Instruction, Template
from memo_sim.program.layout.schedule import Pass

FORMAT_VERSION = 3


@dataclass(frozen=True)
class Program:
    """The program of one step that the ranks of one pipeline stage play.

    ``families`` are the buffers that instances share. The templates' own families follow them, with one buffer for each
    instance. A family with a ``region`` has no buffers: a slot of it is a part of a buffer of the region.
    """

    stage: str
    families: tuple[Family, ...]
    templates: tuple[Template, ...]
    instances: Sequence[Instance]
    micro_batches: int
    passes: tuple[tuple[Pass, int], ...] = ()
    """The passes of the stage's schedule, each with the number of its first instance."""

    @cached_property
    def instruction_count(self) -> int:
        """Number of instructions of the whole step."""
        lengths = np.array([len(t.instructions) for t in self.templates], dtype=np.int64)
        return int(lengths[self.template_of].sum())

    @property
    def template_of(self) -> Numbers:
        """The template of every instance."""
        return Instances.listed(self.instances).templates

    @property
    def bound_indices(self) -> Numbers:
        """The indices of all instances, one instance after another."""
        return Instances.listed(self.instances).indices

    @cached_property
    def all_families(self) -> tuple[Family, ...]:
        """Shared families, then the templates' own families with one buffer for each instance."""
        uses = np.bincount(self.template_of, minlength=len(self.templates)).tolist()
        own = [
            replace(f, name=f"{t.name}/{f.name}", count=n)
            for t, n in zip(self.templates, uses, strict=True)
            for f in t.own
        ]
        return (*self.families, *own)

    @cached_property
    def family_bases(self) -> dict[str, int]:
        """Number of the first buffer of each family; buffers are numbered through all families."""
        bases: dict[str, int] = {}
        base = 0
        for family in self.all_families:
            bases[family.name] = base
            base += family.count
        return bases

    def walk(self) -> Iterator[tuple[str, Instruction]]:
        """Yield (id, instruction) in program order."""
        for instance in self.instances:
            for instruction in self.templates[instance.template].instructions:
                yield f"{instance.place}/{instruction.name}", instruction

    def ids(self) -> list[str]:
        """Return every instruction's id, in program order."""
        return [name for name, _ in self.walk()]

    @cached_property
    def sha256(self) -> str:
        """Hash of families, templates, instances and the format version; equal programs have equal hashes."""
        digest = hashlib.sha256(f"memo.program/{FORMAT_VERSION}:{self.stage}\n".encode())
        for part in (self.families, self.templates, self.instances):
            for item in part:
                digest.update(repr(item).encode())
                digest.update(b"\n")
        return digest.hexdigest()
