"""The scales of the tensors that were quantised to FP8, by the addresses of their copies, and scratch for the kernels.

A scale lives as long as its copy: the next tensor that is quantised to the same addresses replaces it. Lanes that move
a copy to the host and back, and those that gather it, copy its scale on the device, so the program's edges order scales
as copies. Rows that a product reads may have several scales: those of the ranks that they were gathered from, or of row
blocks that were quantised one after the other.

Lanes may move the halves of a copy one after the other. So each range of addresses also knows which elements of which
copy it holds, and neighbours that follow each other there are one part again.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from typing import NamedTuple

import torch
from torch import Tensor

SCRATCH_BYTES = 32 * 2**20
"""Of numbers in fp32: those that are being rounded, and a part of a weight's gradient before it is added."""
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
LEAST_LARGEST = 1e-30
"""Replaces the largest value of what has only zeros, whose scale may be any number."""
CELLS = 4096
"""Scales that are allocated at once."""


class Part(NamedTuple):
    """A range of a copy's elements with one scale, shape (1,)."""

    first: int
    elements: int
    scale: Tensor
    whole: bool
    """Whether it is all that was quantised together."""


class _Range(NamedTuple):
    """A range of addresses with one scale: elements from ``first`` on, of the ``of`` that were quantised together."""

    end: int
    scale: Tensor
    first: int
    of: int


class Fp8Scales:
    """Scales by address. ``wide`` is scratch: a flat fp32 tensor that every kernel of the compute lane may write."""

    def __init__(self, device: torch.device, scratch_bytes: int = SCRATCH_BYTES) -> None:
        self.wide = torch.empty(scratch_bytes // 4, device=device)
        self._cells = torch.ones(CELLS, device=device)
        self._used = 0
        self._known: dict[tuple[int, int, int], Tensor] = {}
        """By address, elements and parts: the cells of their scales, which later steps use again."""
        self._starts: list[int] = []
        self._ranges: dict[int, _Range] = {}
        """By first address, which ``_starts`` has in order."""
        self._grids: dict[tuple[int, int, int], Tensor] = {}
        """By address and shape: scales of a weight's blocks."""
        self._tiles: dict[int, Tensor] = {}
        """By address: where the program's buffers have the tiles of a weight's scales (MXFP8)."""
        self._lock = threading.Lock()

    def made(self, copy: Tensor, parts: int = 1) -> Tensor:
        """Return the scales of ``copy``, for the kernel that writes it: one each for ``parts`` equal parts of it."""
        size = copy.numel() // parts
        return self._hold(copy, parts, 0, size)

    def grid(self, copy: Tensor, rows: int, columns: int) -> Tensor:
        """Return the scales of a weight's blocks, (rows, columns), which its copy has beside what ``made`` returns."""
        key = (copy.data_ptr(), rows, columns)
        if key not in self._grids:
            self._grids[key] = self.wide.new_ones(rows, columns)
        return self._grids[key]

    def stand_in(self, copy: Tensor) -> None:
        """Give a copy that nothing quantised scales of its own, for a kernel that is tried outside a step."""
        self.made(copy)
        self.keep_tiles(copy, torch.zeros(copy.numel() // 32, dtype=torch.uint8, device=copy.device))

    def keep_tiles(self, copy: Tensor, tiles: Tensor) -> None:
        """Note where the tiles of the scales of a weight's copy lie, for the kernel that writes both."""
        self._tiles[copy.data_ptr()] = tiles

    def tiles_of(self, copy: Tensor) -> Tensor:
        """Return the tiles of the scales of a weight's copy, which ``keep_tiles`` noted."""
        return self._tiles[copy.data_ptr()]

    def _hold(self, copy: Tensor, parts: int, first: int, of: int) -> Tensor:
        begin, elements = copy.data_ptr(), copy.numel()
        key, size = (begin, elements, parts), elements // parts
        with self._lock:
            if key not in self._known:
                if self._used + parts > len(self._cells):
                    self._cells, self._used = self._cells.new_ones(max(CELLS, parts)), 0
                self._known[key] = self._cells[self._used : self._used + parts]
                self._used += parts
            cells = self._known[key]
            self._forget(begin, begin + elements)
            at = bisect_left(self._starts, begin)
            starts = range(begin, begin + size * parts, size)
            self._starts[at:at] = starts
            self._ranges |= {s: _Range(s + size, cells[i : i + 1], first, of) for i, s in enumerate(starts)}
            return cells

    def _forget(self, first: int, end: int) -> None:
        """Forget ranges that share addresses with a new one."""
        low = bisect_left(self._starts, first)
        if low and self._ranges[self._starts[low - 1]].end > first:
            low -= 1
        high = bisect_left(self._starts, end)
        for start in self._starts[low:high]:
            del self._ranges[start]
        del self._starts[low:high]

    def carry(self, source: Tensor, target: Tensor) -> None:
        """Give ``target``, to which some or all of a copy is moved, its scales; nothing for other tensors.

        Raises:
            ValueError: when some of the rows were never quantised.
        """
        if source.dtype not in FORMATS:
            return
        at = 0
        for elements, scale, first, of in self._pieces(source):
            self._hold(target.view(-1)[at : at + elements], 1, first, of).copy_(scale)
            at += elements

    def _pieces(self, copy: Tensor) -> list[tuple[int, Tensor, int, int]]:
        """Return (elements, scale, first element in what was quantised together, elements of that) in order."""
        at, found = copy.data_ptr(), list[tuple[int, Tensor, int, int]]()
        end = at + copy.numel()
        with self._lock:
            number = max(0, bisect_right(self._starts, at) - 1)
            while at < end:
                start = self._starts[number] if number < len(self._starts) else end
                if not start <= at < (held := self._ranges.get(start, _Range(at, self._cells, 0, 0))).end:
                    raise ValueError("a product in FP8 reads rows that were not quantised, so they have no scale")
                found.append((min(held.end, end) - at, held.scale, held.first + at - start, held.of))
                at, number = held.end, number + 1
        return found

    def parts(self, copy: Tensor) -> list[Part]:
        """Return the ranges of a copy that have one scale each, in order.

        Raises:
            ValueError: when some of its addresses were never quantised to.
        """
        found, at, behind = list[Part](), 0, (0, 0)
        for elements, scale, first, of in self._pieces(copy):
            if first and behind == (first, of):
                before = found.pop()
                joined = before.elements + elements
                found.append(Part(before.first, joined, before.scale, joined == of))
            else:
                found.append(Part(at, elements, scale, elements == of))
            at, behind = at + elements, (first + elements, of)
        return found

    def whole_parts(self, copy: Tensor) -> list[Part]:
        """Return the parts of a copy by columns, or of one with scales of blocks, each of which is a matrix.

        Raises:
            ValueError: when one is not all that was quantised together, so that it is none.
        """
        found = self.parts(copy)
        if not all(part.whole for part in found):
            raise ValueError("a product in FP8 reads a part of tokens that were quantised together")
        return found

    def of(self, copy: Tensor) -> Tensor:
        """Return the one scale of ``copy``, shape (1,).

        Raises:
            ValueError: when it has none, or several.
        """
        found = self.parts(copy)
        if len(found) > 1:
            raise ValueError(f"a product in FP8 reads rows with {len(found)} scales where it needs one")
        return found[0].scale
