"""The caching allocator's documented rules, one by one, with numbers; then invariants of any sequence of requests."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memo_sim.contract.errors import MemoError
from memo_sim.contract.units import MIB
from memo_sim.memory.device_allocator import Block, DeviceAllocator, DeviceCall, OutOfDeviceMemory
from memo_sim.memory.device_config import AllocatorConfig
from tests.refusals import refused

LARGE = 20 * MIB


def calls(device: DeviceAllocator) -> list[tuple[str, int]]:
    return [(call.kind, call.bytes) for call in device.calls]


@pytest.mark.parametrize(
    ("request_bytes", "block_bytes"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_a_request_is_rounded_to_512_bytes(request_bytes: int, block_bytes: int) -> None:
    assert DeviceAllocator().malloc(request_bytes).size == block_bytes


@pytest.mark.parametrize(
    ("request_bytes", "block_bytes"),
    [
        # PyTorch's own example: 1200 with 4 divisions. Between 1024 and 2048 the steps are 256: 1024 1280 1536 1792.
        # But 1200 is below 512 x 4 = 2048, where plain rounding holds: 3 x 512.
        (1200, 1536),
        # Above: between 4096 and 8192 the steps are 1024.
        (4097, 5120),
        (5120, 5120),
        (8191, 8192),
        (1100 * MIB, 1280 * MIB),
    ],
)
def test_sizes_are_rounded_up_to_divisions_of_powers_of_two(request_bytes: int, block_bytes: int) -> None:
    assert AllocatorConfig(roundup_power2_divisions=4).block_bytes(request_bytes) == block_bytes


@pytest.mark.parametrize(
    ("request_bytes", "segment_bytes"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, LARGE),
        (10 * MIB - 512, LARGE),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_a_segment_is_2_or_20_mib_or_the_request_in_units_of_2_mib(request_bytes: int, segment_bytes: int) -> None:
    device = DeviceAllocator()
    device.malloc(request_bytes)
    assert calls(device) == [("malloc", segment_bytes)]
    assert device.reserved_bytes == segment_bytes


def test_small_and_large_blocks_never_share_a_segment() -> None:
    device = DeviceAllocator()
    large = device.malloc(2 * MIB)  # a segment of 20 MiB, 18 of them free
    device.malloc(1024)  # not from there
    assert calls(device) == [("malloc", LARGE), ("malloc", 2 * MIB)]
    device.free(large)
    device.malloc(MIB)  # the small segment has 2 MiB - 1 KiB left
    assert device.num_device_alloc == 2


def test_large_blocks_split_above_1_mib_and_small_blocks_from_512_bytes_on() -> None:
    device = DeviceAllocator()
    whole = device.malloc(12 * MIB)
    device.free(whole)
    # 12 - 11 = 1 MiB is not more than 1 MiB: the block is handed out whole.
    kept = device.malloc(11 * MIB)
    assert (kept.size, device.allocated_bytes) == (12 * MIB, 12 * MIB)
    device.free(kept)
    # 12 MiB - (11 MiB - 512) = 1 MiB + 512: split.
    assert device.malloc(11 * MIB - 512).size == 11 * MIB - 512
    # A small segment is 2 MiB: two of 1 MiB - 512 leave 1024, of which 512 can be handed out, and 512 again.
    small = DeviceAllocator()
    sizes = [small.malloc(size).size for size in (MIB - 512, MIB - 512, 512, 512)]
    assert sizes == [MIB - 512, MIB - 512, 512, 512]
    assert small.reserved_bytes == small.allocated_bytes == 2 * MIB


def test_the_smallest_fitting_block_at_the_lowest_address_is_used() -> None:
    device = DeviceAllocator()
    blocks = [device.malloc(size * MIB) for size in (30, 12, 20, 12)]  # four segments, one behind the other
    for block in blocks:
        device.free(block)
    # 12 MiB is enough for 12 MiB, and there are two: the one at 30 MiB, not the one at 62 MiB.
    assert device.malloc(12 * MIB).address == 30 * MIB
    assert device.malloc(12 * MIB).address == 62 * MIB
    # Then 20 MiB at 42 is the best fit.
    assert device.malloc(12 * MIB).address == 42 * MIB
    assert device.num_device_alloc == 4


def test_free_neighbours_merge_on_both_sides() -> None:
    device = DeviceAllocator()
    a, b, c = (device.malloc(5 * MIB) for _ in range(3))  # one segment of 20: | a | b | c | 5 free |
    assert [block.address // MIB for block in (a, b, c)] == [0, 5, 10]
    device.free(a)
    device.free(c)  # | 5 free | b | 10 free |
    assert device.malloc(10 * MIB).address == 10 * MIB
    d = device.malloc(5 * MIB)
    assert d.address == 0
    device.free(d)
    device.free(b)  # | 10 free | 10 in use |
    assert device.malloc(10 * MIB).address == 0
    assert device.num_device_alloc == 1


def test_blocks_of_max_split_size_are_not_split_and_serve_only_requests_near_their_size() -> None:
    device = DeviceAllocator(AllocatorConfig(max_split_size_mb=100))
    device.free(device.malloc(200 * MIB))
    # A request below 100 MiB does not get a block of 100 MiB or more.
    small = device.malloc(50 * MIB)
    assert small.size == 50 * MIB
    # One of 170: 200 is not below 170 + 20, refused. One of 190: 200 < 210, and it is not split.
    assert device.malloc(170 * MIB).size == 170 * MIB
    assert device.malloc(190 * MIB).size == 200 * MIB
    assert calls(device) == [("malloc", 200 * MIB), ("malloc", 50 * MIB), ("malloc", 170 * MIB)]


def test_max_non_split_rounding_limits_how_much_larger_a_block_may_be() -> None:
    device = DeviceAllocator(AllocatorConfig(max_split_size_mb=100, max_non_split_rounding_mb=31))
    device.free(device.malloc(200 * MIB))
    assert device.malloc(170 * MIB).size == 200 * MIB  # 200 < 170 + 31


def test_oversize_segments_are_released_first() -> None:
    config = AllocatorConfig(max_split_size_mb=100)
    device = DeviceAllocator(config, 400 * MIB)
    for block in [device.malloc(size * MIB) for size in (30, 120, 240)]:
        device.free(block)
    # 390 reserved. 150 is refused the 240 (not below 170) and does not fit beside 390: the 240 goes, nothing else.
    device.malloc(150 * MIB)
    assert calls(device)[3:] == [("free", 240 * MIB), ("malloc", 150 * MIB)]
    assert (device.num_alloc_retries, device.reserved_bytes) == (0, 300 * MIB)


def test_oversize_segments_are_released_largest_first_until_they_suffice() -> None:
    device = DeviceAllocator(AllocatorConfig(max_split_size_mb=100), 560 * MIB)
    for block in [device.malloc(size * MIB) for size in (110, 120, 130, 140)]:
        device.free(block)
    # 500 reserved; 250 fits no block: 140 + 130 are enough.
    device.malloc(250 * MIB)
    assert calls(device)[4:] == [("free", 140 * MIB), ("free", 130 * MIB), ("malloc", 250 * MIB)]
    assert device.num_alloc_retries == 0


def test_an_allocation_retry_releases_segments_that_are_not_split() -> None:
    device = DeviceAllocator(capacity_bytes=100 * MIB)
    whole = device.malloc(40 * MIB)
    part = device.malloc(30 * MIB)
    device.free(whole)
    device.malloc(10 * MIB)  # from the 40: the rest of 30 is split off, so the segment stays
    device.free(part)
    # 70 reserved. 50 fits in no block and 120 > 100. The segment of 30 goes (the other 30 is part of one): 40 + 50.
    device.malloc(50 * MIB)
    assert calls(device)[2:] == [("synchronize", 0), ("free", 30 * MIB), ("malloc", 50 * MIB)]
    assert (device.num_alloc_retries, device.num_device_alloc, device.num_device_free) == (1, 3, 1)
    assert (device.reserved_bytes, device.allocated_bytes) == (90 * MIB, 60 * MIB)


def test_out_of_memory_follows_an_allocation_retry_and_names_what_is_held() -> None:
    device = DeviceAllocator(capacity_bytes=100 * MIB)
    device.free(device.malloc(80 * MIB))
    device.malloc(20 * MIB)  # 60 free behind it
    with refused(OutOfDeviceMemory, got=("70.00 MiB", "20.00 MiB", "60.00 MiB"), wanted="100.00 MiB") as caught:
        device.malloc(70 * MIB)
    assert caught.value.exit_code == 4
    assert (device.num_ooms, device.num_alloc_retries, device.reserved_bytes) == (1, 1, 80 * MIB)
    assert device.malloc(60 * MIB).address == 20 * MIB  # what is free still serves


def test_garbage_collection_releases_segments_of_average_age_or_more() -> None:
    # 0.5 x 100 = 50 MiB is the threshold.
    device = DeviceAllocator(AllocatorConfig(garbage_collection_threshold=0.5), 100 * MIB)
    old, young, busy = (device.malloc(size * MIB) for size in (12, 14, 30))  # searches 1, 2, 3
    device.free(old)  # cached at 3
    device.malloc(1024)  # search 4, of the small pool: does not age the large one. 56 > 50, but old is not that old:
    # at search 3 it is 0 of age, the average is 0, 0 >= 0: collected at once.
    assert calls(device)[3:] == [("free", 12 * MIB), ("malloc", 2 * MIB)]
    device.free(young)  # cached at 3
    fresh = device.malloc(16 * MIB)  # search 4: 46 reserved, not above 50: nothing is collected. 62 reserved
    assert device.num_device_free == 1
    device.free(fresh)  # cached at 4
    # Search 5 for 18: 62 > 50, wanted 12 back. Ages 2 and 1, average 1.5: the 14 goes, and 14 is enough.
    device.malloc(18 * MIB)
    assert calls(device)[6:] == [("free", 14 * MIB), ("malloc", 18 * MIB)]
    assert device.num_alloc_retries == 0
    device.free(busy)


def test_garbage_collection_keeps_segments_that_are_partly_in_use() -> None:
    device = DeviceAllocator(AllocatorConfig(garbage_collection_threshold=0.5), 100 * MIB)
    device.free(device.malloc(40 * MIB))
    device.malloc(10 * MIB)  # the 40 in two: 30 of it free, but no segment of its own
    # 40 reserved is below 50: nothing is collected. 76 then is above, and there is nothing that could go.
    device.malloc(36 * MIB)
    device.malloc(24 * MIB)  # from the 30, 6 are left
    device.malloc(8 * MIB)
    assert calls(device) == [("malloc", 40 * MIB), ("malloc", 36 * MIB), ("malloc", LARGE)]


def test_a_split_off_block_is_as_young_as_a_freed_block() -> None:
    # 0.5 x 160 = 80 MiB is the threshold.
    device = DeviceAllocator(AllocatorConfig(garbage_collection_threshold=0.5), 160 * MIB)
    first, second = device.malloc(30 * MIB), device.malloc(40 * MIB)  # searches 1 and 2
    device.free(first)  # cached at 2
    third = device.malloc(12 * MIB)  # search 3: from the 30, the other 18 cached at 3
    device.free(third)  # joined to the 18: cached at 3, whole again
    device.free(second)  # cached at 3
    device.malloc(50 * MIB)  # search 4: 70 reserved, below 80. Then 120.
    # Search 5 for 60: 120 > 80. Ages 2 and 2: both are of average age.
    device.malloc(60 * MIB)
    assert calls(device)[3:] == [("free", 30 * MIB), ("free", 40 * MIB), ("malloc", 60 * MIB)]


def test_an_allocation_retry_follows_when_oversize_segments_are_not_enough() -> None:
    device = DeviceAllocator(AllocatorConfig(max_split_size_mb=100), 300 * MIB)
    for block in [device.malloc(size * MIB) for size in (110, 30, 60)]:
        device.free(block)
    # 200 reserved; 250 more need 150 back. The 110 goes and is not enough; then all: the 60 and the 30, smallest first.
    device.malloc(250 * MIB)
    assert calls(device)[3:] == [
        ("free", 110 * MIB),
        ("synchronize", 0),
        ("free", 30 * MIB),
        ("free", 60 * MIB),
        ("malloc", 250 * MIB),
    ]
    assert device.num_alloc_retries == 1


def test_oversize_segments_of_another_stream_are_not_released_first() -> None:
    device = DeviceAllocator(AllocatorConfig(max_split_size_mb=100), 300 * MIB)
    device.free(device.malloc(150 * MIB, stream=1))
    device.free(device.malloc(120 * MIB, stream=2))
    # 270 reserved. 140 on stream 2: its own 120 goes first. That is less than 140, so the device is not asked, though
    # 150 + 140 would fit: everything goes.
    device.malloc(140 * MIB, stream=2)
    assert calls(device)[2:] == [
        ("free", 120 * MIB), ("synchronize", 0), ("free", 150 * MIB), ("malloc", 140 * MIB)
    ]  # fmt: skip


def test_segments_for_blocks_of_1_to_10_mib_have_the_configured_size() -> None:
    device = DeviceAllocator(AllocatorConfig(large_segment_size_mb=64))
    device.malloc(2 * MIB)
    device.malloc(10 * MIB)  # from the 64
    device.malloc(60 * MIB)  # a segment of its own
    assert calls(device) == [("malloc", 64 * MIB), ("malloc", 60 * MIB)]


def test_garbage_collection_needs_a_capacity() -> None:
    device = DeviceAllocator(AllocatorConfig(garbage_collection_threshold=0.1))
    device.free(device.malloc(30 * MIB))
    device.malloc(40 * MIB)
    assert device.num_device_free == 0


def test_a_block_is_freed_once() -> None:
    device = DeviceAllocator()
    block = device.malloc(1)
    device.free(block)
    with refused(MemoError, got="address 0"):
        device.free(block)


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


def test_blocks_that_wait_for_a_stream_come_back_in_order() -> None:
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


def test_a_later_event_is_still_awaited() -> None:
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


def test_a_block_waits_for_every_other_stream_that_uses_it() -> None:
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


def test_an_allocation_retry_waits_for_all_events() -> None:
    device = DeviceAllocator(capacity_bytes=20 * MIB)
    block = device.malloc(12 * MIB)
    device.record_stream(block, 7)
    device.free(block)
    assert device.malloc(16 * MIB).size == 16 * MIB
    assert calls(device)[1:] == [("synchronize", 0), ("free", 12 * MIB), ("malloc", 16 * MIB)]


def test_an_expandable_segment_grows_by_the_missing_pages() -> None:
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


def test_the_best_fit_counts_the_size_that_a_block_can_grow_to() -> None:
    device = DeviceAllocator(AllocatorConfig(expandable_segments=True), 400 * MIB)
    a, b, c = device.malloc(30 * MIB), device.malloc(30 * MIB), device.malloc(20 * MIB)  # 80: all four pages used
    device.free(c)  # 20 free at the end, which can grow to all that is left: the worst fit for 20
    device.free(a)  # 30 free at the start
    assert device.malloc(20 * MIB).address == 0
    assert device.malloc(20 * MIB).address == 60 * MIB
    device.free(b)


def test_a_segment_that_cannot_grow_keeps_its_pages() -> None:
    device = DeviceAllocator(AllocatorConfig(expandable_segments=True), 100 * MIB)
    a = device.malloc(70 * MIB)  # 80 mapped, 10 free
    with pytest.raises(OutOfDeviceMemory):
        device.malloc(40 * MIB)  # 30 more would be two pages: 120
    assert (device.reserved_bytes, device.num_ooms) == (80 * MIB, 1)
    assert device.malloc(10 * MIB).address == 70 * MIB
    device.free(a)


def test_an_allocation_retry_unmaps_the_whole_pages_that_are_free() -> None:
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


CONFIGS = [
    AllocatorConfig(),
    AllocatorConfig(roundup_power2_divisions=4),
    AllocatorConfig(max_split_size_mb=21),
    AllocatorConfig(garbage_collection_threshold=0.4),
    AllocatorConfig(expandable_segments=True),
]
ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.one_of(st.integers(1, 3000), st.integers(MIB, 60 * MIB)),
        st.integers(0, 2),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(config=st.sampled_from(CONFIGS), actions=ACTIONS, capacity=st.sampled_from([None, 300 * MIB, 150 * MIB]))
def test_any_sequence_keeps_the_counters_consistent(
    config: AllocatorConfig, actions: list[tuple[int, int, int]], capacity: int | None
) -> None:
    device = DeviceAllocator(config, capacity)
    held: list[Block] = []
    awaited: list[Block] = []
    for action, size, stream in actions:
        if action < 6:
            try:
                held.append(device.malloc(size, stream))
            except OutOfDeviceMemory:
                assert capacity is not None
            # ``malloc`` has seen the events: what they kept is free now.
            awaited = [block for block in awaited if block.events]
        elif held and action < 9:
            block = held.pop(size % len(held))
            if action == 8:
                device.record_stream(block, stream)
            waits = bool(block.streams)
            device.free(block)
            if waits:
                awaited.append(block)
        else:
            device.pass_events(stream)
        in_use = sorted(held + awaited, key=lambda block: block.address)
        for before, after in pairwise(in_use):
            assert before.address + before.size <= after.address
        assert device.allocated_bytes == sum(block.size for block in held)
        assert device.active_bytes == sum(block.size for block in in_use)
        assert device.reserved_bytes >= device.active_bytes
        assert device.reserved_bytes == _taken(device.calls)
        assert capacity is None or device.reserved_bytes <= capacity
        assert all(block.size >= block.requested for block in held)
    for block in held:
        device.free(block)
    device.empty_cache()
    assert device.allocated_bytes == device.active_bytes == 0
    assert device.reserved_bytes == _taken(device.calls) == 0


def _taken(calls: list[DeviceCall]) -> int:
    sign = {"malloc": 1, "map": 1, "free": -1, "unmap": -1, "synchronize": 0}
    return sum(sign[call.kind] * call.bytes for call in calls)
