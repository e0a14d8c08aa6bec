"""Tests that no instruction allocates more memory outside the arena than the program declares.

torch's profiler measures the allocations of each instruction.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import msgspec
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from memo_exec.interpreter import lanes
from memo_exec.kernels import KERNELS, LIBRARY_SCRATCH, Call, Kernel
from memo_exec.machine.library_scratch import MEASURED, library_scratch
from memo_exec.machine.memory_budget import LIBRARIES, RESULTS, TILE_BYTES, TILES, needs_of
from memo_exec.memory.arena import ArenaStore
from memo_exec.memory.binding import schedule
from memo_sim.contract.experts import Experts
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.lower import lower
from tests.exec_cpu.kernels.hand_call import allocations
from tests.exec_cpu.machine.test_preflight import CPU
from tests.exec_cpu.plans import placed
from tests.exec_cpu.small import batch, decide, gpt, llama, play, scalars
from tests.pairs import covering

MARK = "instruction "

NUMBER_BYTES = 16
"""Allocations up to this size are ignored: torch turns Python numbers into tensors of one element."""

POLICIES: dict[str, dict[str, Any]] = {
    "keep": {},
    "alpha 0.5": {"recompute": "tokenwise", "swapped_tokens": 512},
    "full swap": {"swapped_tokens": 1024},
    "full recompute": {"recompute": "full"},
}
WIDE: dict[str, Any] = {"layers": 2, "hidden": 512, "heads": 8, "head_dim": 64, "ffn_hidden": 512}
MODELS = {"gpt": gpt(**WIDE, kv_heads=8, max_positions=1024), "llama": llama(**WIDE, kv_heads=2, qk_norm=True)}
MODELS["experts"] = msgspec.structs.replace(MODELS["llama"], experts=Experts(count=4, per_token=2, hidden=128))


@pytest.fixture(autouse=True)
def one_compute_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention use one tile, for any number of cores."""
    monkeypatch.setattr(lanes, "available_cores", lambda: 2)


def long(model: str, **changes: Any) -> Decisions:
    """Return decisions whose Q is twice a tile of the CPU's attention (fp32), so that a hidden copy of it is found."""
    return decide(MODELS[model], seq_tokens=1024, micro_batch=1, **changes)


