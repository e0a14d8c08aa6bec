"""Compares a measured step with the prediction: the step, its lanes, its kinds of instruction, and both timelines.

    ratio = predicted / measured         error = ratio - 1

Nothing is priced here. The plan contains its prediction, and its predicted trace is in the same folder (``tiny.json``
-> ``tiny.trace.json``). Busy times by kind of instruction come from that trace.

A rank of a pipeline is compared with the trace of its own stage (``tiny.trace.stage1.json``). The plan's memory is
compared with the rank that uses the most.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from memo_exec.distributed.mesh import MeshCoordinates
from memo_sim.contract import codec
from memo_sim.contract.comparison import Comparison, Ratio, StepFigures
from memo_sim.contract.errors import BadInput, OutOfTolerance
from memo_sim.contract.plan import MovedBytes, Plan, Prediction
from memo_sim.contract.trace import Trace
from memo_sim.contract.units import format_percent
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Copy
from memo_sim.program.lower import lower
from memo_sim.views.busy import busy_by

COPY_LANES = {Lane.D2H: "d2h", Lane.H2D: "h2d"}


def trace_path(plan: Path, stage: int = 0) -> Path:
    """Return the path of a plan's predicted trace of a pipeline stage, in the plan's folder."""
    return plan.with_name(f"{plan.stem}.trace{f'.stage{stage}' if stage else ''}.json")


def predicted_trace(plan_path: Path, plan: Plan, rank: int = 0) -> Trace | None:
    """Return the predicted trace of the pipeline stage of ``rank``, None when there is no file.

    Raises:
        BadInput: when the trace is of another program than the plan, or what has its name is no file.
    """
    path = trace_path(plan_path, MeshCoordinates(plan.decisions.layout, rank).at("pp"))
    if not os.path.lexists(path):
        return None
    trace = codec.read(path, Trace)
    if trace.program_sha256 != plan.program_sha256:
        raise BadInput(
            "the trace beside the plan is of another program",
            where=str(path),
            got=trace.program_sha256[:12],
            wanted=plan.program_sha256[:12],
            hint="write plan and trace again with memo-sim what-if -o, or remove the trace",
        )
    return trace


def moved_bytes(program: Program) -> MovedBytes:
    """Return the bytes that a program's copy instructions move in a step."""
    moved = {"d2h": 0, "h2d": 0}
    for _, instruction in program.walk():
        if isinstance(instruction.work, Copy) and instruction.lane in COPY_LANES:
            moved[COPY_LANES[instruction.lane]] += instruction.work.bytes
    return MovedBytes(**moved)


def figures_of_trace(trace: Trace, moved: MovedBytes | None = None) -> StepFigures:
    """Return the figures of a trace. ``moved`` gives the bytes copied, which a trace does not contain."""
    lanes, ops = busy_by(trace)
    curves = list(trace.device_memory.bytes_by_class.values())
    return StepFigures(
        step_s=trace.step_s,
        peak_device_bytes=max((sum(at) for at in zip(*curves, strict=True)), default=0),
        moved_bytes=moved,
        lanes=lanes,
        ops=ops,
    )


def figures_of_prediction(
    prediction: Prediction | None, trace: Trace | None, stage: Program | None = None
) -> StepFigures | None:
    """Return a plan's predicted figures, None when it has no prediction or no predicted step time.

    When there are several pipeline stages, ``stage`` is the program of the stage whose trace is ``trace``.
    """
    if prediction is None or prediction.step_s is None:
        return None
    lanes, ops = busy_by(trace) if trace is not None else ({}, {})
    return StepFigures(
        step_s=prediction.step_s,
        peak_device_bytes=prediction.peak_device_bytes,
        moved_bytes=prediction.moved_bytes if stage is None else moved_bytes(stage),
        lanes=prediction.lanes if stage is None else lanes,
        ops=ops,
    )


