"""Expandable segments: one growing range a stream and pool, page by page, with their arithmetic."""

from __future__ import annotations

import pytest

from memo_sim.contract.units import MIB
from memo_sim.memory.device_allocator import DeviceAllocator, OutOfDeviceMemory
from memo_sim.memory.device_config import AllocatorConfig
from tests.memory.test_device_allocator import calls


def test_an_expandable_segment_grows_by_what_is_missing() -> None:
    device = DeviceAllocator(AllocatorConfig(expandable_segments=True), 400 * MIB)
    a = device.malloc(50 * MIB)  # 3 pages of 20 MiB: 10 MiB left, split off (from 512 bytes on)
    assert (a.size, calls(device)) == (50 * MIB, [("map", 60 * MIB)])
    b = device.malloc(30 * MIB)  # 10 are free at the end, 20 are missing: one page
    assert (b.address, calls(device)[1:]) == (50 * MIB, [("map", 20 * MIB)])
    assert device.reserved_bytes == device.allocated_bytes == 80 * MIB
    device.free(a)
    c = device.malloc(60 * MIB)  # 50 free in front do not do: grows by 60 behind b
    assert (c.address, device.reserved_bytes) == (80 * MIB, 140 * MIB)
    device.malloc(MIB)  # the small pool's own segment, in pages of 2 MiB
    assert calls(device)[3:] == [("map", 2 * MIB)]


def test_a_block_that_can_grow_counts_with_what_it_can_grow_to() -> None:
    device = DeviceAllocator(AllocatorConfig(expandable_segments=True), 400 * MIB)
    a, b, c = device.malloc(30 * MIB), device.malloc(30 * MIB), device.malloc(20 * MIB)  # 80: all four pages used
    device.free(c)  # 20 free at the end, which can grow to all that is left: the worst fit for 20
    device.free(a)  # 30 free at the start
    assert device.malloc(20 * MIB).address == 0
    assert device.malloc(20 * MIB).address == 60 * MIB
    device.free(b)


def test_what_could_not_grow_keeps_what_it_has() -> None:
    device = DeviceAllocator(AllocatorConfig(expandable_segments=True), 100 * MIB)
    a = device.malloc(70 * MIB)  # 80 mapped, 10 free
    with pytest.raises(OutOfDeviceMemory):
        device.malloc(40 * MIB)  # 30 more would be two pages: 120
    assert (device.reserved_bytes, device.num_ooms) == (80 * MIB, 1)
    assert device.malloc(10 * MIB).address == 70 * MIB
    device.free(a)


def test_a_reorganisation_unmaps_the_whole_pages_that_are_free() -> None:
    device = DeviceAllocator(AllocatorConfig(expandable_segments=True), 160 * MIB)
    a, b, c = device.malloc(50 * MIB), device.malloc(30 * MIB), device.malloc(20 * MIB)
    assert [x.address // MIB for x in (a, b, c)] == [0, 50, 80]
    device.free(a)
    # 100 reserved; 80 more do not fit in 160. Of the 50 free ones two pages [0, 40) go, 10 stay: 60 + 80 fits.
    d = device.malloc(80 * MIB)
    assert d.address == 100 * MIB
    assert calls(device)[3:] == [("synchronize", 0), ("unmap", 40 * MIB), ("map", 80 * MIB)]
    assert (device.num_alloc_retries, device.reserved_bytes) == (1, 140 * MIB)
    # The hole is found first: 20 MiB at 0, one page mapped again, though 10 MiB at 40 are free.
    assert device.malloc(20 * MIB).address == 0
    assert device.reserved_bytes == 160 * MIB


def test_an_expandable_segment_finds_pages_in_a_second_pool_of_another_page_size() -> None:
    device = DeviceAllocator(AllocatorConfig(expandable_segments=True), 100 * MIB)
    device.malloc(MIB)
    first = device.malloc(30 * MIB, stream=1)
    second = device.malloc(30 * MIB, stream=2)
    for block in (first, second):
        device.free(block)
    device.empty_cache()
    # Both segments are whole pages of 20 MiB from their own start, so all 40 + 40 go.
    assert calls(device)[3:] == [("synchronize", 0), ("unmap", 40 * MIB), ("unmap", 40 * MIB)]
