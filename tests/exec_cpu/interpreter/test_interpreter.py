"""Tests the interpreter: lanes, their order, step records, and the plans that it refuses."""

import threading
import time
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from memo_exec.interpreter import interpreter as interpreters
from memo_exec.interpreter import lanes
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.interpreter.record import lane_busy_s, measured_trace
from memo_exec.kernels import KERNELS, Call, StepScalars
from memo_exec.training.checkpoint import state_of
from memo_sim.contract import codec
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.plan import Kernels, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.lower import lower
from tests.exec_cpu.plans import placed
from tests.exec_cpu.small import batch, decide, gpt, llama, one_step, play, scalars, states, wrapped
from tests.refusals import refused

SWAP = decide(gpt(layers=4), swapped_tokens=256)


def slow_copies(op: str, seconds: float) -> dict[str, Any]:
    return {**KERNELS, op: wrapped(KERNELS[op], lambda call: time.sleep(seconds))}


def test_lanes_are_fifo_and_edges_hold() -> None:
    record, _ = one_step(SWAP)
    program = lower(SWAP)[0]
    columns = expand(program)
    edges = derive_edges(columns)
    assert len(edges.producer) > 20
    assert (record.end_s[edges.producer] <= record.start_s[edges.consumer]).all()
    for lane in Lane:
        on_lane = columns.lane == lane
        start_s, end_s = record.start_s[on_lane], record.end_s[on_lane]
        assert (end_s[:-1] <= start_s[1:]).all()
        assert (start_s <= end_s).all()
    assert record.step_s == record.end_s.max()


def test_copies_run_beside_compute() -> None:
    record, _ = one_step(SWAP, kernels=slow_copies("d2h", 0.01))
    columns = expand(lower(SWAP)[0])
    copying = np.flatnonzero(columns.lane == Lane.D2H)
    computing = np.flatnonzero(columns.lane == Lane.COMPUTE)
    beside = [
        i
        for i in computing
        if ((record.start_s[copying] < record.start_s[i]) & (record.end_s[i] < record.end_s[copying])).any()
    ]
    assert beside


def test_a_stalled_lane_says_what_it_waits_for() -> None:
    record, _ = one_step(SWAP, kernels=slow_copies("d2h", 0.02))
    stalled = {wait.instruction: wait for wait in record.waits}
    wait = stalled["m0/s0/l2/fwd/norm1"]
    assert wait.waits_for == "m0/s0/l0/off/norm1_stats"
    assert wait.seconds > 0.001
    copies = sum(instruction.lane is Lane.D2H for _, instruction in lower(SWAP)[0].walk())
    assert record.step_s >= 0.02 * copies


def test_full_recompute_waits_for_nothing() -> None:
    record, _ = one_step(decide(gpt(), recompute="full"))
    assert record.waits == ()
    assert record.moved.d2h == record.moved.h2d == record.peak_host_bytes == 0


def test_each_lane_has_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "available_cores", lambda: 4)
    seen: dict[Lane, set[int]] = defaultdict(set)

    def before(call: Call) -> None:
        assert torch.is_inference_mode_enabled()
        seen[call.instruction.lane].add(torch.get_num_threads())

    own = torch.get_num_threads()
    one_step(SWAP, kernels={op: wrapped(k, before) for op, k in KERNELS.items()})
    assert seen == {Lane.COMPUTE: {3}, Lane.D2H: {1}, Lane.H2D: {1}}
    assert torch.get_num_threads() == own


def test_a_failing_kernel_stops_all_lanes_and_the_next_step_plays() -> None:
    broken = False

    def before(call: Call) -> None:
        if broken and call.instruction.name == "fwd/ffn_up":
            raise ZeroDivisionError

    batches = batch(SWAP)
    with play(SWAP, kernels={**KERNELS, "linear": wrapped(KERNELS["linear"], before)}) as interpreter:
        first = interpreter.run_step(batches, scalars(batches, lr=0.0))
        broken = True
        with pytest.raises(ZeroDivisionError):
            interpreter.run_step(batches, scalars(batches, lr=0.0))
        broken = False
        again = interpreter.run_step(batches, scalars(batches, lr=0.0))
    assert again.loss == first.loss
    assert again.peak_device_bytes == first.peak_device_bytes


def test_a_kernel_that_resizes_its_operand_is_refused() -> None:
    def resize(call: Call) -> None:
        call["out"].resize_(1)

    with pytest.raises(ValueError, match=r"fwd/norm1\b.*layer_norm"):
        one_step(decide(gpt()), kernels={**KERNELS, "layer_norm": resize})


def test_a_batch_of_another_shape_is_refused() -> None:
    decisions = decide(gpt())
    with play(decisions) as interpreter:
        with pytest.raises(ValueError, match=r"\b2 micro-batches .*\b1\b"):
            interpreter.run_step(batch(decisions) * 2, StepScalars())
        with pytest.raises(ValueError, match=r"input\.ids .*micro-batch 0 .*\b255\b.*\b256\b"):
            interpreter.run_step([(torch.zeros(255), torch.zeros(256))], StepScalars())


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"layout": Layout(tp=2)}, {"where": "decisions.layout", "got": "1", "wanted": "2", "hint": "torchrun"}),
        (
            {"kernels": Kernels(attention="flash2")},
            {"where": "decisions.kernels.attention", "got": "flash2", "wanted": "torch-flash-cpu"},
        ),
    ],
)
def test_plans_of_other_machines_are_refused(changes: dict[str, Any], fields: dict[str, str]) -> None:
    decisions = decide(gpt(), **changes)
    with refused(CannotRun, **fields):
        Interpreter(decisions, lower(decisions)[0])


