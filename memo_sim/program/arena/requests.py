"""The memory requests of a program (MEMO 4.2, Figures 3b and 8).

A buffer is allocated before the first instruction that touches it and freed after the last one. A buffer that lasts the
whole step lives over all instructions. Phases are the instances of templates: a layer's forward, its backward, ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from memo_sim.contract.plan import Decisions
from memo_sim.contract.requests import ARENA_ALIGNMENT_BYTES, Phase, Requests
from memo_sim.program.analysis.columns import InstructionColumns, Ints, fold
from memo_sim.program.analysis.liveness import Liveness, liveness
from memo_sim.program.arena.library_workspaces import lives_in_arena
from memo_sim.program.ir.program import Program


def buffer_names(program: Program) -> list[str]:
    """Return the name of every buffer by its number: the family's name, with an index when the family has several."""
    return [f.name if f.count == 1 else f"{f.name}[{index}]" for f in program.all_families for index in range(f.count)]


class BufferNames:
    """The names of ``buffer_names``, and of buffers behind them. They are made when they are asked for.

    A pipeline has a million buffers, and an allocator names only those that it has to stop for.
    """

    def __init__(self, program: Program, added: Sequence[str] = ()) -> None:
        """``added``: names of the buffers that the program does not have."""
        self._program, self._added = program, tuple(added)
        self._firsts = [0, *accumulate(family.count for family in program.all_families)]

    def __len__(self) -> int:
        """Return the number of buffers."""
        return self._firsts[-1] + len(self._added)

    def __getitem__(self, number: int) -> str:
        """Return the name of a buffer."""
        if number >= self._firsts[-1]:
            return self._added[number - self._firsts[-1]]
        at = bisect_right(self._firsts, number) - 1
        family = self._program.all_families[at]
        return family.name if family.count == 1 else f"{family.name}[{number - self._firsts[at]}]"

    def __iter__(self) -> Iterator[str]:
        """Yield all names by number."""
        yield from buffer_names(self._program)
        yield from self._added

    def with_added(self, more: Sequence[str]) -> BufferNames:
        """Return these names, and ``more`` behind them."""
        return BufferNames(self._program, (*self._added, *more))


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The names of some buffers, by their place among them."""

    names: BufferNames
    numbers: Ints

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> str:
        return self.names[int(self.numbers[place])]


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """What a program requests on its device, in order: as in ``Requests``, for an allocator's replay."""

    ids: _Chosen
    lower: Ints
    upper: Ints
    size_bytes: Ints


def device_buffers(lives: Liveness) -> Ints:
    """Return the numbers of the device buffers that are used, in the order of their requests."""
    used = np.flatnonzero(lives.on_device & (lives.death >= lives.birth))
    ordered: Ints = used[np.lexsort((used, lives.birth[used]))]
    return ordered


def request_columns(lives: Liveness, names: BufferNames) -> RequestColumns:
    """Return the requests for the device's buffers among ``lives``; ``names``: by number."""
    chosen = device_buffers(lives)
    return RequestColumns(
        ids=_Chosen(names, chosen),
        lower=np.maximum(lives.birth[chosen], 0),
        upper=np.minimum(lives.death[chosen] + 1, lives.instructions),
        size_bytes=lives.bytes[chosen],
    )


def requests_of(
    program: Program,
    columns: InstructionColumns | None = None,
    *,
    lives: Liveness | None = None,
    names: BufferNames | None = None,
) -> Requests:
    """Return the requests of ``program`` on its device, one entry per buffer, in order.

    ``lives`` and ``names`` (by buffer number) replace those of the program, for buffers with other sizes or lives.
    """
    if columns is None or lives is None:
        folded = fold(program)
        columns, lives = columns or folded, lives or liveness(program, folded)
    names = names or BufferNames(program)
    found, every = request_columns(lives, names), list(names)
    chosen = found.ids.numbers
    return Requests(
        name=program.stage,
        program_sha256=program.sha256,
        ids=[every[number] for number in chosen.tolist()],
        lower=found.lower.tolist(),
        upper=found.upper.tolist(),
        size_bytes=found.size_bytes.tolist(),
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
