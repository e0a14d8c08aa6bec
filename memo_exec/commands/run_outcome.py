"""What a run reports at its end: the comparison with the prediction, experts' load, and remarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from memo_exec.commands import compare
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.interpreter.record import lane_busy_s, measured_trace
from memo_exec.interpreter.rendezvous import without_waiting
from memo_exec.machine.machine import Machine
from memo_exec.training.dataset import Dataset
from memo_exec.training.loop import Training
from memo_exec.training.rollouts import MadeUp
from memo_sim.contract.comparison import Comparison, StepFigures
from memo_sim.contract.documents import attended_share, packed
from memo_sim.contract.expert_load import LayerLoad, MeasuredLoad
from memo_sim.contract.trace import Trace
from memo_sim.contract.units import counted, format_percent
from memo_sim.program.layout.expert_load import nearest_load, shown_load
from memo_sim.program.lower import lower
from memo_sim.views.busy import busy_by

WARM_UPS = 2
"""How many first steps are not measured: they touch memory for the first time, and libraries choose algorithms."""


@dataclass(frozen=True)
class Outcome:
    """The results of a run: the comparison, both timelines, and how the run ended."""

    comparison: Comparison
    measured: Trace
    predicted: Trace | None
    stopped_by: int
    """The number of the signal that ended the run early; 0 when it played all its steps."""
    steps: int
    """How many steps have ended, including those before a resume."""
    expert_load: MeasuredLoad | None
    """The rows of every expert on all ranks, since this run began or was resumed; None for a model without experts."""
    rank: int = 0
    """The rank whose timeline ``measured`` is."""


def outcome_of(training: Training, machine: Machine, plan_path: Path, predicted: Trace | None) -> Outcome:
    """Return the results of a run that has ended, with the slowest rank's step. Every rank calls it."""
    plan, program, world = training.plan, training.interpreter.program, training.world
    record, times_s, steps_measured = training.median_record(WARM_UPS)
    programs = lower(plan.decisions)
    record = without_waiting(record, programs, training.interpreter.mesh, world)
    measured = measured_trace(
        program, record, program_sha256=plan.program_sha256, rank=world.rank, world_size=world.size
    )
    every = world.gathered(
        StepFigures(
            step_s=record.step_s,
            peak_device_bytes=record.peak_device_bytes,
            moved_bytes=record.moved,
            lanes=lane_busy_s(program, record),
            ops=busy_by(measured)[1],
        )
    )
    slowest = times_s.index(max(times_s))
    stage = programs[MeshCoordinates(plan.decisions.layout, slowest).at("pp")] if len(programs) > 1 else None
    trace = compare.predicted_trace(plan_path, plan, slowest)
    peaks = [figures.peak_device_bytes for figures in every]
    comparison = compare.compare(
        compare.figures_of_prediction(plan.prediction, trace, stage),
        msgspec.structs.replace(every[slowest], peak_device_bytes=max(peaks)),
        program_sha256=plan.program_sha256,
        machine=machine_text(machine),
        losses=training.losses,
        grad_norms=training.grad_norms,
        steps_measured=steps_measured,
    )
    if world.size > 1:
        comparison = msgspec.structs.replace(comparison, step_s_by_rank=times_s, peak_device_bytes_by_rank=peaks)
    if (below := training.interpreter.below) is not None:
        comparison = msgspec.structs.replace(comparison, allocator=dataclasses.asdict(below.report()))
    load = measured_load(training)
    return Outcome(comparison, measured, predicted, training.stopped_by, training.step, load, world.rank)


def remarks(training: Training, *, debug: bool) -> Iterator[str]:
    """Yield what a run says when its last step has been played."""
    interpreter = training.interpreter
    if interpreter.below is not None:
        yield interpreter.below.report().line()
    if interpreter.decisions.model.mixture is not None:
        yield load_of_experts(interpreter)
    if training.overflow is not None:
        yield training.overflow.line()
    if interpreter.decisions.documents is not None and training.records:
        yield documents_of(training)
    if debug:
        steps = counted(len(training.records), "step")
        yield f"debug: {steps} without a fault; the times include the checks, so do not compare them"


def documents_of(training: Training) -> str:
    """Return how many documents sequences had, and which share of a whole sequence's pairs they attended."""
    decisions = training.plan.decisions
    assert decisions.documents is not None
    length, expected = decisions.seq_tokens, packed(decisions.documents, decisions.seq_tokens)
    planned = sum(map(len, expected)) / len(expected)
    share = format_percent(training.attended / (training.sequences * length**2))
    pieces = training.pieces / training.sequences
    wanted = format_percent(attended_share(decisions.documents, length))
    data = training.dataset
    drawn = isinstance(data, MadeUp) or (isinstance(data, Dataset) and data.ends is None)
    source = "lengths drawn from the plan's" if drawn else "the file's"
    return (
        f"documents: {pieces:,.1f} a sequence, {share} of its pairs attended (planned for {planned:,.1f} and {wanted});"
        f" {source}"
    )


def load_of_experts(interpreter: Interpreter) -> str:
    """Return how uneven the load of this rank's experts was, and the option that prices it."""
    experts, loads = interpreter.decisions.model.mixture, interpreter.context.loads.sum(0).tolist()
    assert experts is not None
    fullest = loads[0] * experts.count / sum(loads)
    near, planned = nearest_load(experts, loads), interpreter.decisions.expert_load
    asked = "as planned" if near == planned else f"planned as {shown_load(planned)}; --expert-load {near} prices it"
    whose = " of the first rank" if interpreter.decisions.layout.expert_ranks > 1 else ""
    text = f"experts: a layer's fullest got {fullest:.2f} times the mean of its rows{whose}, nearest to {near}"
    return f"{text} ({asked})"


def measured_load(training: Training) -> MeasuredLoad | None:
    """Return the rows of every expert on all ranks; None for a model without experts. Every rank calls it.

    Where tensor-parallel ranks route the same tokens, the first of them counts.
    """
    interpreter, model = training.interpreter, training.plan.decisions.model
    if model.mixture is None:
        return None
    whole = training.plan.decisions.layout.whole_experts
    context, leads = interpreter.context, whole or interpreter.mesh.at("tp") == 0
    own = [each.tolist() if leads else [] for each in (context.rows, context.loads)]
    gathered = [each for each in training.world.gathered(own) if each[0]]
    rows, loads = (torch.tensor([each[which] for each in gathered]).sum(0).tolist() for which in (0, 1))
    return MeasuredLoad(
        model=model.name,
        experts=model.mixture.count,
        per_token=model.mixture.per_token,
        steps=max(1, len(training.records)),
        layers=[
            LayerLoad(layer=number, rows=rows[number], by_fullness=loads[number])
            for number in range(model.layers)
            if sum(rows[number])
        ],
    )


def machine_text(machine: Machine) -> str:
    """Return a short description of the machine and the version of torch."""
    threads = f", {counted(machine.compute_threads, 'compute thread')}" if machine.device == "cpu" else ""
    threads += f", {machine.sharing} ranks" if machine.sharing > 1 else ""
    return f"{machine.name} ({machine.device}{threads}), torch {torch.__version__}"
