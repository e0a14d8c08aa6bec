"""Pinned blocks are powers of two."""

import pytest

from memo_sim.contract.units import GIB
from memo_sim.memory.pinned_allocator import pinned_bytes


@pytest.mark.parametrize(
    ("size", "rounded"), [(0, 0), (1, 1), (2, 2), (3, 4), (GIB, GIB), (GIB + 1, 2 * GIB), (3 * GIB, 4 * GIB)]
)
def test_sizes_are_powers_of_two(size: int, rounded: int) -> None:
    assert pinned_bytes(size) == rounded
