"""Checks that the programs of several stages fit together: calls match, sends have receives, nothing deadlocks.

It shares no code with the lowering, nor with the engine's matching of calls.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise, zip_longest

from memo_sim.program.analysis.columns import Columns
from memo_sim.program.analysis.edges import Edges
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, Exchange, PointToPoint

ACROSS = ("pp", "tied")
"""Groups whose ranks belong to several stages; all other groups lie inside a stage."""

_PLACE = re.compile(r"m(\d+)/s(\d+)/l(\d+)/pp/(?:send|recv)\.(x|grad)$")

Call = tuple[str, int, int, str]


def check_stages(programs: tuple[Program, ...]) -> list[str]:
    """Return every mismatch between the collectives, ring exchanges and p2p transfers of the stages.

    - Ranks of one group call the same collectives in the same order, with the same size, on the same lane.
    - Every send from one stage to another is received there, in the same order and for the same micro-batch. A layer's
      output becomes the next layer's input; gradients go the other way.
    """
    return [*check_calls(programs), *_check_p2p(programs)]


def check_deadlock(
    programs: Sequence[Program], columns: Sequence[Columns], edges: Sequence[Edges], across: Sequence[str] = ACROSS
) -> list[str]:
    """Return the instructions that can never start: those in a cycle of waits, and all that wait for them.

    Lanes are FIFO, ``edges`` hold, and matched calls start when all of them are ready. Durations do not matter: an
    order without a cycle always completes. ``across`` are the groups that span the programs, for example ``cp`` for the
    ranks of a context-parallel ring.
    """
    node: dict[tuple[int, int], tuple[int, int]] = {}
    for stage, number, call in _matched_calls(programs, across):
        node[stage, number] = first = node.get(call, (stage, number))
        node.setdefault(call, first)
    waits: dict[tuple[int, int], int] = defaultdict(int)
    follows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for stage, (mine, given) in enumerate(zip(columns, edges, strict=True)):
        lanes: dict[int, list[int]] = defaultdict(list)
        for number, lane in enumerate(mine.lane.tolist()):
            lanes[lane].append(number)
        orders = [pair for lane in lanes.values() for pair in pairwise(lane)]
        orders += list(zip(given.producer.tolist(), given.consumer.tolist(), strict=True))
        for earlier, later in orders:
            a, b = node.get((stage, earlier), (stage, earlier)), node.get((stage, later), (stage, later))
            follows[a].append(b)
            waits[b] += 1
    everything = {node.get((r, i), (r, i)) for r, mine in enumerate(columns) for i in range(len(mine.lane))}
    ready = [each for each in everything if not waits[each]]
    done = set()
    while ready:
        done.add(each := ready.pop())
        for after in follows[each]:
            waits[after] -= 1
            if not waits[after]:
                ready.append(after)
    ids = [program.ids() for program in programs]
    return [f"{programs[r].stage}: {ids[r][i]} never starts" for r, i in sorted(everything - done)]


def check_calls(programs: tuple[Program, ...], among: Sequence[str] = ()) -> list[str]:
    """Return every collective and exchange that differs between the ranks of its group.

    ``among``: the groups that these ranks form together; empty for all groups.
    """
    calls = [_group_calls(p) for p in programs]
    faults = []
    for group in sorted({g for mine in calls for g in mine if not among or g in among}):
        for first, *others in _members(group, programs, calls):
            for other in others:
                a, b = calls[first].get(group, []), calls[other].get(group, [])
                at = next((i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)
                if at is not None:
                    mine, theirs = (each[at] if at < len(each) else None for each in (a, b))
                    stages = programs[first].stage, programs[other].stage
                    faults.append(f"group {group}, call {at}: {stages[0]} has {mine}, {stages[1]} has {theirs}")
    return faults


def _members(group: str, programs: tuple[Program, ...], calls: list[dict[str, list[Call]]]) -> list[list[int]]:
    """Return the programs that must make the same calls of a group: those of one stage, or the stages that it spans."""
    last = len(programs) - 1
    if group == "pp":
        return [list(range(len(programs)))]
    if group == "tied":
        return [[0, *(n for n in range(1, last) if group in calls[n]), last]]
    alike: dict[str, list[int]] = defaultdict(list)
    for number, program in enumerate(programs):
        alike[program.stage].append(number)
    return list(alike.values())


def _group_calls(program: Program) -> dict[str, list[Call]]:
    calls: dict[str, list[Call]] = defaultdict(list)
    for _, instruction in program.walk():
        if isinstance(instruction.work, Collective | Exchange):
            work = instruction.work
            kind = work.kind if isinstance(work, Collective) else "send_recv"
            far = f" {work.distance} ranks away" if isinstance(work, Exchange) and work.distance > 1 else ""
            calls[work.group].append((kind + far, work.bytes, work.ranks, instruction.lane.label))
    return calls


def _check_p2p(programs: tuple[Program, ...]) -> list[str]:
    sent: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    faults = []
    for number, program in enumerate(programs):
        for name, instruction in program.walk():
            work, lane = instruction.work, instruction.lane
            if not isinstance(work, PointToPoint):
                if lane in (Lane.SEND, Lane.RECV):
                    faults.append(f"{program.stage}: {name} is on lane {lane.label}, but is no p2p transfer")
                continue
            if lane not in (Lane.SEND, Lane.RECV) or number != (work.source if lane is Lane.SEND else work.target):
                faults.append(f"{program.stage}: {name} sends {work.source} -> {work.target} on lane {lane.label}")
                continue
            side = sent if lane is Lane.SEND else received
            side[work.source, work.target].append((name, work.bytes))
    for pair in sorted(set(sent) | set(received)):
        for i in range(max(len(sent[pair]), len(received[pair]))):
            a = sent[pair][i] if i < len(sent[pair]) else None
            b = received[pair][i] if i < len(received[pair]) else None
            if a is None or b is None or a[1] != b[1] or not _is_match(a[0], b[0]):
                faults.append(f"stage {pair[0]} to {pair[1]}, p2p transfer {i}: {a} is sent, {b} is received")
                break
    return faults


def _is_match(sent: str, received: str) -> bool:
    """Return whether a send and a receive match: same micro-batch, and the next or previous layer."""
    if "/helper/" in sent:
        return sent.replace("/helper/", "/").replace(".send.", ".recv.") == received.replace("/helper/", "/")
    a, b = _PLACE.search(sent), _PLACE.search(received)
    if a is None or b is None or a[4] != b[4]:
        return False
    return (a[1], a[2], int(a[3]) + (1 if a[4] == "x" else -1)) == (b[1], b[2], int(b[3]))


def _matched_calls(programs: Sequence[Program], across: Sequence[str]) -> list[tuple[int, int, tuple[int, int]]]:
    """Return (stage, instruction, call) of all calls that involve several stages; a call is (-1, its number)."""
    numbers: dict[tuple[object, ...], int] = {}
    found = []
    for stage, program in enumerate(programs):
        counts: dict[tuple[object, ...], int] = defaultdict(int)
        for number, (_, instruction) in enumerate(program.walk()):
            work = instruction.work
            if isinstance(work, PointToPoint):
                kind: tuple[object, ...] = (work.source, work.target)
            elif isinstance(work, Collective | Exchange) and work.group in across and len(programs) > 1:
                kind = (work.group, instruction.lane)  # a group's lanes are independent of each other
            else:
                continue
            counts[instruction.lane, *kind] += 1
            call = (*kind, counts[instruction.lane, *kind])
            found.append((stage, number, (-1, numbers.setdefault(call, len(numbers)))))
    return found
