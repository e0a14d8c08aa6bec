"""Pinned blocks are powers of two, reused by size, never split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memo_sim.contract.errors import MemoError
from memo_sim.contract.units import GIB
from memo_sim.memory.pinned_allocator import PinnedAllocator, PinnedBlock, pinned_bytes
from tests.refusals import refused


@pytest.mark.parametrize(
    ("size", "rounded"), [(0, 0), (1, 1), (2, 2), (3, 4), (GIB, GIB), (GIB + 1, 2 * GIB), (3 * GIB, 4 * GIB)]
)
def test_sizes_are_powers_of_two(size: int, rounded: int) -> None:
    assert pinned_bytes(size) == rounded


def test_a_block_serves_its_own_power_of_two_only() -> None:
    host = PinnedAllocator()
    four = host.malloc(3 * GIB)
    host.free(four)
    assert host.malloc(2 * GIB + 1) is four  # 2 GiB + 1 needs 4
    host.free(four)
    host.malloc(2 * GIB)  # needs 2: the 4 is neither split nor lent
    host.malloc(GIB)
    assert (host.num_host_alloc, host.reserved_bytes, host.allocated_bytes) == (3, 7 * GIB, 3 * GIB)
    assert host.peak_reserved_bytes == 7 * GIB


def test_the_block_freed_last_is_reused_first() -> None:
    host = PinnedAllocator()
    first, second = host.malloc(8), host.malloc(8)
    host.free(second)
    host.free(first)
    assert host.malloc(8) is first


def test_a_block_that_a_copy_uses_waits_for_it() -> None:
    host = PinnedAllocator()
    block = host.malloc(8)
    host.record_event(block)
    host.free(block)
    other = host.malloc(8)
    assert other is not block
    host.pass_events()
    assert host.malloc(8) is block
    assert host.num_host_alloc == 2


def test_above_the_cached_size_blocks_are_exact_and_go_back_at_once() -> None:
    host = PinnedAllocator(max_cached_bytes=3 * GIB)
    exact = host.malloc(5 * GIB)
    assert exact.size == 5 * GIB
    host.free(exact)
    assert (host.reserved_bytes, host.num_host_alloc, host.num_host_free) == (0, 1, 1)
    awaited = host.malloc(3 * GIB + 1)
    host.record_event(awaited)
    host.free(awaited)
    assert host.reserved_bytes == 3 * GIB + 1
    host.pass_events()
    assert (host.reserved_bytes, host.num_host_free) == (0, 2)


def test_a_size_that_is_rounded_beyond_the_cached_size_is_not_kept() -> None:
    """3 GiB may be cached and becomes a block of 4, which may not: PyTorch asks for the block's size at its free."""
    host = PinnedAllocator(max_cached_bytes=3 * GIB)
    rounded = host.malloc(3 * GIB)
    assert rounded.size == 4 * GIB
    host.free(rounded)
    assert (host.reserved_bytes, host.num_host_free) == (0, 1)
    kept = host.malloc(2 * GIB)
    host.free(kept)
    assert host.malloc(2 * GIB) is kept


def test_a_block_is_freed_once() -> None:
    host = PinnedAllocator()
    block = host.malloc(8)
    host.free(block)
    with refused(MemoError, got="8 bytes"):
        host.free(block)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=80))
def test_the_books_are_kept_and_everything_goes_back(actions: list[tuple[bool, int]]) -> None:
    host = PinnedAllocator()
    held: list[PinnedBlock] = []
    for take, size in actions:
        if take or not held:
            block = host.malloc(size)
            assert block not in held
            assert size <= block.size < 2 * size
            held.append(block)
        else:
            host.free(held.pop(size % len(held)))
        assert host.allocated_bytes == sum(block.size for block in held) <= host.reserved_bytes
    for block in held:
        host.free(block)
    host.empty_cache()
    assert host.allocated_bytes == host.reserved_bytes == 0
    assert host.num_host_alloc == host.num_host_free
