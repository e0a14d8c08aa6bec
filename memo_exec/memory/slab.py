"""The host slab: one block of host memory that holds all host buffers, placed by first fit in program order.

Buffers that are not alive at the same time may share bytes, so the slab is smaller than their sum. On CUDA the slab is
pinned once, at its exact size (``pinned.py``).

      first step  [ l0 ][ l1 ][ l2 ]        births in forward order
      later       [ l0 ][    m1/l0    ]     the next birth that fits fills a hole
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_exec.memory.pinned import PIECE_BYTES, mapping, pin, unpin
from memo_sim.program.analysis.columns import Columns, Ints
from memo_sim.program.analysis.liveness import Liveness
from memo_sim.program.arena.first_fit import FirstFit
from memo_sim.program.ir.program import Program


@dataclass(frozen=True)
class SlabLayout:
    """Offset in bytes of every buffer in one block of memory (-1 for buffers elsewhere), and the block's size.

    It describes the slab of host buffers, and also the planned arena of device buffers.
    """

    offsets: Ints
    bytes: int


def lay_out(program: Program, columns: Columns, lives: Liveness) -> SlabLayout:
    """Return the offset of each host buffer in the slab."""
    used = ~lives.on_device & (lives.death >= lives.birth)
    chosen = np.flatnonzero(used)
    offsets = np.full(len(lives.bytes), -1, dtype=np.int64)
    births = sorted(chosen.tolist(), key=lambda b: (int(lives.birth[b]), b))
    deaths = sorted(chosen.tolist(), key=lambda b: (int(lives.death[b]), b))
    holes = FirstFit(PIECE_BYTES)
    dead = 0
    for buffer in births:
        while dead < len(deaths) and lives.death[deaths[dead]] < lives.birth[buffer]:
            gone = deaths[dead]
            holes.give(int(offsets[gone]), int(lives.bytes[gone]))
            dead += 1
        offset = holes.take(int(lives.bytes[buffer]))
        assert offset is not None, "first fit without a size limit always finds room"
        offsets[buffer] = offset
    return SlabLayout(offsets, holes.top)


def in_memory(program: Program, columns: Columns, *layouts: SlabLayout) -> Columns:
    """Return the columns with each layout as one buffer: operands in it become byte ranges of that buffer.

    Edges derived from these columns also order buffers that use the same bytes at different times.
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
    """The slab's memory, and the host buffers as views of it."""

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
        """Unpin the memory once the device has finished its copies, if it is pinned."""
        if self.registered:
            unpin(self.memory)
            self.registered = False
