"""Classifies buffers by the passes that touch them, which decides where they may lie (SPPO 3.2, Figure 6).

    type 0    touched by passes of several subsequences: keys and values, and the sums of their gradients
    type 1    touched by one subsequence's forward and backward: kept, and may be offloaded in between
    type 2    touched by one pass only: freed before it could be offloaded

The types follow from a program's operands, not from names of tensors. They describe all tensors only for a program that
keeps everything; in other programs, several subsequences use the same rounding buffers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from enum import IntEnum

from memo_sim.program.ir.program import Program
from memo_sim.program.layout.schedule import Pass


class AccessType(IntEnum):
    """SPPO's types of access."""

    PREFIX = 0
    KEPT = 1
    TRANSIENT = 2


def accesses(program: Program, *, rows: int | None = None) -> dict[tuple[str, int], Counter[int]]:
    """Return the number of operands that touch each buffer (family, index), by number of the pass.

    Buffers that live for the whole step (parameters and their gradients) are left out. ``rows``: count only operands
    that touch one of a buffer's first ``rows`` rows.
    """
    lasting = {f.name for f in program.families if f.lifetime == "step"}
    found: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)
    begins = [first for _, first in program.passes]
    played: Counter[int] = Counter()
    number = -1
    for at, instance in enumerate(program.instances):
        number += number + 1 < len(begins) and at == begins[number + 1]
        template, own = program.templates[instance.template], played[instance.template]
        played[instance.template] += 1
        if number < 0 or template.kind.of_step:
            continue
        bound = iter(instance.indices)
        mine = {f.name for f in template.own}
        keys = [(f"{template.name}/{s}", own) if s in mine else (s, next(bound)) for s in template.slots]
        for instruction in template.instructions:
            for operand in instruction.operands:
                if keys[operand.slot][0] not in lasting and (rows is None or operand.first < rows):
                    found[keys[operand.slot]][number] += 1
    return dict(found)


def access_types(program: Program) -> dict[str, AccessType]:
    """Return the type of every family that does not live for the whole step."""
    passes = [each for each, _ in program.passes]
    types: dict[str, AccessType] = {}
    for (family, _), touched in accesses(program).items():
        types[family] = min(types.get(family, AccessType.TRANSIENT), _type([passes[n] for n in touched]))
    return types


def _type(passes: list[Pass]) -> AccessType:
    if len(passes) == 1:
        return AccessType.TRANSIENT
    one = len({(each.micro_batch, each.subsequence) for each in passes}) == 1
    return AccessType.KEPT if one else AccessType.PREFIX
