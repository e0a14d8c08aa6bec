"""The host slab: one stretch of host memory in which host buffers take turns, first fit over their program-order lives.

Its size is the peak of what lives at once, not the sum. On CUDA it is pinned once and exactly (``pinned.py``).

      first step  [ l0 ][ l1 ][ l2 ]        births in forward order
      later       [ l0 ][    m1/l0    ]     a hole is filled by the next birth that fits
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_exec.memory.pinned import mapping, pin, unpin
from memo_sim.program.analysis.columns import Columns, Ints
from memo_sim.program.analysis.liveness import Liveness
from memo_sim.program.arena.first_fit import FirstFit
from memo_sim.program.ir.program import Program


@dataclass(frozen=True)
class SlabLayout:
    """Offset of every buffer that lies in one stretch of memory (-1 for all others), and the stretch's size.

    The slab of host buffers has one, and so has the planned arena of device buffers.
    """

    offsets: Ints
    bytes: int


def lay_out(program: Program, columns: Columns, lives: Liveness) -> SlabLayout:
    """Return where each host buffer lies."""
    used = ~lives.on_device & (lives.death >= lives.birth)
    chosen = np.flatnonzero(used)
    offsets = np.full(len(lives.bytes), -1, dtype=np.int64)
    births = sorted(chosen.tolist(), key=lambda b: (int(lives.birth[b]), b))
    deaths = sorted(chosen.tolist(), key=lambda b: (int(lives.death[b]), b))
    holes = FirstFit()
    dead = 0
    for buffer in births:
        while dead < len(deaths) and lives.death[deaths[dead]] < lives.birth[buffer]:
            gone = deaths[dead]
            holes.give(int(offsets[gone]), int(lives.bytes[gone]))
            dead += 1
        offset = holes.take(int(lives.bytes[buffer]))
        assert offset is not None, "a stretch without a limit grows"
        offsets[buffer] = offset
    return SlabLayout(offsets, holes.top)


def in_memory(program: Program, columns: Columns, *layouts: SlabLayout) -> Columns:
    """Return the columns with every operand that lies in one of ``layouts`` as a byte range of one buffer, that one.

    Edges derived from them order buffers that take turns in the same bytes.
    """
    row_bytes = np.array([f.row_bytes for f in program.all_families], dtype=np.int64)
    scale = row_bytes[columns.buffer_family[columns.operand_buffer]]
    buffer, first, end = columns.operand_buffer, columns.operand_first, columns.operand_end
    sizes, dynamic = columns.buffer_bytes, columns.buffer_dynamic
    for layout in layouts:
        if not layout.bytes:
            continue
        base = layout.offsets[columns.operand_buffer]
        inside = base >= 0
        buffer = np.where(inside, len(sizes), buffer)
        first = np.where(inside, base + scale * columns.operand_first, first)
        end = np.where(inside, base + scale * columns.operand_end, end)
        sizes, dynamic = np.append(sizes, layout.bytes), np.append(dynamic, False)
    return replace(
        columns,
        operand_buffer=buffer,
        operand_first=first,
        operand_end=end,
        buffer_bytes=sizes,
        buffer_dynamic=dynamic,
    )


class HostSlab:
    """The memory itself, and the host buffers as views of it."""

    def __init__(self, program: Program, columns: Columns, layout: SlabLayout, *, pinned: bool) -> None:
        self.bytes = layout.bytes
        self.registered = False
        to_pin = pinned and layout.bytes > 0
        self.memory = mapping(layout.bytes) if to_pin else torch.zeros(layout.bytes, dtype=torch.uint8)
        self.views: dict[int, Tensor] = {}
        families = program.all_families
        for buffer in np.flatnonzero(layout.offsets >= 0).tolist():
            family = families[int(columns.buffer_family[buffer])]
            offset = int(layout.offsets[buffer])
            flat = self.memory[offset : offset + family.bytes].view(TORCH_DTYPES[family.dtype])
            self.views[buffer] = flat if family.features == 1 else flat.view(family.tokens, family.features)
        if to_pin:
            pin(self.memory)
            self.registered = True

    def close(self) -> None:
        """Give the registration back."""
        if self.registered:
            unpin(self.memory)
            self.registered = False
