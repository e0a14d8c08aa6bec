"""A placement as a PyTorch snapshot: torch's tools accept it, the viewer decodes it, and it reads back unchanged."""

from __future__ import annotations

import pickle
import pickletools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memo_sim.contract.catalog import load_model
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Decisions
from memo_sim.contract.requests import Requests
from memo_sim.memory.place import place
from memo_sim.memory.snapshot import read_snapshot
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.lower import lower
from memo_sim.views.torch_snapshot import BASE_ADDRESS, torch_snapshot

DECODED_BY_THE_VIEWER = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"),
}
"""Pickle operations that torch/utils/viz/MemoryViz.js supports."""


def by_name(requests: Requests | Placement) -> dict[str, tuple[Any, ...]]:
    classes = requests.classes or [""] * len(requests.ids)
    rows = zip(requests.ids, requests.lower, requests.upper, requests.size_bytes, classes, strict=True)
    return {name: tuple(rest) for name, *rest in rows}


@pytest.fixture(scope="module")
def placement() -> Placement:
    (program,) = lower(Decisions(model=load_model("gpt-tiny"), seq_tokens=1024, recompute="full"))
    return place(requests_of(program), solver="greedy", time_limit_s=10)


def test_it_reads_back_unchanged(placement: Placement) -> None:
    read = read_snapshot(torch_snapshot(placement), "snap").requests
    assert by_name(read) == by_name(placement)
    assert (read.program_sha256, read.alignment_bytes) == (placement.program_sha256, placement.alignment_bytes)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 2000)), min_size=1, max_size=12))
def test_any_placement_reads_back_without_its_empty_buffers(rows: list[tuple[int, int, int]]) -> None:
    requests = Requests(
        ids=[f"b{i}" for i in range(len(rows))],
        lower=[low for low, _, _ in rows],
        upper=[low + life for low, life, _ in rows],
        size_bytes=[size for _, _, size in rows],
        alignment_bytes=512,
    )
    if not any(requests.size_bytes):
        return
    read = read_snapshot(torch_snapshot(place(requests, solver="greedy")), "snap").requests
    assert by_name(read) == {name: row for name, row in by_name(requests).items() if row[2]}


def test_events_have_planned_addresses_that_never_overlap(placement: Placement) -> None:
    tree = pickle.loads(torch_snapshot(placement))
    (trace,) = tree["device_traces"]
    offset_of = dict(zip(placement.ids, placement.offset_bytes, strict=True))
    live: dict[int, int] = {}
    for event in trace[1:]:
        start, size = event["addr"] - BASE_ADDRESS, event["size"]
        assert start == offset_of[event["frames"][0]["name"]]
        if event["action"] == "alloc":
            assert all(start + size <= other or start >= other + held for other, held in live.items())
            live[start] = size
        elif event["action"] == "free_completed":
            assert live.pop(start) == size
    (segment,) = tree["segments"]
    assert segment["total_size"] == placement.arena_bytes == sum(b["size"] for b in segment["blocks"])
    kept = {b["address"] - BASE_ADDRESS: b["requested_size"] for b in segment["blocks"] if b["state"] != "inactive"}
    assert kept == live


def test_the_viewer_decodes_every_operation(placement: Placement) -> None:
    raw = torch_snapshot(placement)
    used = {operation.name for operation, _, _ in pickletools.genops(raw)}
    assert used <= DECODED_BY_THE_VIEWER
    assert raw == torch_snapshot(placement)


def test_every_event_has_a_category_where_there_are_classes(placement: Placement) -> None:
    (trace,) = pickle.loads(torch_snapshot(placement))["device_traces"]
    assert trace[0]["category"] == "unknown"
    assert {e["category"] for e in trace[1:] if e["action"] == "alloc"} == set(placement.classes)


def test_torchs_own_tools_accept_it(placement: Placement) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    tree = pickle.loads(torch_snapshot(placement))
    summary = viz.segsum(tree)  # it checks that the blocks add up to the segment
    assert "segments: 1\n" in summary
    assert f"total_reserved: {viz.Bytes(placement.arena_bytes)}" in summary
    allocs = sum(1 for size in placement.size_bytes if size)
    told = viz.trace(tree)
    assert told.count("del ") == told.count("# free completed")
    assert told.count(" = s") + told.count(" = MEM") + told.count("[") >= allocs
    assert "snapshot.pickle" in viz.trace_plot(tree)
    flames = viz.memory(tree, format_flamegraph=str)
    kept = [i for i, upper in enumerate(placement.upper) if upper == max(placement.upper) and placement.size_bytes[i]]
    assert flames.count("active_allocated") >= len(kept) > 0
