"""Faults planted in a program: one instruction left out or altered, or another buffer bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from memo_sim.program.ir.instruction import Instance, Instruction, Template
from memo_sim.program.ir.kinds import FamilyKind
from memo_sim.program.ir.program import Program

Chosen = Callable[[Instruction], bool]


def places(program: Program, chosen: Chosen, *, where: Callable[[Instance], bool] = lambda _: True) -> list[int]:
    """Return the numbers of the instances that play a chosen instruction."""
    plays = [any(map(chosen, template.instructions)) for template in program.templates]
    return [n for n, each in enumerate(program.instances) if plays[each.template] and where(each)]


def altered(program: Program, number: int, change: Callable[[Template], Template]) -> Program:
    """Return ``program`` with one instance of a template of its own."""
    instance = program.instances[number]
    template = change(program.templates[instance.template])
    mine = replace(template, name=f"{template.name}.planted")
    instances = list(program.instances)
    instances[number] = msgspec.structs.replace(instance, template=len(program.templates))
    return replace(program, templates=(*program.templates, mine), instances=tuple(instances))


def without(program: Program, number: int, chosen: Chosen, which: int = 0) -> Program:
    """Return ``program`` without a chosen instruction of one instance."""

    def change(template: Template) -> Template:
        at = [n for n, each in enumerate(template.instructions) if chosen(each)][which]
        kept = tuple(each for n, each in enumerate(template.instructions) if n != at)
        return replace(template, instructions=kept)

    return altered(program, number, change)


def twice(program: Program, number: int, chosen: Chosen) -> Program:
    """Return ``program`` with a chosen instruction of one instance played twice."""

    def change(template: Template) -> Template:
        at = next(n for n, each in enumerate(template.instructions) if chosen(each))
        again = msgspec.structs.replace(template.instructions[at], name=f"{template.instructions[at].name}.twice")
        return replace(
            template, instructions=(*template.instructions[: at + 1], again, *template.instructions[at + 1 :])
        )

    return altered(program, number, change)


def replaced(program: Program, number: int, chosen: Chosen, change: Callable[[Instruction], Instruction]) -> Program:
    """Return ``program`` with a chosen instruction of one instance changed."""

    def changed(template: Template) -> Template:
        at = next(n for n, each in enumerate(template.instructions) if chosen(each))
        made = change(template.instructions[at])
        return replace(template, instructions=(*template.instructions[:at], made, *template.instructions[at + 1 :]))

    return altered(program, number, changed)


def one_row_late(instruction: Instruction, role: str = "source") -> Instruction:
    """Return a copy of one row less, whose operand ``role`` begins one row later."""
    moved = tuple(
        msgspec.structs.replace(o, first=o.first + (o.role == role), tokens=o.tokens - 1) for o in instruction.operands
    )
    return msgspec.structs.replace(instruction, operands=moved)


def without_operand(instruction: Instruction, role: str) -> Instruction:
    """Return an instruction without an operand."""
    return msgspec.structs.replace(instruction, operands=tuple(o for o in instruction.operands if o.role != role))


def bound(program: Program, number: int, family: str, index: int) -> Program:
    """Return ``program`` with one instance bound to another buffer of a family."""
    instance = program.instances[number]
    template = program.templates[instance.template]
    own = {f.name for f in template.own}
    names = [slot for slot in template.slots if slot not in own]
    indices = [index if name == family else old for name, old in zip(names, instance.indices, strict=True)]
    instances = list(program.instances)
    instances[number] = msgspec.structs.replace(instance, indices=tuple(indices))
    return replace(program, instances=tuple(instances))


def with_one_rounding_buffer(program: Program) -> Program:
    """Return ``program`` with every layer in the same rounding buffer: each is used again one layer early."""
    kinds = {f.name: f.kind for f in program.families}
    instances = []
    for instance in program.instances:
        template = program.templates[instance.template]
        own = {f.name for f in template.own}
        names = [slot for slot in template.slots if slot not in own]
        indices = [0 if kinds[n] is FamilyKind.SKELETAL else i for n, i in zip(names, instance.indices, strict=True)]
        instances.append(msgspec.structs.replace(instance, indices=tuple(indices)))
    return replace(program, instances=tuple(instances))
