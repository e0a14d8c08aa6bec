"""The caching allocator and streams: whose blocks are whose, and what waits for events (``record_stream``)."""

from __future__ import annotations

from memo_sim.contract.units import MIB
from memo_sim.memory.device_allocator import DeviceAllocator


def test_streams_do_not_share_free_blocks() -> None:
    device = DeviceAllocator()
    device.free(device.malloc(12 * MIB, stream=1))
    device.malloc(12 * MIB, stream=2)
    assert device.num_device_alloc == 2
    assert device.malloc(12 * MIB, stream=1).address == 0


def test_a_block_that_another_stream_uses_waits_for_its_event() -> None:
    device = DeviceAllocator()
    block = device.malloc(12 * MIB)
    device.record_stream(block, 7)
    device.free(block)
    assert (device.allocated_bytes, device.active_bytes) == (0, 12 * MIB)
    device.malloc(12 * MIB)  # the event has not passed: a new segment
    assert device.num_device_alloc == 2
    device.pass_events(7)
    assert device.malloc(12 * MIB).address == 0
    assert device.num_device_alloc == 2


def test_of_the_blocks_that_wait_for_a_stream_the_first_come_back_first() -> None:
    device = DeviceAllocator()
    blocks = [device.malloc(size * MIB) for size in (12, 14, 16)]
    for block in blocks:
        device.record_stream(block, 7)
        device.free(block)
    device.pass_events(7, 2)
    assert [device.malloc(size * MIB).address // MIB for size in (12, 14)] == [0, 12]
    assert device.malloc(16 * MIB).address == 42 * MIB  # the third is still awaited
    device.pass_events(7, 5)  # more than there are
    assert device.malloc(16 * MIB).address == 26 * MIB


def test_an_event_that_comes_later_than_what_passed_is_still_awaited() -> None:
    device = DeviceAllocator()
    first, second = device.malloc(12 * MIB), device.malloc(14 * MIB)
    for block in (first, second):
        device.record_stream(block, 7)
    device.free(first)
    device.pass_events(7)
    device.free(second)
    assert device.malloc(12 * MIB).address == 0
    assert device.malloc(14 * MIB).address == 26 * MIB  # behind 12 + 14
    assert device.active_bytes == 40 * MIB  # 12 + 14 handed out, 14 awaited


def test_a_block_used_by_its_own_stream_waits_for_nothing_and_by_two_for_both() -> None:
    device = DeviceAllocator()
    own = device.malloc(12 * MIB, stream=3)
    device.record_stream(own, 3)
    device.free(own)
    both = device.malloc(12 * MIB, stream=3)
    assert both.address == own.address == 0
    device.record_stream(both, 1)
    device.record_stream(both, 2)
    device.free(both)
    device.pass_events(1)
    assert device.malloc(12 * MIB, stream=3).address == 12 * MIB
    device.pass_events(2)
    assert device.malloc(12 * MIB, stream=3).address == 0


def test_a_reorganisation_waits_for_all_events() -> None:
    device = DeviceAllocator(capacity_bytes=20 * MIB)
    block = device.malloc(12 * MIB)
    device.record_stream(block, 7)
    device.free(block)
    assert device.malloc(16 * MIB).size == 16 * MIB
    called = [(call.kind, call.bytes) for call in device.calls]
    assert called[1:] == [("synchronize", 0), ("free", 12 * MIB), ("malloc", 16 * MIB)]
