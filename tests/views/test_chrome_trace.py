"""The Chrome file follows Perfetto's rules."""

import gzip
import json
import random
from collections import defaultdict

import msgspec
import pytest

from memo_sim.contract.errors import UsageError
from memo_sim.contract.trace import Spans, Trace
from memo_sim.views import chrome_trace as chrome_trace_module
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
    assert {e["ph"] for e in timed} == {"X", "C", "i", "s", "f"}
    assert all(e["pid"] > 0 and e["tid"] > 0 for e in document["traceEvents"])
    assert all(e["s"] == "t" for e in timed if e["ph"] == "i")


def test_ranks_of_a_pipeline_are_named_by_their_stages(played) -> None:
    ranks = [msgspec.structs.replace(played(), rank=rank, world_size=2) for rank in (0, 1)]
    names = [e["args"]["name"] for e in chrome_trace(ranks)["traceEvents"] if e["name"] == "process_name"]
    assert names == ["stage 1, rank 0 predicted", "stage 2, rank 1 predicted"]


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


def innermost(document, event) -> str:
    """Return the id of the innermost slice of an event's thread at its time."""
    found = [
        e
        for e in document["traceEvents"]
        if e["ph"] == "X" and (e["pid"], e["tid"]) == (event["pid"], event["tid"])
        if e["ts"] <= event["ts"] < e["ts"] + e["dur"]
    ]
    return min(found, key=lambda e: (e["dur"], "id" not in e["args"]))["args"]["id"]


def test_an_arrow_leads_from_each_cause_to_what_waited(document, played) -> None:
    waits = {(w.instruction, w.waits_for) for w in played().waits}
    begins = {e["id"]: e for e in document["traceEvents"] if e["ph"] == "s" and e["pid"] == 1}
    ends = {e["id"]: e for e in document["traceEvents"] if e["ph"] == "f" and e["pid"] == 1}

    found = {(innermost(document, ends[n]), innermost(document, begins[n])) for n in begins}

    assert begins.keys() == ends.keys()
    assert len(found) > 10
    assert found <= waits
    assert all(e["bp"] == "e" for e in ends.values())


def test_a_send_has_an_arrow_to_its_receive_on_the_other_rank(played) -> None:
    def rank(number: int, kind: str) -> Trace:
        spans = Spans(ids=[f"m0/s0/l{number}/pp/{kind}.x"], ops=[kind], lanes=[kind], start_s=[1.0], end_s=[1.001])
        return msgspec.structs.replace(played(), rank=number, spans=spans, waits=[])

    events = chrome_trace([rank(0, "send"), rank(1, "recv")])["traceEvents"]

    assert [(e["ph"], e["pid"]) for e in events if e.get("cat") == "transfer"] == [("s", 1), ("f", 2)]


def test_a_long_step_has_the_instructions_of_its_first_micro_batches(played, monkeypatch) -> None:
    trace = played(layers=2, global_batch=6)
    monkeypatch.setattr(chrome_trace_module, "MOST_SLICES", len(trace.spans.ids) // 3)
    short, whole = chrome_trace([trace]), chrome_trace([trace], full=True)

    def of(document, key: str) -> set[str]:
        return {e["args"][key] for e in document["traceEvents"] if e["ph"] == "X" and key in e["args"]}

    def peak(document) -> int:
        counters = (e for e in document["traceEvents"] if e["ph"] == "C" and e["name"] == "device_bytes")
        return max(e["args"]["total"] for e in counters)

    assert {"m0", "step"} <= {name.split("/")[0] for name in of(short, "id")} < {"step", *(f"m{n}" for n in range(5))}
    assert of(whole, "id") == {i for i, s, e in zip(*columns(trace), strict=True) if e > s}
    assert of(short, "place") == of(whole, "place")
    assert peak(short) == peak(whole)
    assert "m0/s0" in short["otherData"]["note"]
    assert "note" not in whole["otherData"]


def columns(trace: Trace) -> tuple[list[str], list[float], list[float]]:
    return trace.spans.ids, trace.spans.start_s, trace.spans.end_s
