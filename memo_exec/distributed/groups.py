"""Process groups: one for each lane and kind of group that a program names, made in one order on all ranks.

Lanes play at the same time, so no two of them share a group; inside one lane collectives come in program order, which
is the same on every rank. Groups of one rank are not made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from memo_exec.distributed.place import Place
from memo_sim.contract.plan import Layout
from memo_sim.program.instruction import Instruction, Lane
from memo_sim.program.program import Program
from memo_sim.program.ranks import stride
from memo_sim.program.work import Collective, Exchange, Handover, Work

Key = tuple[Lane, str]
"""A lane and the group that talks on it."""

Groups = Mapping[Key, dist.ProcessGroup]


def communicates(work: Work) -> bool:
    """Whether what has this work waits for other ranks."""
    return isinstance(work, Collective | Exchange | Handover)


def handover_key(work: Handover) -> Key:
    """Return the key of the groups of two that hand over from stage to stage; both sides have it."""
    return Lane.SEND, f"{work.source}>{work.target}"


def stages_of_key(key: Key) -> tuple[int, int]:
    """Return source and target of a ``handover_key``."""
    source, _, target = key[1].partition(">")
    return int(source), int(target)


def played(program: Program) -> Iterator[Instruction]:
    """Yield the instructions of every template that is played: those of others would ask for groups in vain."""
    for number in sorted({instance.template for instance in program.instances}):
        yield from program.templates[number].instructions


def group_keys(program: Program) -> list[Key]:
    """Return the lanes and groups that ``program`` talks over, in the order in which their groups are made."""
    found: set[Key] = set()
    for instruction in played(program):
        if isinstance(instruction.work, Collective | Exchange):
            found.add((instruction.lane, instruction.work.group))
        elif isinstance(instruction.work, Handover):
            found.add(handover_key(instruction.work))
    return sorted(found)


def missing_groups(program: Program, layout: Layout, groups: Groups) -> list[Key]:
    """Return what ``program`` talks over and ``groups`` has not; a group of one rank is none."""
    return [key for key in group_keys(program) if key not in groups and any(len(g) > 1 for g in _ranks(key, layout))]


def make_groups(programs: Sequence[Program], place: Place, *, patience_s: float) -> dict[Key, dist.ProcessGroup]:
    """Return this rank's groups; every rank of the job calls this with the programs of all roles.

    Raises:
        RuntimeError: when another rank has stopped.
    """
    found = {}
    for key in sorted({key for program in programs for key in group_keys(program)}):
        for members in _ranks(key, place.layout):
            if len(members) > 1:
                group = dist.new_group(list(members), timeout=timedelta(seconds=patience_s))
                if place.rank in members:
                    found[key] = group
    return found


def _ranks(key: Key, layout: Layout) -> list[tuple[int, ...]]:
    """Return the ranks of every group with this key, each group once."""
    name, devices = key[1], layout.devices
    if ">" in name:
        source, target = stages_of_key(key)
        apart = stride("pp", layout)
        return [(source * apart + i, target * apart + i) for i in range(apart)]
    groups = [tuple(Place(layout, rank).members(name)) for rank in range(devices)]
    # Of the first and the last stage alone: counted from a stage between them, a group would leave the layout.
    return list(dict.fromkeys(group for group in groups if max(group) < devices))
