"""The Chrome file follows Perfetto's rules."""

import gzip
import json
import random
from collections import defaultdict

import pytest

from memo_sim.contract.errors import UsageError
from memo_sim.views.chrome_trace import _microseconds, chrome_trace, write_chrome_trace
from tests.refusals import refused


@pytest.fixture(scope="module")
def document(played):
    return chrome_trace([played(), played(slower=1.2, origin="measured", rates={"d2h": 2e9})])


def test_slices_of_a_thread_nest_or_do_not_overlap(document) -> None:
    threads = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            # Old versions of Perfetto truncate to whole nanoseconds.
            start, length = int(event["ts"] * 1000.0), int(event["dur"] * 1000.0)
            threads[event["pid"], event["tid"]].append((start, start + length))
    assert len(threads) == 2 * 7  # the step and six lanes, twice
    for slices in threads.values():
        open_ends: list[int] = []
        for start, end in slices:
            assert end > start
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)
        assert slices == sorted(slices, key=lambda s: (s[0], -s[1]))


def test_every_instruction_that_took_time_is_there_once(document, played) -> None:
    spans = played().spans
    wanted = [i for i, s, e in zip(spans.ids, spans.start_s, spans.end_s, strict=True) if e > s]

    found = [e["args"]["id"] for e in document["traceEvents"] if e["pid"] == 1 and "id" in e.get("args", {})]

    assert sorted(found) == sorted(wanted)


def test_events_are_sorted_and_name_their_process(document) -> None:
    timed = [e for e in document["traceEvents"] if e["ph"] != "M"]
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    assert {e["ph"] for e in timed} == {"X", "C", "i"}
    assert all(e["pid"] > 0 and e["tid"] > 0 for e in document["traceEvents"])
    assert all(e["s"] == "t" for e in timed if e["ph"] == "i")


def test_predicted_and_measured_are_two_processes(document, played) -> None:
    metadata = [e for e in document["traceEvents"] if e["ph"] == "M"]
    names = {e["pid"]: e["args"]["name"] for e in metadata if e["name"] == "process_name"}
    assert names == {1: "rank 0 predicted", 2: "rank 0 measured"}
    threads = [[e["args"]["name"] for e in metadata if e["name"] == "thread_name" and e["pid"] == pid] for pid in names]
    assert threads == [["step", "compute", "d2h", "h2d", "tp", "replica", "p2p"]] * 2
    for pid in names:
        assert min(e["ts"] for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == pid) == 0
    assert document["distributedInfo"] == {"rank": 0, "world_size": 8}
    assert document["otherData"] == {
        "origin": "predicted and measured",
        "program_sha256": played().program_sha256,
    }


def test_counters_are_the_memory_by_class(document, played) -> None:
    curve = played().device_memory
    counters = [e for e in document["traceEvents"] if e["ph"] == "C" and e["pid"] == 1 and e["name"] == "device_bytes"]

    assert max(e["args"]["total"] for e in counters) == max(map(sum, zip(*curve.bytes_by_class.values(), strict=True)))
    for event in counters:
        assert event["args"]["total"] == sum(v for k, v in event["args"].items() if k != "total")


def test_waits_name_the_instruction_that_is_waited_for(document, played) -> None:
    waits = [e for e in document["traceEvents"] if e["ph"] == "i" and e["pid"] == 2]

    assert any(e["name"] == "waits for d2h" and e["tid"] == 2 for e in waits)
    assert {e["args"]["instruction"] for e in waits} <= set(played().spans.ids)


def test_readers_that_truncate_or_round_recover_the_nanoseconds() -> None:
    draw = random.Random(7)
    for _ in range(10_000):
        time_ns = draw.randrange(10 ** draw.randrange(1, 15))
        assert int(_microseconds(time_ns) * 1000.0) == round(_microseconds(time_ns) * 1000.0) == time_ns


def test_the_file_is_deterministic_json_plain_or_compressed(tmp_path, played) -> None:
    plain, packed, again = (tmp_path / name for name in ("t.json", "t.json.gz", "u.json.gz"))
    for path in (plain, packed, again):
        write_chrome_trace([played()], path)

    assert json.loads(plain.read_bytes()) == chrome_trace([played()])
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert packed.read_bytes() == again.read_bytes()
    with refused(UsageError, where=str(tmp_path / "missing" / "t.json"), got="No such file"):
        write_chrome_trace([played()], tmp_path / "missing" / "t.json")


def test_no_trace_is_an_empty_file() -> None:
    assert chrome_trace([])["traceEvents"] == []