def ratio_of(predicted: StepFigures, measured: StepFigures) -> Ratio | None:
    """Return predicted / measured, None when nothing was measured. Entries with a measured value of 0 are left out."""
    if not measured.step_s or not measured.peak_device_bytes:
        return None
    predicted_moved, measured_moved = (
        {way: getattr(side.moved_bytes, way, 0) for way in ("d2h", "h2d")} for side in (predicted, measured)
    )
    return Ratio(
        step_s=predicted.step_s / measured.step_s,
        peak_device_bytes=predicted.peak_device_bytes / measured.peak_device_bytes,
        moved_bytes=_ratios(predicted_moved, measured_moved),
        lanes=_ratios(predicted.lanes, measured.lanes),
        ops=_ratios(predicted.ops, measured.ops),
    )


def _ratios(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    return {name: value / measured[name] for name, value in predicted.items() if measured.get(name)}


def compare(
    predicted: StepFigures | None,
    measured: StepFigures,
    *,
    program_sha256: str,
    machine: str,
    losses: list[float] | None = None,
    grad_norms: list[float] | None = None,
    steps_measured: int = 1,
) -> Comparison:
    """Return the ``memo.comparison/1`` document of a predicted and a measured step."""
    return Comparison(
        program_sha256=program_sha256,
        machine=machine,
        predicted=predicted,
        measured=measured,
        ratio=ratio_of(predicted, measured) if predicted is not None else None,
        losses=losses or [],
        grad_norms=grad_norms or [],
        steps_measured=steps_measured,
    )


def check_tolerance(comparison: Comparison, tolerance: float) -> None:
    """Check that the error of the predicted step time is within ``tolerance``, a fraction of the measured one.

    Raises:
        OutOfTolerance: when the error is larger, or there is no prediction.
    """
    if comparison.ratio is None:
        raise OutOfTolerance(
            "there is no predicted step time to compare the measured one with",
            hint="make the plan with memo-sim what-if -o, for this machine's cluster or profile",
        )
    error = comparison.ratio.step_s - 1
    if abs(error) > tolerance:
        raise OutOfTolerance(
            "predicted and measured step time differ by more than the tolerance",
            got=format_percent(error, signed=True),
            wanted=f"within {format_percent(tolerance)}",
            hint="the table shows where they differ; run memo-exec calibrate on this machine, then plan again",
        )


def compare_files(predicted_path: Path, measured_path: Path) -> tuple[Comparison, list[Trace]]:
    """Return the comparison of a plan (or a predicted trace) with a measured trace, and both traces if they exist.

    Raises:
        BadInput: when a file is not such a document, or the two are of different programs.
    """
    measured = codec.read(measured_path, Trace)
    moved: MovedBytes | None = None
    raw = codec.read_raw(predicted_path)
    if codec.schema_of(raw, where=str(predicted_path)) == Plan.__struct_config__.tag:
        plan = codec.decode(raw, Plan, where=str(predicted_path))
        program_sha256 = plan.program_sha256
        trace = predicted_trace(predicted_path, plan, measured.rank)
        programs, stage = lower(plan.decisions), MeshCoordinates(plan.decisions.layout, measured.rank).at("pp")
        predicted = figures_of_prediction(plan.prediction, trace, programs[stage] if len(programs) > 1 else None)
        if predicted is not None and trace is not None and len(programs) > 1:
            peak = figures_of_trace(trace).peak_device_bytes
            predicted = msgspec.structs.replace(predicted, peak_device_bytes=peak)
        moved = moved_bytes(programs[stage])
    else:
        trace = codec.decode(raw, Trace, where=str(predicted_path))
        program_sha256 = trace.program_sha256
        predicted = figures_of_trace(trace)
    if program_sha256 != measured.program_sha256:
        raise BadInput(
            "the measured trace is of another program",
            where=str(measured_path),
            got=measured.program_sha256[:16],
            wanted=program_sha256[:16],
            hint="measure this plan with memo-exec profile PLAN",
        )
    comparison = compare(
        predicted,
        figures_of_trace(measured, moved),
        program_sha256=program_sha256,
        machine="the machine of the measured trace" if measured.origin == "measured" else "another prediction",
    )
    return comparison, [trace, measured] if trace is not None else [measured]
