"""A program's hash as format version 1 computed it, from a program of today.

Names have changed since; ``renames.json`` says how. A program of today, with every name put back, hashes to what was
recorded before the first rename, or it is another program. Names are mapped by where they stand, because one word may
mean two things: ``recv`` is a lane's name today, and has always been an operand of a ring's exchange.

Up to version 2, the collectives of all groups were on one lane, and those that ``overlap`` moves were on another. Since
version 3 each group has its own lane. ``lane_text`` says where a call stood, and ``verify/program.py`` where it has to
stand today.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from pathlib import Path

from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.instruction import COLLECTIVE_LANES, Family, Instance, Instruction, Operand, Template
from memo_sim.program.ir.kinds import TemplateKind
from memo_sim.program.ir.program import Program

FORMAT_VERSION = 1
RENAMES: dict[str, list[tuple[str, str]]] = json.loads((Path(__file__).parent / "renames.json").read_text())
"""By where a name stands, regular expressions for today's names and what stood in their place."""


@cache
def before(where: str, name: str) -> str:
    """Return the name that stood where ``name`` stands today."""
    for pattern, old in RENAMES[where]:
        name = re.sub(pattern, old, name)
    return name


def family_text(family: Family) -> str:
    name, kind = before("family", family.name), before("buffer_class", family.buffer_class.value)
    return (
        f"Family(name={name!r}, buffer_class=<BufferClass.{kind.upper()}: {kind!r}>, dtype={family.dtype!r}, "
        f"tokens={family.tokens}, features={family.features}, count={family.count}, space={family.space!r}, "
        f"lifetime={family.lifetime!r})"
    )


def operand_text(operand: Operand) -> str:
    mode = f"<Mode.{operand.mode.name}: {operand.mode.value}>"
    role = before("operand", operand.role)
    return f"Operand(role={role!r}, slot={operand.slot}, first={operand.first}, tokens={operand.tokens}, mode={mode})"


def tuple_text(items: list[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def lane_text(instruction: Instruction, kind: TemplateKind, decisions: Decisions) -> str:
    lane = instruction.lane
    if lane not in COLLECTIVE_LANES.values():
        return f"<Lane.{before('lane', lane.label).upper()}: {lane.value}>"
    early = instruction.op.startswith("grads.") and decisions.overlap != "none" and decisions.layout.zero < 2
    return "<Lane.REPLICA: 6>" if early or kind is TemplateKind.GATHER_UPDATED else "<Lane.COLLECTIVE: 3>"


def instruction_text(instruction: Instruction, kind: TemplateKind, decisions: Decisions) -> str:
    name, op = before("instruction", instruction.name), before("op", instruction.op)
    lane = lane_text(instruction, kind, decisions)
    operands = tuple_text([operand_text(operand) for operand in instruction.operands])
    work = before("work", repr(instruction.work))
    return f"Instruction(name={name!r}, op={op!r}, lane={lane}, work={work}, operands={operands})"


def template_text(template: Template, decisions: Decisions) -> str:
    slots = tuple_text([repr(before("slot", slot)) for slot in template.slots])
    own = tuple_text([family_text(family) for family in template.own])
    instructions = tuple_text([instruction_text(each, template.kind, decisions) for each in template.instructions])
    name = before("template", template.name)
    return f"Template(name={name!r}, slots={slots}, own={own}, instructions={instructions})"


def instance_text(instance: Instance) -> str:
    return (
        f"Instance(template={instance.template}, place={instance.place!r}, indices={instance.indices}, "
        f"micro_batch={instance.micro_batch}, layer={instance.layer})"
    )


def program_sha256(program: Program, decisions: Decisions) -> str:
    digest = hashlib.sha256(f"memo.program/{FORMAT_VERSION}:{program.stage}\n".encode())
    for lines in (
        map(family_text, program.families),
        (template_text(template, decisions) for template in program.templates),
        map(instance_text, program.instances),
    ):
        for line in lines:
            digest.update(line.encode())
            digest.update(b"\n")
    return digest.hexdigest()


def sha256_of(programs: tuple[Program, ...], decisions: Decisions) -> str:
    """Return the hash that a plan of that version pinned."""
    found = [program_sha256(program, decisions) for program in programs]
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()
