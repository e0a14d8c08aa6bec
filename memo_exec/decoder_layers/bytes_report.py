"""Bytes that each layer swaps, recomputes and keeps: counted in a step, or predicted for a number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from memo_sim.contract.units import format_bytes


@dataclass(kw_only=True)
class LayerBytes:
    """Saved bytes of one layer in one forward pass; tensors that share bytes count once."""

    layer: int
    swapped_bytes: int = 0
    """Bytes copied to the host."""
    restored_bytes: int = 0
    """Bytes copied back; 0 before backward."""
    recomputed_bytes: int = 0
    """Bytes that are not kept and made again in backward."""
    kept_bytes: int = 0
    """Bytes that stay on the device, without parameters and what layers share (masks, rotary tables)."""


@dataclass(frozen=True)
class TokenwiseReport:
    """The bytes of all layers, in order."""

    layers: tuple[LayerBytes, ...]

    @property
    def swapped_bytes(self) -> int:
        """Bytes copied to the host, over all layers."""
        return self._sum(lambda each: each.swapped_bytes)

    @property
    def restored_bytes(self) -> int:
        """Bytes copied back, over all layers."""
        return self._sum(lambda each: each.restored_bytes)

    @property
    def recomputed_bytes(self) -> int:
        """Bytes made again in backward, over all layers."""
        return self._sum(lambda each: each.recomputed_bytes)

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay on the device, over all layers."""
        return self._sum(lambda each: each.kept_bytes)

    def _sum(self, value: Callable[[LayerBytes], int]) -> int:
        return sum(value(each) for each in self.layers)

    def __str__(self) -> str:
        """Return a table, with alike neighbours in one row."""
        names = [field.name.removesuffix("_bytes") for field in fields(LayerBytes)]
        rows = [names]
        for first, last, values in self._alike():
            name = str(first) if first == last else f"{first}-{last}"
            rows.append([name, *(format_bytes(value) for value in values)])
        rows.append(["all", *(format_bytes(sum(column)) for column in zip(*map(_values, self.layers), strict=True))])
        widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)

    def _alike(self) -> list[tuple[int, int, tuple[int, ...]]]:
        found: list[tuple[int, int, tuple[int, ...]]] = []
        for each in self.layers:
            values = _values(each)
            if found and found[-1][2] == values:
                found[-1] = (found[-1][0], each.layer, values)
            else:
                found.append((each.layer, each.layer, values))
        return found


def _values(each: LayerBytes) -> tuple[int, ...]:
    return each.swapped_bytes, each.restored_bytes, each.recomputed_bytes, each.kept_bytes
