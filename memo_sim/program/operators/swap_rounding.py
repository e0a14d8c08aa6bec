"""Rounding of swapped rows to FP8 before they leave, and back (``layout/swap_format.py``), block by block.

The kernels are on the copy lanes: a kernel on the compute lane that waited for a copy would delay all compute behind
it. Each lane has a buffer of its own that exists all step. With a buffer for each layer, rounded rows would lie at
addresses that compute uses before and after, and copies would wait for compute.

    d2h   [round block 0][copy][round block 1][copy] ...      h2d   [copy][widen block 0][copy][widen block 1] ...
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from memo_sim.contract.requests import ARENA_ALIGNMENT_BYTES
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Access, Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Families, Family, Lane
from memo_sim.program.ir.kinds import FamilyKind
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.layout.skeletal import Skeletal
from memo_sim.program.layout.swap_format import PACKED, blocks, packed_features, rows_at_once

REGION, WIDE = "staging", "staging.wide"
"""The region on each copy lane, and the part of it that holds values in fp32."""
WIDE_BYTES = DTYPE_BYTES["fp32"]


def staging(swapped: Iterable[tuple[int, int]]) -> list[Family]:
    """Return the region and its parts for what is swapped: (rows, features) of each tensor.

    Blocks of rows with equally many features share a part, and all parts but the fp32 one begin at the same byte.
    """
    longest, wide = dict[int, int](), 0
    for rows, features in swapped:
        block = blocks(rows, features)[0][1]
        longest[features] = max(longest.get(features, 0), block)
        wide = max(wide, rows_at_once(block, features) * features)
    if not longest:
        return []
    made = partial(Family, buffer_class=BufferClass.EXCHANGE, lifetime="step", kind=FamilyKind.STAGING)
    part = partial(made, count=0, region=REGION)
    parts = [
        part(f"{REGION}.{features}", dtype=PACKED, tokens=rows, features=packed_features(features))
        for features, rows in sorted(longest.items())
    ]
    end = -(-max(each.bytes for each in parts) // ARENA_ALIGNMENT_BYTES) * ARENA_ALIGNMENT_BYTES
    parts.append(part(WIDE, dtype="fp32", tokens=wide, features=1, offset=end))
    return [made(REGION, dtype="uint8", tokens=end + parts[-1].bytes, features=1, count=2), *parts]


class Rounding:
    """Writes the rounding of one tensor into an offload's template, and the way back into a prefetch's."""

    def __init__(self, builder: TemplateBuilder, families: Families, tensor: Skeletal) -> None:
        self._builder, self._tensor = builder, tensor
        self._packed = builder.bind(families[f"{REGION}.{tensor.features}"])
        self._wide = builder.bind(families[WIDE])

    def packed(self, rows: int) -> Rows:
        """Return the lane's rows of the region for a block."""
        return Rows(self._packed, 0, rows)

    def narrow(self, label: str, source: Rows) -> None:
        """Emit the rounding of a block: its largest values, its quotients in fp32, and these in FP8."""
        values, packed = source.tokens * self._tensor.features, self.packed(source.tokens)
        read = values * (2 * DTYPE_BYTES[self._tensor.dtype] + WIDE_BYTES)
        written = values * WIDE_BYTES + packed.tokens * self._builder.row_bytes(packed.slot)
        work = Rowwise("swap.round", source.tokens, read, written)
        operands = {"x": reads(source), "out": writes(packed), "workspace": self._scratch(source.tokens)}
        self._builder.emit(f"{label}.round", "swap.round", Lane.D2H, work, **operands)

    def widen(self, label: str, target: Rows) -> None:
        """Emit the way back: values in fp32, their products with the scales, and these in the tensor's dtype."""
        values, packed = target.tokens * self._tensor.features, self.packed(target.tokens)
        read = values * 2 * WIDE_BYTES + packed.tokens * self._builder.row_bytes(packed.slot)
        written = values * (2 * WIDE_BYTES + DTYPE_BYTES[self._tensor.dtype])
        work = Rowwise("swap.widen", target.tokens, read, written)
        operands = {"x": reads(packed), "out": writes(target), "workspace": self._scratch(target.tokens)}
        self._builder.emit(f"{label}.widen", "swap.widen", Lane.H2D, work, **operands)

    def _scratch(self, rows: int) -> Access:
        features = self._tensor.features
        return writes(Rows(self._wide, 0, rows_at_once(rows, features) * features))
