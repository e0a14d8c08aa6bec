"""The checker finds every way in which a placement can be wrong."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memo_sim.contract.catalog import load_model
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Decisions
from memo_sim.contract.requests import Requests
from memo_sim.memory.place import place
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.arena.check_placement import check_placement
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.lower import lower

REQUESTS = Requests(
    program_sha256="p",
    ids=["a", "b", "c"],
    lower=[0, 1, 2],
    upper=[2, 3, 4],
    size_bytes=[1000, 512, 100],
    classes=["state", "transient", "transient"],
    alignment_bytes=512,
)
RIGHT = Placement(
    program_sha256="p",
    arena_bytes=1536,
    lower_bound_bytes=1536,
    alignment_bytes=512,
    ids=REQUESTS.ids,
    lower=REQUESTS.lower,
    upper=REQUESTS.upper,
    size_bytes=REQUESTS.size_bytes,
    offset_bytes=[0, 1024, 0],
    classes=REQUESTS.classes,
)


def test_a_valid_placement_has_no_fault() -> None:
    assert check_placement(RIGHT, REQUESTS) == []
    assert check_placement(msgspec.structs.replace(RIGHT, classes=[]), REQUESTS) == []
    turned = {
        column: getattr(RIGHT, column)[::-1]
        for column in ("ids", "lower", "upper", "size_bytes", "offset_bytes", "classes")
    }
    assert check_placement(msgspec.structs.replace(RIGHT, **turned), REQUESTS) == []  # in any order


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"program_sha256": "q"}, r"program q\b"),
        ({"alignment_bytes": 256}, r"alignment.*\b256\b.*\b512\b"),
        ({"ids": ["a", "b", "d"]}, r"^d\b"),
        ({"ids": ["a", "b", "d"]}, r"^c\b"),
        ({"ids": ["a", "b", "a"]}, r"^a\b.*\btwice\b"),
        ({"lower": [0, 1, 1]}, r"^c\b.*\[1, 4\)"),
        ({"upper": [2, 2, 4]}, r"^b\b.*\[1, 2\)"),
        ({"size_bytes": [1000, 512, 99]}, r"^c\b.*\b99 bytes"),
        ({"offset_bytes": [0, 1024, 100]}, r"^c\b.*\b100\b.*\b512\b"),
        ({"offset_bytes": [0, 1536, 0]}, r"^b\b.*\b2048\b.*\b1536\b"),
        ({"offset_bytes": [0, 512, 0]}, r"^a and b\b.*\b512\b"),
        ({"offset_bytes": [0, 1024, 1024]}, r"^b and c\b.*\b1024\b"),
        ({"arena_bytes": 2048}, r"\b2048\b.*\b1536\b"),
        ({"arena_bytes": 1535}, r"\b1535\b.*\b1536\b"),  # not rounded up
        ({"arena_bytes": 1024}, r"^b\b.*\b1536\b.*\b1024 bytes"),
        ({"lower_bound_bytes": 1024}, r"\b1024\b.*\b1536\b"),
        ({"classes": ["state", "state", "transient"]}, r"^b\b.*\bstate\b.*\btransient\b"),
        ({"offset_bytes": [0, 2**70, 0]}, rf"^b\b.*\b3\b.*\b{2**70 + 512}\b"),
        ({"upper": [2, 2**64, 4]}, rf"\b{2**62}\b"),
    ],
)
def test_every_fault_is_named(change: dict[str, Any], named: str) -> None:
    faults = check_placement(msgspec.structs.replace(RIGHT, **change), REQUESTS)
    assert any(re.search(named, fault) for fault in faults), faults


def test_sums_beyond_64_bits_hide_no_overlap() -> None:
    """Two buffers at one address whose ends wrap around, in an arena that is large enough for them."""
    high = 2**63 - 512
    placement = msgspec.structs.replace(RIGHT, offset_bytes=[0, high, high], arena_bytes=high + 512)
    assert any("cannot be compared" in fault for fault in check_placement(placement, REQUESTS))


def test_one_byte_shared_by_two_of_ten_thousand_buffers_is_found() -> None:
    """All are live at once: 50 million pairs."""
    count = 10_000
    requests = Requests(
        ids=[f"b{i}" for i in range(count)], lower=[0] * count, upper=[9] * count, size_bytes=[8] * count
    )
    placement = Placement(
        arena_bytes=8 * count,
        lower_bound_bytes=8 * count,
        ids=requests.ids,
        lower=requests.lower,
        upper=requests.upper,
        size_bytes=requests.size_bytes,
        offset_bytes=list(range(0, 8 * count, 8)),
    )
    assert check_placement(placement, requests) == []
    collided = [*placement.offset_bytes[:-1], placement.offset_bytes[-1] - 1]
    faults = check_placement(msgspec.structs.replace(placement, offset_bytes=collided), requests)
    assert any("b9998 and b9999 share addresses" in fault for fault in faults)


def test_a_negative_offset_is_found_though_a_file_cannot_hold_one() -> None:
    assert any("starts at -512" in f for f in check_placement(_with_offsets([-512, 1024, 0]), REQUESTS))


def _with_offsets(offsets: list[int]) -> Placement:
    return msgspec.structs.replace(RIGHT, offset_bytes=offsets)


@given(st.data())
def test_faults_are_found_exactly_where_bytes_collide(data: st.DataObject) -> None:
    """Random small placements, compared with a map of every (instant, address)."""
    count = data.draw(st.integers(1, 6))
    lower = [data.draw(st.integers(0, 6)) for _ in range(count)]
    upper = [low + data.draw(st.integers(1, 4)) for low in lower]
    size = [data.draw(st.integers(0, 4)) for _ in range(count)]
    offset = [data.draw(st.integers(0, 6)) for _ in range(count)]
    names = [f"b{i}" for i in range(count)]
    cells: set[tuple[int, int]] = set()
    collides = False
    for a, b, o, s in zip(lower, upper, offset, size, strict=True):
        mine = {(t, x) for t in range(a, b) for x in range(o, o + s)}
        collides |= bool(mine & cells)
        cells |= mine
    live = [sum(s for a, b, s in zip(lower, upper, size, strict=True) if a <= t < b) for t in range(12)]
    requests = Requests(ids=names, lower=lower, upper=upper, size_bytes=size)
    placement = Placement(
        arena_bytes=max(o + s for o, s in zip(offset, size, strict=True)),
        lower_bound_bytes=max(live),
        ids=names,
        lower=lower,
        upper=upper,
        size_bytes=size,
        offset_bytes=offset,
    )
    assert bool(check_placement(placement, requests)) == collides


@pytest.mark.parametrize("model", ["gpt-tiny", "llama-tiny"])
@pytest.mark.parametrize(("recompute", "swapped"), [("none", 0), ("none", 1024), ("tokenwise", 512), ("full", 0)])
def test_a_programs_requests_are_its_buffers(model: str, recompute: Any, swapped: int) -> None:
    decisions = Decisions(model=load_model(model), seq_tokens=1024, recompute=recompute, swapped_tokens=swapped)
    (program,) = lower(decisions)
    requests = requests_of(program)
    live = [0] * program.instruction_count
    for low, up, size in zip(requests.lower, requests.upper, requests.size_bytes, strict=True):
        for instant in range(low, up):
            live[instant] += size
    columns = expand(program)
    assert max(live) == peak(live_bytes(liveness(program, columns), device=True)).bytes
    assert requests.phases[0].lower == 0
    assert all(a.upper == b.lower for a, b in zip(requests.phases, requests.phases[1:], strict=False))
    assert requests.phases[-1].upper == program.instruction_count
    assert {p.kind for p in requests.phases if "/l0" in p.name} <= {t.name for t in program.templates}


def test_buffers_that_last_are_compared_as_ranges_of_addresses() -> None:
    """In half of the random placements one buffer is moved; a comparison of all pairs says whether that is a fault."""
    random = np.random.default_rng(5)
    found = 0
    for seed in range(60):
        lasting = random.random(30) < 0.4
        low = np.where(lasting, 0, random.integers(0, 20, 30))
        high = np.where(lasting, 30, low + random.integers(1, 10, 30))
        sizes = random.integers(0, 9, 30)
        asked = Requests(
            ids=[f"b{n}" for n in range(30)], lower=low.tolist(), upper=high.tolist(), size_bytes=sizes.tolist()
        )
        right = place(asked)
        offsets = list(right.offset_bytes)
        if seed % 2:
            offsets[int(random.integers(0, 30))] = int(random.integers(0, right.arena_bytes))
        moved = msgspec.structs.replace(right, offset_bytes=offsets)
        wrong = any(
            low[i] < high[j]
            and low[j] < high[i]
            and offsets[i] < offsets[j] + sizes[j]
            and offsets[j] < offsets[i] + sizes[i]
            and sizes[i]
            and sizes[j]
            for i in range(30)
            for j in range(i)
        )
        faults = [fault for fault in check_placement(moved, asked) if "share addresses" in fault]
        assert bool(faults) == wrong
        assert len(set(faults)) == len(faults)
        found += wrong
    assert found > 10
