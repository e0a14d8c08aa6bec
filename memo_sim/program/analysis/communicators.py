"""Lists the communicators of a rank: the executor makes process groups from them, the engine counts their memory.

The executor makes one communicator for each lane and kind of group that a program uses: one for a group's collectives,
and one for the hops of a ring, which run beside them. It makes one more over all ranks (``init_process_group`` with a
device).

An eager framework makes one for each kind of group, and one over all ranks at its first barrier. In a ring of more than
two ranks, it makes another one with each neighbour, for sends that are not batched (Transformer Engine batches those of
a ring of two; pytorch/pytorch#152220).

Groups of one rank have no communicator.

    tp 4, cp 2, ZeRO 1    all 8    tp 4    replica grads 2    p2p cp 2
    a middle stage        all 8    tp 2    ...    send 0>1    send 1>0    send 1>2    send 2>1
"""

from __future__ import annotations

from collections.abc import Iterator

from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, Exchange, PointToPoint
from memo_sim.program.layout.rank_order import degree

Key = tuple[Lane, str]
"""A lane, and the group that communicates on it."""

PAIR = 2
"""Ranks of a p2p pair."""


def p2p_key(work: PointToPoint) -> Key:
    """Return the key of the groups of two ranks that send from stage to stage; both stages have the same key."""
    return Lane.SEND, f"{work.source}>{work.target}"


def stages_of_key(key: Key) -> tuple[int, int]:
    """Return the source and target stage of a ``p2p_key``."""
    source, _, target = key[1].partition(">")
    return int(source), int(target)


def played(program: Program) -> Iterator[Instruction]:
    """Yield the instructions of every template that has an instance; the others need no groups."""
    for number in sorted(set(program.template_of.tolist())):
        yield from program.templates[number].instructions


def group_keys(program: Program) -> list[Key]:
    """Return the lanes and groups that ``program`` communicates on, in the order in which the groups are made."""
    found: set[Key] = set()
    for instruction in played(program):
        if isinstance(instruction.work, Collective | Exchange):
            found.add((instruction.lane, instruction.work.group))
        elif isinstance(instruction.work, PointToPoint):
            found.add(p2p_key(instruction.work))
    return sorted(found)


def least_communicators(layout: Layout) -> list[int]:
    """Return the ranks of communicators that ``communicators`` has for each stage of a plan with planned memory.

    Nothing is lowered. Norm and loss are summed over the groups (``optimizer.totals``); attention divides its sequence
    or heads. A stage sends to its neighbours and receives from them; with interleaved chunks, the first and the last
    one are neighbours, too. There may be more.
    """
    degrees = [layout.tp, layout.replicas, layout.pp, layout.ring, layout.ulysses]
    if layout.pp > 1 and not layout.multiplexed:
        neighbours = 2 if layout.virtual_stages > 1 and layout.pp > PAIR else 1
        degrees += [PAIR] * 2 * neighbours  # there and back
    return [size for size in (layout.devices, *degrees) if size > 1]


def communicators(program: Program, decisions: Decisions) -> list[int]:
    """Return the number of ranks of each communicator of a rank that plays ``program``; empty for a single device.

    Under an eager framework, a ring and its group's collectives share a communicator, and stages send in the group of
    all stages.
    """
    layout, keys = decisions.layout, group_keys(program)
    if decisions.memory_policy == "eager":
        sizes = [degree(group, layout) for group in sorted({"pp" if _pair(key) else key[1] for key in keys})]
        sizes += [PAIR, PAIR] if (Lane.P2P, "cp") in keys and layout.cp > PAIR else []
    else:
        sizes = [PAIR if _pair(key) else degree(key[1], layout) for key in keys]
    return [size for size in (layout.devices, *sizes) if size > 1]


def _pair(key: Key) -> bool:
    return ">" in key[1]
