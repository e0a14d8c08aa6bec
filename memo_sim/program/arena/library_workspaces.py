"""What libraries allocate themselves: results and scratch of attention, which no plan can put at an address.

The program declares them as workspaces, so that they are counted. Whether they lie in the arena is the plan's choice:

    replay_allocator   memo-exec's allocator below torch lends every call its slot of the arena
    otherwise          torch's allocator hands them out beside the arena, which then has no slots for them

The planner takes their sum off before it says that a plan fits, and the executor before it allocates: one function.
Plans for CPUs keep the slots, whose bytes the executor counts once more beside them. Scratch whose size the processor's
instruction set decides is in no program: the executor measures it (``memo_exec/machine/library_scratch.py``).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memo_sim.contract.plan import Decisions
from memo_sim.program.analysis.columns import Columns, Flags, expand
from memo_sim.program.analysis.liveness import Liveness, liveness
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Attention
from memo_sim.program.operators.workspaces import attention_workspace_bytes, merge_scratch_bytes, on_cpu

LIBRARY_OPS = frozenset({"attention", "attention.bwd"})
"""Operators whose library allocates the workspace that the program declares."""

RESULTS = "results of library calls"
MERGES = "merges of attention parts"
COMMUNICATORS = "communicators"
LATER = "context and libraries"
LATER_BYTES = 2**29
"""Device bytes that the context and libraries take once a run has begun, at least: assumed, for a profile that has
measured less or nothing."""
MOST_BYTES = 2**31
"""Of a group's workspace beside the arena. Attention that needs more has work for the whole device in a few heads."""
IN_USE = "in use when calibrated"
"""What a profile's reserve calls the bytes that a run finds taken already."""


def beside_arena(decisions: Decisions) -> bool:
    """Return whether libraries' workspaces lie outside the plan's arena."""
    planned = decisions.memory_policy == "planned" and not decisions.replay_allocator
    return planned and not on_cpu(decisions.kernels.attention)


def groups_beside(work: Attention, fewest: int) -> int:
    """Return the fewest groups of heads, from ``fewest`` on, whose workspace stays under ``MOST_BYTES``.

    Where none does, there is one for each key/value head. ``work`` is attention's backward.
    """
    groups = [count for count in range(fewest, work.kv_heads + 1) if work.kv_heads % count == 0]
    return next((count for count in groups if attention_workspace_bytes(work, count) <= MOST_BYTES), groups[-1])


def reserve_of(program: Program, columns: Columns, decisions: Decisions, known: dict[str, int]) -> dict[str, int]:
    """Return a plan's reserve by who takes it: the ``known`` items, what merges share, what lies beside the arena.

    ``known`` are the profile's and the plan's communicators. For plans with libraries beside the arena as much is taken
    off as the executor takes off at least, which finds communicators and what was in use taken already.
    """
    found = dict(known)
    if decisions.memory_policy != "eager" and (merges := merging_bytes(program)):
        found[MERGES] = merges
    if not beside_arena(decisions):
        return found
    found[RESULTS] = results_bytes(program, columns)
    later = sum(size for item, size in known.items() if item not in (IN_USE, COMMUNICATORS))
    return found | {LATER: LATER_BYTES - later} if later < LATER_BYTES else found


def merging_bytes(program: Program) -> int:
    """Return the memory that merges of attention parts share; 0 where nothing is merged."""
    instructions = [i for template in program.templates for i in template.instructions]
    if not any(i.op == "attention.merge" for i in instructions):
        return 0
    works = [i.work for i in instructions if isinstance(i.work, Attention)]
    return max(merge_scratch_bytes(work.heads, work.head_dim, work.dtype) for work in works)


def library_workspaces(program: Program, columns: Columns | None = None) -> frozenset[int]:
    """Return the numbers of the buffers that libraries allocate themselves."""
    columns = columns or expand(program)
    asked = [
        np.array([i.op in LIBRARY_OPS and o.role == "workspace" for i in t.instructions for o in i.operands], np.bool_)
        for t in program.templates
    ]
    chosen = np.concatenate([asked[instance.template] for instance in program.instances])
    return frozenset(columns.operand_buffer[chosen].tolist())


def results_bytes(program: Program, columns: Columns | None = None) -> int:
    """Return the most bytes of library workspaces that live at once: torch's allocator hands them out."""
    columns = columns or expand(program)
    lives = liveness(program, columns)
    chosen = _chosen(program, columns, lives)
    change = np.zeros(lives.instructions + 2, dtype=np.int64)
    np.add.at(change, lives.birth[chosen], lives.bytes[chosen])
    np.add.at(change, lives.death[chosen] + 1, -lives.bytes[chosen])
    return int(np.cumsum(change).max(initial=0))


def lives_in_arena(program: Program, columns: Columns, lives: Liveness, decisions: Decisions) -> Liveness:
    """Return the lives with the workspaces that lie beside the plan's arena as never used."""
    if not beside_arena(decisions):
        return lives
    return without_library(program, columns, lives)


def without_library(program: Program, columns: Columns, lives: Liveness) -> Liveness:
    """Return the lives with every library's workspace as never used."""
    chosen = _chosen(program, columns, lives)
    return replace(
        lives, birth=np.where(chosen, lives.instructions, lives.birth), death=np.where(chosen, -1, lives.death)
    )


def _chosen(program: Program, columns: Columns, lives: Liveness) -> Flags:
    chosen: Flags = np.zeros(len(lives.bytes), dtype=np.bool_)
    chosen[list(library_workspaces(program, columns))] = True
    return chosen
