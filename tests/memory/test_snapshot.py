"""PyTorch snapshots are read as data: lives follow from events, and no code in them runs."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.plain_pickle import load_plain
from memo_sim.memory.snapshot import read_snapshot
from tests.refusals import Expected, refused


def event(action: str, addr: int, size: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "frames": [], **more}


def freed(addr: int, size: int, **more: Any) -> list[dict[str, Any]]:
    return [event("free_requested", addr, size, **more), event("free_completed", addr, size, **more)]


def snapshot(*traces: list[dict[str, Any]], segments: list[dict[str, Any]] | None = None) -> bytes:
    return pickle.dumps({"segments": segments or [], "device_traces": list(traces), "allocator_settings": {}})


def lives(raw: bytes, device: int | None = None) -> list[tuple[int, int, int]]:
    requests = read_snapshot(raw, "snap", device).requests
    return list(zip(requests.lower, requests.upper, requests.size_bytes, strict=True))


def test_completed_frees_end_lives_and_sizes_are_the_requested_ones() -> None:
    trace = [
        event("segment_alloc", 0x1000, 2 << 20),
        event("alloc", 0x1000, 700),
        event("free_requested", 0x1000, 700),  # still waits for another stream
        event("alloc", 0x1400, 512),
        event("free_completed", 0x1000, 700),
        event("alloc", 0x1000, 100),
        event("snapshot", 0, 0),
    ]
    assert lives(snapshot(trace)) == [(0, 2, 700), (1, 4, 512), (3, 4, 100)]
    requests = read_snapshot(snapshot(trace), "snap").requests
    assert requests.alignment_bytes == 512
    assert len(set(requests.ids)) == 3


def test_names_come_from_the_innermost_frame_outside_of_torch() -> None:
    frames = [
        {"filename": "??", "line": 0, "name": "c10::alloc"},
        {"filename": "/x/torch/nn/modules/linear.py", "line": 9, "name": "forward"},
        {"filename": "/x/model.py", "line": 57, "name": "block"},
    ]
    trace = [event("alloc", 0x1000, 1, frames=frames), event("alloc", 0x1200, 1, frames=frames[:2])]
    assert read_snapshot(snapshot(trace), "snap").requests.ids == ["b0 model.py:57:block", "b1 linear.py:9:forward"]


def test_buffers_older_than_the_history_live_from_its_start() -> None:
    blocks = [
        {"size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": []},
        {"size": 512, "requested_size": 0, "state": "inactive", "frames": []},
        {"size": 512, "requested_size": 9, "state": "active_allocated", "frames": []},
    ]
    segment = {"device": 0, "address": 0x1000, "total_size": 2048, "stream": 0, "blocks": blocks}
    trace = [event("alloc", 0x1600, 9), *freed(0x9000, 77), event("alloc", 0x9000, 5)]
    source = read_snapshot(snapshot(trace, segments=[segment]), "snap")
    requests = source.requests
    rows = sorted(zip(requests.lower, requests.upper, requests.size_bytes, strict=True))
    assert rows == [(0, 1, 77), (0, 3, 9), (0, 3, 1000), (2, 3, 5)]
    assert any("2 buffers are older than the recorded history" in note for note in source.notes)


def test_the_fullest_device_and_pool_is_read_and_the_others_are_named() -> None:
    small = [event("alloc", 0x1000, 10)]
    large = [event("alloc", 0x1000, 500), event("alloc", 0x8000, 40, pool_id=(0, 1)), *freed(0x1000, 500)]
    source = read_snapshot(snapshot(small, large), "snap")
    assert source.requests.name == "device 1"
    assert source.requests.size_bytes == [500]
    assert any("left out: device 0 (1 buffers), device 1 pool (0, 1) (1 buffers)" in note for note in source.notes)
    assert lives(snapshot(small, large), device=0) == [(0, 1, 10)]
    with refused(UsageError, where="snap", got="2", wanted="0, 1"):
        read_snapshot(snapshot(small, large), "snap", 2)


def test_streams_that_share_the_arena_are_noted() -> None:
    trace = [event("alloc", 0x1000, 1), event("alloc", 0x2000, 1, stream=7)]
    assert any("2 streams share" in note for note in read_snapshot(snapshot(trace), "snap").notes)


RECORD = "torch.cuda.memory._record_memory_history()"
PLAIN_DATA = "torch.cuda.memory._dump_snapshot"
WHOLE = f"0 to {2**62 - 1}"


@pytest.mark.parametrize(
    ("raw", "where", "fields"),
    [
        (pickle.dumps([1, 2]), "", {"wanted": "device_traces", "hint": RECORD}),
        (pickle.dumps({"device_traces": 3}), "", {"wanted": "device_traces", "hint": RECORD}),
        (snapshot(), ": device_traces", {"got": None, "hint": RECORD}),
        (snapshot([event("segment_alloc", 0, 1)]), ": device_traces", {"got": None, "hint": RECORD}),
        (pickle.dumps({"device_traces": [{}]}), ": device_traces[0]", {"got": "dict", "hint": RECORD}),
        (snapshot([3]), ": device_traces[0][0]", {"wanted": "'action'"}),  # type: ignore[list-item]
        (
            snapshot([event("alloc", 1, 1), {"action": "alloc", "addr": 4}]),
            *(": device_traces[0][1].size", {"got": "None", "wanted": WHOLE}),
        ),
        (snapshot([event("alloc", 1, -1)]), ": device_traces[0][0].size", {"got": "-1", "wanted": WHOLE}),
        (
            snapshot([event("alloc", 1, 1.5)]),  # type: ignore[arg-type]
            *(": device_traces[0][0].size", {"got": "1.5", "wanted": WHOLE}),
        ),
        (snapshot([event("alloc", 1, 2**70)]), ": device_traces[0][0].size", {"got": str(2**70), "wanted": WHOLE}),
        (snapshot([event("alloc", 1, 1, pool_id="x")]), ": device_traces[0][0].pool_id", {"got": "'x'"}),
        (
            snapshot([event("alloc", 1, 1), event("alloc", 1, 1)]),
            *(": device_traces[0][1]", {"what": "allocated", "got": "0x1"}),
        ),
        (
            snapshot([event("alloc", 1, 1), *freed(1, 1), *freed(1, 1)]),
            *(": device_traces[0][4]", {"what": "freed", "got": "0x1"}),
        ),
        (snapshot([event("alloc", 1, 1)], segments=[{"device": 0}]), ": segments[0]", {"wanted": "'blocks'"}),
        (snapshot([event("alloc", 1, 1)])[:-9], "", {"what": "pickle", "wanted": PLAIN_DATA}),
        (b"\x80\x04garbage", "", {"what": "pickle", "got": "opcode 0x67 at byte 2", "wanted": PLAIN_DATA}),
        (b"\x80\x04.", "", {"what": "pickle", "got": "one object", "wanted": PLAIN_DATA}),
    ],
)
def test_what_contradicts_itself_is_refused_with_its_place(raw: bytes, where: str, fields: dict[str, Expected]) -> None:
    with refused(BadInput, **fields) as error:
        read_snapshot(raw, "snap")
    assert error.value.where == f"snap{where}"


class Touch:
    """The content of a hostile pickle: the standard reader would call any function for it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_code_in_a_pickle_never_runs(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "made"
    raw = pickle.dumps({"device_traces": [[Touch(os.mkdir, str(target))]]}, protocol)
    with refused(BadInput, where="snap", got="posix.mkdir", wanted=PLAIN_DATA):
        load_plain(raw, "snap")
    assert not target.exists()
    pickle.loads(raw)  # the standard reader does run the same bytes
    assert target.exists()


def test_references_and_classes_are_refused() -> None:
    for raw in (
        b"\x80\x04\x8c\x01xQ.",
        pickle.dumps(Path("x")),
        pickle.dumps({1: complex(1, 2)}),
        pickle.dumps(range(3)),
    ):
        with refused(BadInput, where="snap", wanted=PLAIN_DATA):
            load_plain(raw, "snap")
    plain = {"a": [1, 2.5, True, None, b"x", "y"], "b": ((), (3,)), "big": 2**80, "low": -(2**80), 7: [-1, 70000]}
    assert load_plain(pickle.dumps(plain), "snap") == plain


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans() | st.none(), inner)
    ),
    max_leaves=40,
)


