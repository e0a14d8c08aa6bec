"""A trace as bars: parts of an id, merged spans, stalls."""

from itertools import pairwise

import msgspec

from memo_sim.contract.trace import MemoryCurve, Spans, Trace, Wait
from memo_sim.views.bars import (
    InstructionPlace,
    bars_of,
    first_micro_batch,
    lanes_of,
    passes_of,
    place_of,
    played_s,
    stalls_of,
)


def trace_of(*spans: tuple[str, str, float, float], waits: list[Wait] | None = None) -> Trace:
    ids, lanes, start, end = (list(column) for column in zip(*spans, strict=True))
    nothing = MemoryCurve(time_s=[], bytes_by_class={})
    return Trace(
        origin="predicted",
        program_sha256="0" * 64,
        step_s=max(end),
        spans=Spans(ids=ids, ops=["op"] * len(ids), lanes=lanes, start_s=start, end_s=end),
        device_memory=nothing,
        host_memory=nothing,
        waits=waits or [],
    )


def test_an_id_gives_place_phase_and_name() -> None:
    assert place_of("m0/s0/l12/bwd/ffn_up.dgrad") == InstructionPlace("m0/s0/l12", "bwd", 12, "ffn_up.dgrad")
    assert place_of("m3/s0/head/fwd/loss.c0") == InstructionPlace("m3/s0/head", "head", -1, "loss.c0")
    assert place_of("m0/s0/embed/bwd/scatter") == InstructionPlace("m0/s0/embed", "embed", -1, "scatter")
    assert place_of("step/embed/zero/grads").phase == "zero"
    assert place_of("step/l3/opt/adamw.decay").label == "l3 opt"
    assert place_of("m0/s0/head/fwd/norm").label == "head"
    assert place_of("something else").phase == "other"


def test_spans_of_one_place_and_phase_are_one_bar() -> None:
    trace = trace_of(
        ("m0/s0/l0/fwd/a", "compute", 0.0, 1.0),
        ("m0/s0/l0/fwd/b", "compute", 1.5, 2.0),
        ("m0/s0/l0/fwd/none", "compute", 2.0, 2.0),
        ("m0/s0/l0/off/x", "d2h", 2.0, 4.0),
        ("m0/s0/l0/bwd/a", "compute", 2.0, 3.0),
        ("m0/s0/l1/bwd/a", "compute", 3.0, 4.0),
    )

    bars = [(b.lane, b.place.label, b.start_s, b.end_s, b.busy_s) for b in bars_of(trace)]

    assert bars == [
        ("compute", "l0 fwd", 0.0, 2.0, 1.5),
        ("d2h", "l0 off", 2.0, 4.0, 2.0),
        ("compute", "l0 bwd", 2.0, 3.0, 1.0),
        ("compute", "l1 bwd", 3.0, 4.0, 1.0),
    ]
    assert len(bars_of(trace, bridge_s=0.4)) == 5


def test_a_wait_is_a_stall_of_one_lane_for_another() -> None:
    trace = trace_of(
        ("m0/s0/l0/off/x", "d2h", 0.0, 3.0),
        ("m0/s0/l2/fwd/a", "compute", 3.0, 4.0),
        ("m0/s0/l2/fwd/b", "compute", 5.0, 6.0),
        waits=[
            Wait(instruction="m0/s0/l2/fwd/a", waits_for="m0/s0/l0/off/x", start_s=1.0, seconds=2.0),
            Wait(instruction="m0/s0/l2/fwd/b", waits_for="not played", start_s=4.0, seconds=1.0),
        ],
    )

    stalls = [(s.lane, s.waits_for, s.start_s, s.end_s) for s in stalls_of(trace)]

    assert stalls == [("compute", "d2h", 1.0, 3.0), ("compute", "other", 4.0, 5.0)]


def test_lanes_have_one_order() -> None:
    trace = trace_of(("a/b/c", "zz", 0, 1), ("a/b/c", "h2d", 0, 1), ("a/b/c", "d2h", 0, 1), ("a/b/c", "compute", 0, 1))

    assert lanes_of([trace]) == ["compute", "d2h", "h2d", "zz"]