class Outside:
    """Plays the compute lane's kernels, and one step of them under torch's profiler."""

    def __init__(self, kernels: Mapping[str, Kernel] = KERNELS) -> None:
        self.kernels = {op: self._watched(kernel) for op, kernel in kernels.items()}
        self.calls: list[Call] = []
        self.expected = 0
        """Instructions of the step to profile; 0 means that the current step is not profiled."""

    def _watched(self, kernel: Kernel) -> Kernel:
        def call(arguments: Call) -> None:
            if not self.expected or arguments.instruction.lane is not Lane.COMPUTE:
                kernel(arguments)
                return
            if not self.calls:  # the profiler sees only the thread that starts it, so the lane's thread does
                self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
                self.profile.start()
            with record_function(f"{MARK}{len(self.calls)}"):
                kernel(arguments)
            self.calls.append(arguments)
            if len(self.calls) == self.expected:
                self.profile.stop()

        return call

    def taken(self) -> list[tuple[Call, list[int]]]:
        """Return what each instruction allocated and freed, without numbers; check that nothing falls in between."""
        assert self.profile.profiler is not None
        events = sorted(self.profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        marks = [event for event in events if event.name().startswith(MARK)]
        ends = {int(mark.name().removeprefix(MARK)): mark.start_ns() + mark.duration_ns() for mark in marks}
        assert len(ends) == len(self.calls) == self.expected
        starts = [mark.start_ns() for mark in marks]
        changes: list[list[int]] = [[] for _ in range(self.expected)]
        for event in events:
            if event.name() == "[memory]" and abs(event.nbytes()) > NUMBER_BYTES:
                number = bisect_right(starts, event.start_ns()) - 1
                assert number >= 0
                assert event.start_ns() <= ends[number]
                changes[number].append(event.nbytes())
        return list(zip(self.calls, changes, strict=True))


def in_all(changes: list[int]) -> int:
    """Return the bytes that were allocated, whether or not they were freed in between."""
    return sum(size for size in changes if size > 0)


def at_once(changes: list[int]) -> int:
    """Return the most bytes that were allocated at the same time."""
    return max(accumulate(changes, initial=0))


def watched(
    decisions: Decisions, kernels: Mapping[str, Kernel] = KERNELS, taken: Callable[[list[int]], int] = in_all
) -> list[tuple[Call, int, int]]:
    """Return every compute instruction of the second step, the bytes it allocated, and those its library declares."""
    outside = Outside(kernels)
    with play(decisions, placement=placed(decisions), kernels=outside.kernels) as interpreter:
        batches = batch(decisions)
        interpreter.run_step(batches, scalars(batches, lr=0.0))
        plan = interpreter.schedule
        outside.expected = len(plan.lanes[Lane.COMPUTE])
        interpreter.run_step(batches, scalars(batches, lr=0.0))
    declared = {
        bound.instruction: sum(plan.family(t.buffer).bytes for t in bound.touches if t.buffer in plan.library)
        for bound in plan.lanes[Lane.COMPUTE]
    }
    return [(call, taken(changes), declared[call.instruction]) for call, changes in outside.taken()]


def beyond_declared(found: list[tuple[Call, int, int]]) -> dict[str, int]:
    """Return, by operator, the most bytes that one of its instructions allocated beyond its declaration."""
    most: dict[str, int] = {}
    for call, size, declared in found:
        op = call.instruction.op
        most[op] = max(most.get(op, 0), size - declared)
    return most


@pytest.mark.parametrize(("model", "policy"), covering(MODELS, POLICIES))
def test_after_the_first_step_only_declared_workspaces_are_allocated(model: str, policy: str) -> None:
    """An instruction allocates nothing, or what the program declares for a library's results and a tile."""
    check(watched(long(model, **POLICIES[policy])), TILE_BYTES["fp32"])


def check(found: list[tuple[Call, int, int]], tile_bytes: int) -> None:
    most = beyond_declared(found)
    library = {op: most.pop(op) for op in ("attention", "attention.bwd")}
    assert set(most.values()) == {0}
    assert all(0 < size <= tile_bytes for size in library.values()), library


@pytest.mark.parametrize("op", ["attention", "attention.bwd", "linear", "qk_norm", "adamw.decay"])
def test_a_kernel_that_takes_more_is_found(op: str) -> None:
    """The kernel copies one operand that it should not copy."""

    def copying(call: Call) -> None:
        role = next(role for role in ("qkv", "x", "params") if role in call.tensors)
        call[role].clone()
        KERNELS[op](call)

    most = beyond_declared(watched(long("llama"), {**KERNELS, op: copying}))
    assert {name for name, size in most.items() if size > (TILE_BYTES["fp32"] if name in LIBRARY_SCRATCH else 0)} == {
        op
    }


@pytest.mark.parametrize("model", MODELS)
def test_the_arena_is_one_allocation(model: str) -> None:
    decisions = long(model, **POLICIES["alpha 0.5"])
    placement = placed(decisions)
    planned = schedule(lower(decisions)[0], placement=placement)
    assert allocations(lambda: ArenaStore(planned, torch.device("cpu"))) == [placement.arena_bytes]


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_the_reserve_holds_what_lies_outside(dtype: str) -> None:
    """The reserve covers the instruction that allocates the most, and exceeds it by at most a tenth."""
    decisions = long("llama", dtype=dtype, states=dtype, recompute="full")
    found = watched(decisions, taken=at_once)
    (program,) = lower(decisions)
    scratch = library_scratch(decisions, program, CPU.compute_threads) if dtype == "bf16" else None
    libraries = {call.instruction.op for call, _, _ in found if isinstance(call.instruction.work, MEASURED)}
    beyond = {op: size for op, size in beyond_declared(found).items() if size > 0}
    assert set(beyond) <= libraries
    if scratch is None:
        assert max(beyond.values()) <= TILE_BYTES[dtype]
    else:
        assert all(size <= scratch[op] for op, size in beyond.items())
    measured = max(size for _, size, _ in found)
    reserve = needs_of(program, CPU, placed(decisions), library_scratch=scratch).reserve
    assert set(reserve) <= {RESULTS, LIBRARIES, TILES}
    assert measured <= sum(reserve.values()) <= 1.1 * measured
