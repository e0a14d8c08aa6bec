"""Tests the comparison of measured and predicted steps: ratios, repeated micro-batches, tolerance, files."""

from pathlib import Path

import msgspec
import pytest

from memo_exec.commands import compare
from memo_exec.commands.run import run
from memo_exec.commands.run_options import RunOptions
from memo_sim.contract import codec
from memo_sim.contract.comparison import StepFigures
from memo_sim.contract.errors import BadInput, OutOfTolerance
from memo_sim.contract.plan import MovedBytes
from memo_sim.contract.trace import MemoryCurve, Spans, Trace
from memo_sim.program.lower import lower
from memo_sim.views.busy import busy_by
from memo_sim.views.chrome_trace import chrome_trace
from memo_sim.views.comparison_table import comparison_table
from tests.exec_cpu.plans import byte_decisions, plan_of, predicted, write_plan
from tests.refusals import refused


def figures(step_s: float, **changes: object) -> StepFigures:
    fields: dict[str, object] = {"step_s": step_s, "peak_device_bytes": 100, "moved_bytes": MovedBytes(d2h=8, h2d=0)}
    return StepFigures(**(fields | {"lanes": {"compute": step_s, "d2h": 0.0}} | changes))  # type: ignore[arg-type]


def trace(ids: list[str], seconds: list[float], **changes: object) -> Trace:
    starts = [sum(seconds[:i]) for i in range(len(seconds))]
    spans = Spans(
        ids=ids,
        ops=[name.rpartition("/")[2] for name in ids],
        lanes=["compute"] * len(ids),
        start_s=starts,
        end_s=[start + s for start, s in zip(starts, seconds, strict=True)],
    )
    empty = MemoryCurve(time_s=[], bytes_by_class={})
    fields: dict[str, object] = {"origin": "predicted", "program_sha256": "p", "step_s": sum(seconds)}
    fields |= {"spans": spans, "device_memory": empty, "host_memory": empty}
    return Trace(**(fields | changes))  # type: ignore[arg-type]


def test_ratio_is_predicted_over_measured_without_what_was_not_measured() -> None:
    ratio = compare.ratio_of(figures(1.0), figures(2.0, moved_bytes=MovedBytes(d2h=4, h2d=0)))
    assert ratio is not None
    assert ratio.step_s == 0.5
    assert ratio.peak_device_bytes == 1.0
    assert ratio.moved_bytes == {"d2h": 2.0}
    assert ratio.lanes == {"compute": 0.5}


def test_spans_of_the_repeated_micro_batch_count_for_all_it_stands_for() -> None:
    played = trace(["m0/a", "m1/a", "m2/a", "step/b"], [1.0, 2.0, 3.0, 4.0], micro_batches_played=3, micro_batches=8)
    lanes, ops = busy_by(played)
    assert ops == {"a": 1.0 + 6 * 2.0 + 3.0, "b": 4.0}
    assert lanes == {"compute": 20.0}
    alone = trace(["m0/a", "step/b"], [1.0, 4.0], micro_batches_played=1, micro_batches=3)
    assert busy_by(alone)[1] == {"a": 3.0, "b": 4.0}


def test_peak_of_a_trace_is_of_the_sum() -> None:
    memory = MemoryCurve(time_s=[0.0, 1.0], bytes_by_class={"state": [5, 5], "transient": [1, 3]})
    assert compare.figures_of_trace(trace(["a"], [1.0], device_memory=memory)).peak_device_bytes == 8


def test_tolerance() -> None:
    def held(predicted: StepFigures | None, tolerance: float) -> None:
        document = compare.compare(predicted, figures(1.0), program_sha256="p", machine="m")
        compare.check_tolerance(document, tolerance)

    held(figures(1.1), 0.2)
    with refused(OutOfTolerance, got="+30.0 %", wanted="20.0 %"):
        held(figures(1.3), 0.2)
    with refused(OutOfTolerance, got=None, hint="memo-sim what-if -o"):
        held(None, 0.2)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a plan, its predicted trace, and a measured step."""
    folder = tmp_path_factory.mktemp("measured")
    plan = write_plan(folder / "plan.json", prediction=predicted())
    outcome = run(plan, RunOptions(steps=2))
    assert outcome is not None
    codec.write(folder / "measured.json", outcome.measured)
    codec.write(folder / "plan.trace.json", msgspec.structs.replace(outcome.measured, origin="predicted"))
    return folder


def test_files_are_compared_by_lane_and_kind(measured: Path) -> None:
    comparison, traces = compare.compare_files(measured / "plan.json", measured / "measured.json")
    assert [t.origin for t in traces] == ["predicted", "measured"]
    assert comparison.ratio is not None
    assert comparison.ratio.ops["linear"] == pytest.approx(1.0)
    assert comparison.measured.moved_bytes.d2h > 0
    assert set(comparison.measured.lanes) == {"compute", "d2h", "h2d"}
    names = {e["args"]["name"] for e in chrome_trace(traces)["traceEvents"] if e["name"] == "process_name"}
    assert names == {"rank 0 predicted", "rank 0 measured"}


def test_a_trace_may_stand_for_its_plan(measured: Path) -> None:
    comparison, _ = compare.compare_files(measured / "plan.trace.json", measured / "measured.json")
    assert comparison.ratio is not None
    assert comparison.ratio.step_s == 1.0
    assert comparison.ratio.peak_device_bytes == 1.0
    assert comparison.measured.moved_bytes is None
    assert "moved" not in comparison_table(comparison)


def test_the_measured_peak_and_bytes_are_the_programs(measured: Path) -> None:
    (program,) = lower(byte_decisions())
    trace = codec.read(measured / "measured.json", Trace)
    outcome = compare.figures_of_trace(trace, compare.moved_bytes(program))
    assert outcome.moved_bytes is not None
    assert outcome.moved_bytes.d2h == outcome.moved_bytes.h2d
    assert trace.spans.ids == program.ids()


def test_traces_of_other_programs_are_refused(measured: Path, tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.json", byte_decisions(seq_tokens=512), predicted())
    with refused(BadInput, where="measured.json", hint="memo-exec profile"):
        compare.compare_files(plan, measured / "measured.json")
    codec.write(tmp_path / "plan.trace.json", codec.read(measured / "measured.json", Trace))
    with refused(BadInput, where="plan.trace.json", hint="memo-sim what-if -o"):
        compare.predicted_trace(plan, plan_of(byte_decisions(seq_tokens=512)))


def test_what_has_the_traces_name_and_is_no_file_is_refused(tmp_path: Path) -> None:
    """Without a trace nothing is compared, so a broken link in its place must not pass for none."""
    plan = write_plan(tmp_path / "plan.json", byte_decisions(seq_tokens=512), predicted())
    assert compare.predicted_trace(plan, plan_of(byte_decisions(seq_tokens=512))) is None
    (tmp_path / "plan.trace.json").symlink_to("nothing")
    with refused(BadInput, where="plan.trace.json"):
        compare.predicted_trace(plan, plan_of(byte_decisions(seq_tokens=512)))
