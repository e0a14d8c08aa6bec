"""Workspaces that libraries allocate themselves (results and scratch of attention), which no plan can place.

The program declares them as workspaces, so that they are counted. The plan chooses whether they lie in the arena:

    replay_allocator   memo-exec's allocator below torch gives every call its slot of the arena
    otherwise          torch's allocator serves them outside the arena, which then has no slots for them

The planner subtracts their sum before it says that a plan fits, and the executor before it allocates. Both use this
module. Plans for CPUs keep the slots in the arena, and the executor counts the bytes once more outside it. No program
declares scratch whose size depends on the processor's instruction set: the executor measures it
(``memo_exec/machine/library_scratch.py``).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memo_sim.contract.hardware import SAFETY
from memo_sim.contract.plan import Decisions
from memo_sim.program.analysis.columns import Flags, fold
from memo_sim.program.analysis.liveness import Liveness, liveness
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Attention
from memo_sim.program.operators.workspaces import attention_workspace_bytes, merge_scratch_bytes, on_cpu

LIBRARY_OPS = frozenset(
    {
        *("attention", "attention.bwd"),
        *("experts.sort", "experts.linear", "experts.linear.dgrad", "experts.linear.wgrad"),
    }
)
"""Operators whose library allocates the workspace that the program declares."""

RESULTS = "results of library calls"
MERGES = "merges of attention parts"
COMMUNICATORS = "communicators"
LATER = "context and libraries"
LATER_BYTES = 2**29
"""Smallest number of device bytes that the context and libraries take after a run has begun.

Assumed, for profiles that have measured less or nothing.
"""
MOST_BYTES = 2**31
"""Largest workspace of a head group outside the arena; an attention that needs more fills the device with few heads."""
IN_USE = "in use when calibrated"
"""Name of the item of a profile's reserve that a run already finds in use."""


def beside_arena(decisions: Decisions) -> bool:
    """Return whether library workspaces lie outside the plan's arena."""
    planned = decisions.memory_policy == "planned" and not decisions.replay_allocator
    return planned and not on_cpu(decisions.kernels.attention)


def groups_beside(work: Attention, fewest: int) -> int:
    """Return the smallest number of head groups, at least ``fewest``, whose workspace stays below ``MOST_BYTES``.

    If there is none, return one group per key/value head. ``work`` is attention's backward.
    """
    groups = [count for count in range(fewest, work.kv_heads + 1) if work.kv_heads % count == 0]
    return next((count for count in groups if attention_workspace_bytes(work, count) <= MOST_BYTES), groups[-1])


def reserve_of(program: Program, lives: Liveness, decisions: Decisions, known: dict[str, int]) -> dict[str, int]:
    """Return a plan's reserve by item: ``known`` items, the scratch of merges, library workspaces outside the arena.

    ``lives``: of all of the program's buffers.

    ``known`` holds the items of the profile and the plan's communicators. For plans with libraries outside the
    arena, context and libraries count as at least ``LATER_BYTES``, as in the executor. Communicators, and what was in
    use before, do not count towards these bytes, because the executor finds them already allocated; a question's safety
    margin stays free beside all of them.
    """
    found = dict(known)
    if decisions.memory_policy != "eager" and (merges := merging_bytes(program)):
        found[MERGES] = merges
    if not beside_arena(decisions):
        return found
    found[RESULTS] = results_bytes(program, lives)
    later = sum(size for item, size in known.items() if item not in (IN_USE, COMMUNICATORS, SAFETY))
    return found | {LATER: LATER_BYTES - later} if later < LATER_BYTES else found


def merging_bytes(program: Program) -> int:
    """Return the bytes of the scratch that merges of partial attention results share; 0 when nothing is merged."""
    instructions = [i for template in program.templates for i in template.instructions]
    if not any(i.op == "attention.merge" for i in instructions):
        return 0
    works = [i.work for i in instructions if isinstance(i.work, Attention)]
    return max(merge_scratch_bytes(work.heads, work.value_dim, work.dtype) for work in works)


def library_workspaces(program: Program) -> frozenset[int]:
    """Return the numbers of the buffers that libraries allocate themselves."""
    return frozenset(np.flatnonzero(_of_libraries(program)).tolist())


def results_bytes(program: Program, lives: Liveness | None = None) -> int:
    """Return the largest sum of library workspaces alive at once, which torch's allocator serves."""
    lives = lives or liveness(program, fold(program))
    chosen = _of_libraries(program)
    change = np.zeros(lives.instructions + 2, dtype=np.int64)
    np.add.at(change, lives.birth[chosen], lives.bytes[chosen])
    np.add.at(change, lives.death[chosen] + 1, -lives.bytes[chosen])
    return int(np.cumsum(change).max(initial=0))


def lives_in_arena(program: Program, lives: Liveness, decisions: Decisions) -> Liveness:
    """Return the lives, with workspaces that lie outside the plan's arena marked as never used."""
    return without_library(program, lives) if beside_arena(decisions) else lives


def without_library(program: Program, lives: Liveness) -> Liveness:
    """Return the lives, with every library workspace marked as never used."""
    chosen = _of_libraries(program)
    return replace(
        lives, birth=np.where(chosen, lives.instructions, lives.birth), death=np.where(chosen, -1, lives.death)
    )


def _of_libraries(program: Program) -> Flags:
    """Return a flag for each buffer: whether a library allocates it."""
    bases, uses = dict(program.family_bases), np.bincount(program.template_of, minlength=len(program.templates))
    bases |= {f.name: bases[f.region] for f in program.families if f.region}
    chosen: Flags = np.zeros(sum(f.count for f in program.all_families), dtype=np.bool_)
    for number, template in enumerate(program.templates):
        asked = {
            o.slot for i in template.instructions if i.op in LIBRARY_OPS for o in i.operands if o.role == "workspace"
        }
        bound = [slot for slot, own in enumerate(template.own_slots) if not own]
        for slot in asked:
            name = template.slots[slot]
            if template.own_slots[slot]:
                base = bases[f"{template.name}/{name}"]
                chosen[base : base + uses[number]] = True
                continue
            at = bound.index(slot)
            for instance in program.instances:
                if instance.template == number:
                    chosen[bases[name] + instance.indices[at]] = True
    return chosen