def test_an_operator_without_a_kernel_is_refused() -> None:
    decisions = decide(gpt())
    kernels = {op: kernel for op, kernel in KERNELS.items() if op != "gelu"}
    with refused(CannotRun, got="gelu"):
        Interpreter(decisions, lower(decisions)[0], kernels=kernels)


def test_states_are_what_training_continues_from() -> None:
    with play(decide(llama(), states="host", dtype="bf16")) as interpreter:
        found = state_of(interpreter)
        assert {name.split("/")[0] for name in found} == {"params", "master", "moment1", "moment2"}
        for state, dtype in (("params", torch.bfloat16), ("master", torch.float32)):
            (held,) = found[f"{state}/layer.2/qkv.weight"]
            assert held.view.dtype == dtype
            assert held.view.shape == held.whole
            assert held.view.data_ptr() == interpreter.buffer(f"{state}.layer", 2).data_ptr()
        with pytest.raises(KeyError):
            interpreter.buffer("params.tail")


@pytest.mark.parametrize("kind", ["params", "states"])
def test_a_step_repeats_from_saved_states(kind: str) -> None:
    decisions = decide(llama(), states="host" if kind == "states" else "fp32")
    batches = [batch(decisions, seed=s) for s in range(4)]
    with play(decisions) as interpreter:
        for step in (0, 1):
            interpreter.run_step(batches[step], scalars(batches[step], step=step + 1))
        saved = {name: value.clone() for name, value in states(interpreter).items()}
        wanted = [interpreter.run_step(batches[s], scalars(batches[s], step=s + 1)).loss for s in (2, 3)]
    with play(decisions) as interpreter:
        for name, value in states(interpreter).items():
            value.copy_(saved[name])
        found = [interpreter.run_step(batches[s], scalars(batches[s], step=s + 1)).loss for s in (2, 3)]
    assert found == wanted


def test_measured_trace_has_the_programs_ids() -> None:
    record, _ = one_step(SWAP)
    program = lower(SWAP)[0]
    trace = measured_trace(program, record)
    assert trace.origin == "measured"
    assert trace.spans.ids == program.ids()
    assert trace.program_sha256 == program.sha256
    assert codec.encode(trace)
    busy = lane_busy_s(program, record)
    assert set(busy) == {"compute", "d2h", "h2d"}
    assert 0 < busy["compute"] <= record.step_s


def test_a_lane_that_waits_for_another_rank_does_not_keep_a_failure_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank may wait for this one, so the step raises its error and the process can end."""
    monkeypatch.setattr(interpreters, "STUCK_S", 0.1)
    begun, never, layers = threading.Event(), threading.Event(), []

    def waits(call: Call) -> None:
        del call
        begun.set()
        never.wait()

    def fails(call: Call) -> None:
        layers.append(call)
        if len(layers) > 1:  # the offload of the first layer has been issued
            begun.wait()
            raise ZeroDivisionError
        KERNELS["attention"](call)

    decisions = decide(gpt(), recompute="tokenwise", swapped_tokens=128)
    kernels = {**KERNELS, "d2h": waits, "attention": fails}
    interpreter = play(decisions, kernels=kernels, groups={(Lane.TP, "tp"): None})
    batches = batch(decisions)
    with pytest.raises(ZeroDivisionError):
        interpreter.run_step(batches, scalars(batches))
    interpreter.close()
    never.set()


def test_a_device_that_has_failed_does_not_hide_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpinning waits for the device, which raises the same failure again."""

    def fails() -> None:
        raise RuntimeError("CUDA error")

    def closing(error: Exception | None) -> None:
        with play(decide(gpt())) as interpreter:
            monkeypatch.setattr(interpreter.slab, "close", fails)
            if error is not None:
                raise error

    with pytest.raises(ZeroDivisionError):
        closing(ZeroDivisionError())
    with pytest.raises(RuntimeError, match="CUDA error"):
        closing(None)


@pytest.mark.parametrize("arena", [False, True])
def test_a_step_makes_no_call_and_no_view_of_what_keeps_its_address(
    arena: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is the same in every step is prepared before the first one: all of an arena, all of a single lane."""
    decisions = decide(gpt(), memory_policy="planned") if arena else decide(gpt())
    batches = batch(decisions)
    with play(decisions, placement=placed(decisions) if arena else None) as interpreter:
        seen: list[int] = []
        monkeypatch.setattr(interpreters, "Call", lambda *values, **named: pytest.fail("a step made a call"))
        monkeypatch.setattr(interpreter.store, "view", lambda *values: seen.append(values[0]))
        monkeypatch.setattr(interpreter, "_load", lambda given: None)
        monkeypatch.setattr(interpreter, "_record", lambda: None)
        interpreter.run_step(batches, scalars(batches))
        assert not seen


@pytest.mark.parametrize(("role", "debug"), [("out", False), ("x", True)])
def test_a_kernel_that_resizes_an_operand_is_refused(role: str, debug: bool) -> None:
    """Written operands are checked in every step; operands that are only read, in debug mode."""

    def resizing(call: Call) -> None:
        KERNELS["linear"](call)
        call[role].resize_(2 * call[role].numel())

    with pytest.raises(ValueError, match="the kernel of linear moved or resized an operand"):
        one_step(decide(gpt()), kernels={**KERNELS, "linear": resizing}, debug=debug)