@given(tree=PLAIN, protocol=st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_plain_data_is_read_back_unchanged(tree: Any, protocol: int) -> None:
    held_twice = [tree, tree]
    assert load_plain(pickle.dumps(held_twice, protocol), "snap") == held_twice


@given(raw=st.binary(max_size=60), protocol=st.integers(2, 5))
def test_bytes_of_any_kind_are_read_or_refused(raw: bytes, protocol: int) -> None:
    with suppress(BadInput):
        load_plain(bytes([0x80, protocol]) + raw, "snap")


@given(tree=PLAIN, data=st.data())
def test_a_truncated_pickle_is_refused(tree: Any, data: st.DataObject) -> None:
    whole = pickle.dumps(tree, 4)
    with pytest.raises(BadInput):
        load_plain(whole[: data.draw(st.integers(2, len(whole) - 1))], "snap")


@pytest.mark.parametrize(
    ("raw", "got"),
    [
        (b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.", "tuple"),  # hashed, it ends the process
        (b"\x80\x04}r\xff\xff\xff\x7f.", "memo"),  # a table of 16 GiB
        (b"\x80\x05\x96" + (8 << 30).to_bytes(8, "little") + b"x.", "opcode 0x96"),  # a buffer of 8 GiB
        (b"\x80\x04X\xff\xff\xff\x7fx.", "truncated"),
        (b"\x80\x02\x8b\x00\x00\x00\x40.", "opcode 0x8b"),  # a number too long to be shown
        (b"\x80\x04K\x01K\x02.", "one object"),
        (b"\x80\x04(.", "one object"),
        (b"\x80\x04K\x01K\x02K\x03s.", ("items", "int")),
        (b"\x80\x04K\x01K\x02a.", ("append", "int")),
        (b"\x80\x04K\x01\x86.", "more objects"),
        (b"\x80\x04h\x00.", "more objects"),
        (b"\x80\x04cposix\nsystem\n.", "posix.system"),
    ],
)
def test_bytes_that_would_hurt_the_standard_reader_are_refused(raw: bytes, got: Expected) -> None:
    with refused(BadInput, where="snap", got=got, wanted=PLAIN_DATA):
        load_plain(raw, "snap")


def test_containers_are_shown_by_their_type() -> None:
    layers: list[Any] = []
    for _ in range(60):
        layers = [layers] * 10  # written out, 10^60 brackets
    bad = [
        ([event("alloc", 1, layers)], "a list"),  # type: ignore[arg-type]
        ([event("alloc", 1, 1, pool_id=layers)], "a list"),
        ([event("alloc", 1, {})], "a dict"),  # type: ignore[arg-type]
    ]
    for trace, shown in bad:
        with pytest.raises(BadInput) as error:
            read_snapshot(snapshot(trace), "snap")
        assert error.value.got == shown
    odd = event("alloc", 1, 1, category=layers) | {"stream": layers, "frames": [{"filename": "a.py", "line": layers}]}
    requests = read_snapshot(snapshot([odd]), "snap").requests
    assert (requests.ids, requests.classes) == (["b0 a.py:a list:"], [])