def test_the_first_micro_batch_of_several(played) -> None:
    one, several = played(), played(layers=2, global_batch=3)

    assert first_micro_batch(one) is None
    start, end = first_micro_batch(several)
    ends = [e for i, e in zip(several.spans.ids, several.spans.end_s, strict=True) if i.startswith("m0/")]
    assert 0 < start < end == max(ends) < played_s(several) / 2


def test_bars_hold_the_busy_time_of_their_lane(played) -> None:
    trace = played(layers=4)
    spans = zip(trace.spans.lanes, trace.spans.start_s, trace.spans.end_s, strict=True)
    busy = sum(end - start for lane, start, end in spans if lane == "compute")

    bars = [b for b in bars_of(trace) if b.lane == "compute"]

    assert abs(sum(b.busy_s for b in bars) - busy) < 1e-9
    assert all(a.end_s <= b.start_s for a, b in pairwise(bars))
    assert len(bars) < len(trace.spans.ids) / 5


def test_passes_have_the_number_of_their_micro_batch_or_subsequence() -> None:
    spans = [
        ("m0/s0/l0/fwd/a", "compute", 0.0, 1.0),
        ("m0/s1/l0/fwd/a", "compute", 1.0, 2.0),
        ("m0/s1/l0/rec/a", "compute", 2.0, 3.0),
        ("m0/s1/l0/bwd/a", "compute", 3.1, 4.0),
        ("step/l0/opt/a", "compute", 9.0, 10.0),
    ]
    one = trace_of(*spans)
    several = msgspec.structs.replace(one, micro_batches=2)

    def found(trace: Trace, bridge_s: float) -> list[tuple[int, str, float]]:
        return [(p.number, p.phase, p.end_s - p.start_s) for p in passes_of(trace, bridge_s=bridge_s)]

    assert found(one, 0.5) == [(0, "fwd", 1.0), (1, "fwd", 1.0), (1, "bwd", 2.0), (-1, "opt", 1.0)]
    assert found(several, 0.5) == [(0, "fwd", 2.0), (0, "bwd", 2.0), (-1, "opt", 1.0)]
    assert len(passes_of(one, bridge_s=0.05)) == 5
    assert passes_of(one, bridge_s=0.5)[2].busy_s == 1.9


def test_a_wait_is_divided_over_what_caused_it() -> None:
    """Compute waits 10 s for a gather: 6 s another stage was not done, 3 s a receive took, 1 s the gather."""
    ids = ["m0/s0/l0/fwd/a", "m0/s0/l0/pp/recv", "m0/s0/l1/fwd/gather", "m0/s0/l1/fwd/b"]
    spans = Spans(
        ids=ids,
        ops=["linear", "recv", "all_gather", "linear"],
        lanes=["compute", "recv", "tp", "compute"],
        start_s=[0.0, 8.0, 11.0, 12.0],
        end_s=[2.0, 11.0, 12.0, 14.0],
    )
    waits = [
        Wait(instruction=ids[3], waits_for=ids[2], start_s=2.0, seconds=10.0),
        Wait(instruction=ids[2], waits_for=ids[1], start_s=0.0, seconds=11.0),
    ]
    none = MemoryCurve(time_s=[], bytes_by_class={})
    trace = Trace(
        origin="predicted",
        program_sha256="0",
        step_s=14.0,
        spans=spans,
        device_memory=none,
        host_memory=none,
        waits=waits,
    )

    compute = [(s.waits_for, s.start_s, s.end_s) for s in stalls_of(trace) if s.lane == "compute"]

    assert sorted(compute) == [("pipeline bubble", 2.0, 8.0), ("recv", 8.0, 11.0), ("tp", 11.0, 12.0)]
    assert {s.instruction for s in stalls_of(trace) if s.lane == "compute"} == {ids[3]}
