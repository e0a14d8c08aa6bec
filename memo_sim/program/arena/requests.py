"""The memory requests of a program (MEMO 4.2, Figures 3b and 8).

A buffer is allocated before the first instruction that touches it and freed after the last one. A buffer that lasts the
whole step lives over all instructions. Phases are the instances of templates: a layer's forward, its backward, ...
"""

from __future__ import annotations

import numpy as np

from memo_sim.contract.plan import Decisions
from memo_sim.contract.requests import ARENA_ALIGNMENT_BYTES, Phase, Requests
from memo_sim.program.analysis.columns import InstructionColumns, fold
from memo_sim.program.analysis.liveness import Liveness, liveness
from memo_sim.program.arena.library_workspaces import lives_in_arena
from memo_sim.program.ir.program import Program


def buffer_names(program: Program) -> list[str]:
    """Return the name of every buffer by its number: the family's name, with an index when the family has several."""
    return [f.name if f.count == 1 else f"{f.name}[{index}]" for f in program.all_families for index in range(f.count)]


def device_buffers(lives: Liveness) -> list[int]:
    """Return the numbers of the device buffers that are used, in the order of their requests."""
    used = np.flatnonzero(lives.on_device & (lives.death >= lives.birth))
    ordered: list[int] = used[np.lexsort((used, lives.birth[used]))].tolist()
    return ordered


def requests_of(
    program: Program,
    columns: InstructionColumns | None = None,
    *,
    lives: Liveness | None = None,
    names: list[str] | None = None,
) -> Requests:
    """Return the requests of ``program`` on its device, one entry per buffer, in order.

    ``lives`` and ``names`` (by buffer number) replace those of the program, for buffers with other sizes or lives.
    """
    if columns is None or lives is None:
        folded = fold(program)
        columns, lives = columns or folded, lives or liveness(program, folded)
    chosen = device_buffers(lives)
    names = names or buffer_names(program)
    return Requests(
        name=program.stage,
        program_sha256=program.sha256,
        ids=[names[b] for b in chosen],
        lower=np.maximum(lives.birth[chosen], 0).tolist(),
        upper=np.minimum(lives.death[chosen] + 1, lives.instructions).tolist(),
        size_bytes=lives.bytes[chosen].tolist(),
        classes=[lives.class_names[c] for c in lives.class_of[chosen].tolist()],
        phases=_phases(program, columns),
        alignment_bytes=ARENA_ALIGNMENT_BYTES,
    )


def arena_requests(program: Program, decisions: Decisions) -> Requests:
    """Return the requests that the plan's arena serves: all but those of libraries outside it."""
    columns = fold(program)
    lives = lives_in_arena(program, liveness(program, columns), decisions)
    return requests_of(program, columns, lives=lives)


def _phases(program: Program, columns: InstructionColumns) -> list[Phase]:
    first = columns.starts.tolist()
    return [
        Phase(
            name=f"{i.place}/{program.templates[i.template].name}",
            kind=program.templates[i.template].name,
            lower=a,
            upper=b,
        )
        for i, a, b in zip(program.instances, first, first[1:], strict=False)
    ]
