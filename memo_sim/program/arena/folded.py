"""Writes a placement's equal micro-batches once, and writes them out again.

Buffers of a step that repeats often lie at the same addresses every few periods (``periods.py``). The file of such a
placement has the rows of these few periods, and how often they come again. Where addresses repeat late or
never, it has names, lives, sizes and classes once, and all addresses.

    slots     before | a0 b0 | a1 b1 | a2 b2 | a3 b3 | after
    file      before | a0 b0 | after        repeated: 3 times, index steps 1 1
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from memo_sim.contract.placement import Placement, Repeated, split_id
from memo_sim.program.analysis.columns import Flags, Ints
from memo_sim.program.arena.periods import find_period

ROW_BYTES, OFFSET_BYTES = 85, 12
"""Bytes of a file for a slot, and for its address alone."""

COLUMNS = ("ids", "lower", "upper", "size_bytes", "offset_bytes")


def folded(placement: Placement) -> Placement:
    """Return ``placement`` with equal micro-batches once; itself where that does not halve it.

    ``unfolded`` gives it back.
    """
    if placement.repeated is not None:
        return placement
    lower, upper, size = (
        np.array(each, dtype=np.int64) for each in (placement.lower, placement.upper, _kinds(placement))
    )
    period = find_period(lower, upper, size)
    if period is None or (np.diff(lower) < 0).any():
        return placement
    names = [split_id(placement.ids[row]) for row in range(period.first, period.after)]
    if any(name is None for name in names):
        return placement
    families = _numbered([name[0] for name in names if name]).reshape(period.times, period.births)
    index = np.array([name[1] for name in names if name], dtype=np.int64).reshape(period.times, period.births)
    offsets = np.array(placement.offset_bytes, dtype=np.int64)[period.buffers]
    best: tuple[float, int, int, int, bool] | None = None
    for alike, own in ((np.concatenate((offsets, families), axis=1), False), (families, True)):
        if (found := _cycle(alike, index)) is not None:
            spared = found[1] * found[2] * period.births
            file_bytes = (len(placement.ids) - spared) * ROW_BYTES + own * spared * OFFSET_BYTES
            best = min(best or (math.inf, 0, 0, 0, False), (file_bytes, *found, own))
    if best is None or best[0] > len(placement.ids) * ROW_BYTES / 2:
        return placement
    _, begin, cycle, times, own = best
    first, count = period.first + begin * period.births, cycle * period.births
    gone = slice(first + count, first + (times + 1) * count)
    again = Repeated(
        first_row=first,
        times=times,
        instants=cycle * period.instants,
        index_steps=(index[begin + cycle : begin + 2 * cycle] - index[begin : begin + cycle]).ravel().tolist(),
        offset_bytes=placement.offset_bytes[gone] if own else [],
    )
    columns = {name: _without(getattr(placement, name), gone) for name in (*COLUMNS, "classes")}
    return msgspec.structs.replace(placement, repeated=again, **columns)


def unfolded(placement: Placement) -> Placement:
    """Return ``placement`` with a row for every slot."""
    again = placement.repeated
    if again is None:
        return placement
    first, end = again.first_row, again.first_row + len(again.index_steps)
    names = [split_id(name) or ("", 0) for name in placement.ids[first:end]]
    rounds = range(1, again.times + 1)
    more: dict[str, list[str] | list[int]] = {
        "ids": [f"{a}[{n + t * step}]" for t in rounds for (a, n), step in zip(names, again.index_steps, strict=True)],
        "lower": [instant + t * again.instants for t in rounds for instant in placement.lower[first:end]],
        "upper": [instant + t * again.instants for t in rounds for instant in placement.upper[first:end]],
        "size_bytes": placement.size_bytes[first:end] * again.times,
        "offset_bytes": again.offset_bytes or placement.offset_bytes[first:end] * again.times,
        "classes": placement.classes[first:end] * again.times,
    }
    columns = {name: [*getattr(placement, name)[:end], *more[name], *getattr(placement, name)[end:]] for name in more}
    return msgspec.structs.replace(placement, repeated=None, **columns)


def _kinds(placement: Placement) -> list[int]:
    """Return a number for each size and class."""
    kinds = dict[tuple[int, str], int]()
    classes = placement.classes or [""] * len(placement.ids)
    return [kinds.setdefault(each, len(kinds)) for each in zip(placement.size_bytes, classes, strict=True)]


def _numbered(names: list[str]) -> Ints:
    numbers = dict[str, int]()
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)


def _cycle(rows: Ints, index: Ints) -> tuple[int, int, int] | None:
    """Return the first period that comes again, after how many periods, and how often; None when none does.

    Equal are the entries of ``rows``, and how far those of ``index`` are from those of the period before.
    """
    kinds = dict[bytes, int]()
    kind = np.array([kinds.setdefault(row.tobytes(), len(kinds)) for row in rows], dtype=np.int64)
    best: tuple[int, int, int] | None = None
    for cycle in range(1, len(rows) // 2 + 1):
        if best is not None and len(rows) - cycle <= best[1] * best[2]:
            break
        equal = kind[cycle:] == kind[:-cycle]
        _, most = _longest_run(equal)
        if most // cycle * cycle <= (best[1] * best[2] if best else 0):
            continue  # the indices, which are all the names, are compared only where it may matter
        row = np.flatnonzero(equal[cycle:])
        middle = index[row + cycle]
        equal[cycle:][row] = (index[row + 2 * cycle] - middle == middle - index[row]).all(axis=1)
        begin, length = _longest_run(equal)
        times = length // cycle
        if times and (best is None or cycle * times > best[1] * best[2]):
            best = (begin, cycle, times)
    return best


def _longest_run(flags: Flags) -> tuple[int, int]:
    """Return where the longest run of true flags begins, and its length."""
    ends = np.flatnonzero(~np.append(flags, False))
    begins = np.append(0, ends[:-1] + 1)
    longest = int((ends - begins).argmax())
    return int(begins[longest]), int(ends[longest] - begins[longest])


def _without(column: list[str] | list[int], rows: slice) -> list[str] | list[int]:
    return [*column[: rows.start], *column[rows.stop :]]
