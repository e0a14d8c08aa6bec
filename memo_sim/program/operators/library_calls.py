"""Calls of the library that one collective makes when it does not move all of its bytes at once.

``memo_exec/kernels/collective.py`` makes them one after the other, and each starts anew. Frameworks, whose plans have
the memory policy ``eager``, move all bytes in one call.

    rows of one row block     one call for each row block that the rows touch (``layout/token_order.py``)
    a ring's rows             the early chunks of all ranks, then the late ones
    rows in FP8               behind each call another one, for the scale of every rank's rows
"""

from __future__ import annotations

from collections.abc import Sequence

from memo_sim.contract.hardware import CollectiveKind
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Rows, TemplateBuilder
from memo_sim.program.ir.work import LibraryCall
from memo_sim.program.layout.token_order import clipped_runs, row_blocks

CHUNKS = 2
"""Chunks of a sequence that each rank of a ring holds: an early one and a late one."""


RowBlocks = tuple[tuple[int, int], ...]
"""(first row, rows) of each row block."""


def exchanged_blocks(decisions: Decisions, subsequence: int, first: int, rows: int) -> RowBlocks:
    """Return the row blocks that calls of collectives do not cross, as (first row, rows), counted from row ``first``.

    ``first`` and ``rows``: the rows of the subsequence that a template computes. None where no collective moves
    rows of activations by row block: one call moves everything.
    """
    layout = decisions.layout
    gathered = layout.tp > 1 and layout.sequence_parallel
    if decisions.memory_policy == "eager" or not (gathered or layout.ulysses > 1):
        return ()
    found = clipped_runs(row_blocks(decisions, subsequence), first, rows)
    return tuple((start - first, length) for start, length in found)


def by_row_block(
    builder: TemplateBuilder, kind: CollectiveKind, rows: Rows, size: int, beside: Sequence[LibraryCall] = ()
) -> tuple[LibraryCall, ...]:
    """Return the calls of a collective over ``rows``, which has ``size`` bytes; ``beside``: those behind each call."""
    cut = [length for _, length in clipped_runs(builder.row_blocks, rows.first, rows.tokens)] or [rows.tokens]
    if len(cut) == 1 and not beside:
        return ()
    return tuple(call for length in cut for call in ((kind, size * length // rows.tokens), *beside))


def scales_call(decisions: Decisions, dtype: str, ranks: int) -> tuple[LibraryCall, ...]:
    """Return the call that gathers the scales of rows in FP8, one fp32 number of each rank; none for other rows."""
    in_fp8 = DTYPE_BYTES[dtype] == 1 and decisions.memory_policy != "eager"
    return (("all_gather", DTYPE_BYTES["fp32"] * ranks),) if in_fp8 else ()


def in_equal_calls(decisions: Decisions, kind: CollectiveKind, size: int, count: int) -> tuple[LibraryCall, ...]:
    """Return ``count`` calls of equal size that together have ``size`` bytes."""
    return () if decisions.memory_policy == "eager" or count == 1 else ((kind, size // count),) * count
