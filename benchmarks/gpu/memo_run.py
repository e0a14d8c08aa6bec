"""Runs the steps of a memo plan, times them as the rivals' steps are timed, and compares them with the prediction."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import torch

from benchmarks.gpu.case import SEED, SEQUENCES, Case, named
from benchmarks.gpu.plain_run import peaks
from benchmarks.gpu.row import Row, mfu_of, row_of, timed
from memo_exec.commands import compare
from memo_exec.commands.run_outcome import machine_text
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.interpreter.record import lane_busy_s, measured_trace
from memo_exec.machine import preflight
from memo_exec.machine.machine import Machine, this_machine
from memo_exec.machine.placement_file import checked_placement
from memo_exec.training import weights
from memo_exec.training.dataset import load_dataset
from memo_exec.training.hyperparameters import Hyperparameters
from memo_exec.training.loop import Training
from memo_sim.contract import codec
from memo_sim.contract.comparison import Comparison, StepFigures
from memo_sim.contract.errors import BadInput
from memo_sim.contract.plan import Plan
from memo_sim.program.arena.library_workspaces import beside_arena, results_bytes
from memo_sim.program.ir.instruction import Lane
from memo_sim.views.busy import busy_by


def measure(case: Case) -> Row:
    """Run a case's plan and return its row.

    Raises:
        BadInput: if the plan is invalid, or if its model, length or dtype differs from the case's.
        CannotRun: if this machine cannot run the plan.
        torch.OutOfMemoryError: if the device is too small although the plan predicts that it fits.
    """
    assert case.model is not None
    path = Path(case.plan)
    plan = codec.read(path, Plan)
    _check(plan, case)
    program = preflight.checked_program(plan, where=case.plan)
    machine = this_machine()
    placement = checked_placement(plan, program, path)
    preflight.check(plan.decisions, program, machine, placement)
    dataset = load_dataset(Path(case.data), case.model.vocab)
    device = torch.device(machine.device)
    with Interpreter(plan.decisions, program, device=device, placement=placement) as interpreter:
        weights.initialize(interpreter, SEED, draw_on=device)
        training = Training(plan, interpreter, dataset, Hyperparameters(), SEED)
        step_s = []
        for step in range(1, case.warm_ups + case.steps + 1):
            if step == case.warm_ups + 1 and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            figure = training.play_step()
            if step > case.warm_ups:
                step_s.append(time.perf_counter() - begin)
        comparison = _comparison(training, case, machine, path)
        row = msgspec.structs.replace(
            timed(row_of(case, "ok"), case, step_s, machine.name),
            peak_device_bytes=comparison.measured.peak_device_bytes,
            host_bytes=interpreter.slab.bytes,
            stalls_s=figure.stalls_s,
        )
        row = msgspec.structs.replace(row, **peaks(device))
    beside = results_bytes(program) if beside_arena(plan.decisions) else 0
    return _with_prediction(row, case, plan, comparison, beside)


def _check(plan: Plan, case: Case) -> None:
    decided = plan.decisions
    got = (decided.model, decided.seq_tokens, decided.dtype, decided.micro_batch, decided.global_batch)
    wanted = (case.model, case.seq_tokens, case.dtype, SEQUENCES, SEQUENCES)
    if got != wanted:
        raise BadInput(
            "the plan has another model, length, dtype or batch than this case",
            where=case.plan,
            hint="delete the plan file; the benchmark then makes it again",
        )


def _comparison(training: Training, case: Case, machine: Machine, path: Path) -> Comparison:
    """Compare the median step after the warm-up with the prediction."""
    plan, program = training.plan, training.interpreter.program
    record, _, steps_measured = training.median_record(case.warm_ups)
    return compare.compare(
        compare.figures_of_prediction(plan.prediction, compare.predicted_trace(path, plan)),
        StepFigures(
            step_s=record.step_s,
            peak_device_bytes=record.peak_device_bytes,
            moved_bytes=record.moved,
            lanes=lane_busy_s(program, record),
            ops=busy_by(measured_trace(program, record))[1],
        ),
        program_sha256=plan.program_sha256,
        machine=machine_text(machine),
        losses=training.losses,
        grad_norms=training.grad_norms,
        steps_measured=steps_measured,
    )


def _with_prediction(row: Row, case: Case, plan: Plan, comparison: Comparison, beside_bytes: int) -> Row:
    """Return the row with the plan's predictions; libraries allocate ``beside_bytes`` outside the arena."""
    found, decided = plan.prediction, plan.decisions
    row = msgspec.structs.replace(
        row,
        alpha=decided.alpha,
        losses=comparison.losses,
        grad_norms=comparison.grad_norms,
        comparison=comparison,
        backend=named(decided.kernels),
    )
    if found is None or found.step_s is None:
        return row
    return msgspec.structs.replace(
        row,
        predicted_device_bytes=found.peak_device_bytes + beside_bytes,
        predicted_mfu=mfu_of(case, found.step_s, this_machine().name),
        predicted_host_bytes=found.peak_host_bytes_per_node,
        predicted_stalls_s=sum(stall.seconds for stall in found.stalls if stall.lane == Lane.COMPUTE.label),
        profile=found.hardware,
    )
