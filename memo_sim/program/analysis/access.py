"""Which passes touch a buffer, and what that says of where it may lie (SPPO 3.2, Figure 6).

    type 0    touched by passes of several subsequences: keys and values, and the sums of their gradients
    type 1    by one subsequence's forward, and again by its backward: what is kept, and may travel in between
    type 2    within one pass: gone before anything could travel

It is read off a program's operands; nothing here knows a tensor's name. A program that keeps everything says it of all
tensors: in others several subsequences take the same rounding buffers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from enum import IntEnum

from memo_sim.program.ir.program import Program
from memo_sim.program.layout.schedule import Pass


class AccessType(IntEnum):
    """SPPO's types."""

    PREFIX = 0
    KEPT = 1
    TRANSIENT = 2


def accesses(program: Program, *, rows: int | None = None) -> dict[tuple[str, int], Counter[int]]:
    """Return of each buffer (family, index) how many operands touch it in each pass, by the pass's number.

    Only what lives for some of the step: parameters and their gradients are every pass's. ``rows``: count those alone
    that touch any of a buffer's first rows.
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
        if number < 0 or not instance.place.startswith("m"):
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
    """Return the type of every family that lives for some of the step."""
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
