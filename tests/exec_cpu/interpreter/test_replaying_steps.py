"""Plays whole steps on the native allocator: libraries get slots of the arena, or replayed addresses without one."""

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memo_exec.kernels import KERNELS, Call, Kernel
from memo_exec.memory.native_library import library_path
from memo_exec.memory.replaying import BelowTorch, Replay
from tests.exec_cpu.memory.native_allocator import Caller, on_host
from tests.exec_cpu.plans import byte_decisions, placed
from tests.exec_cpu.small import batch, play, scalars

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library_path(tmp_path_factory.mktemp("built"))


@pytest.fixture(autouse=True)
def stopped(path: Path) -> Iterator[None]:
    """Check after every test that all memory has been returned."""
    loaded = on_host(path)
    yield
    loaded.memo_stop()
    assert loaded.memo_living() == 0
    assert loaded.memo_arena() == 0


def lend(path: Path, slot: torch.Tensor) -> BelowTorch:
    below = BelowTorch(on_host(path), lends=True)
    assert below.report() == Replay(*[0] * len(Replay.__dataclass_fields__))
    return below


def test_a_lent_slot_is_cut_into_pieces(path: Path) -> None:
    slot = torch.zeros(8192, dtype=torch.uint8)
    below, caller = lend(path, slot), Caller(path)
    with below.lending(slot):
        one, two = caller.malloc(1000), caller.malloc(1024)
        other = caller.malloc(64, stream=3)
        assert (one, two) == (slot.data_ptr(), slot.data_ptr() + 1024)
        caller.free(two, 1024)
        three = caller.malloc(7168)
        assert three == slot.data_ptr() + 1024
        late = caller.malloc(1)
        caller.free(one, 1000)
        caller.free(three, 7168)
        assert caller.malloc(8192) == slot.data_ptr()
    ctypes.memset(late, 1, 1)
    after = caller.malloc(512)
    assert not slot.data_ptr() <= after < slot.data_ptr() + 8192
    for pointer in (other, late, after, slot.data_ptr()):
        caller.free(pointer, 1)
    report = below.report()
    assert (report.lent, report.no_room, report.mismatches, report.fallback_bytes) == (4, 1, 1, 1)
    assert report.unknown_frees == 0


def asking(path: Path, asked: list[int]) -> dict[str, Kernel]:
    """Return kernels whose attention allocates its results, as a library on CUDA would."""

    def kernel(op: str) -> Kernel:
        def call(arguments: Call) -> None:
            caller = Caller(path)
            sizes = [arguments["out"].nbytes, arguments["lse"].nbytes]
            blocks = [caller.malloc(size) for size in sizes]
            for block, size in zip(blocks, sizes, strict=True):
                ctypes.memset(block, 255, size)
            KERNELS[op](arguments)
            asked.extend(blocks)
            for block in reversed(blocks):
                caller.free(block, 1)

        return call

    return {**KERNELS, "attention": kernel("attention"), "attention.bwd": kernel("attention.bwd")}


def four_steps(path: Path, **options: Any) -> tuple[list[float], list[list[int]], Replay]:
    """Play four steps; return their losses, the addresses that each was given, and the allocator's report."""
    asked: list[int] = []
    given = []
    decisions = byte_decisions()
    with play(decisions, allocator=on_host(path), kernels=asking(path, asked), **options) as interpreter:
        losses = []
        for step in (1, 2, 3, 4):
            batches = batch(decisions, seed=step)
            losses.append(interpreter.run_step(batches, scalars(batches, step=step)).loss)
            given.append(asked.copy())
            asked.clear()
        assert interpreter.below is not None
        return losses, given, interpreter.below.report()


def plain_losses() -> list[float]:
    decisions = byte_decisions()
    with play(decisions) as interpreter:
        steps = [(step, batch(decisions, seed=step)) for step in (1, 2, 3, 4)]
        return [interpreter.run_step(batches, scalars(batches, step=step)).loss for step, batches in steps]


def test_a_library_gets_the_slots_of_the_arena(path: Path) -> None:
    """All of its results lie in the arena, at the same addresses each step, and overwrite no other buffer."""
    placement = placed(byte_decisions())
    losses, given, report = four_steps(path, placement=placement)
    assert losses == plain_losses()
    assert given[0] == given[1] == given[3]
    assert max(given[0]) - min(given[0]) < placement.arena_bytes
    assert (report.lent, report.mismatches) == (sum(map(len, given)), 0)
    assert report.lent > 0


def test_the_second_step_is_recorded_and_those_after_it_are_replayed(path: Path) -> None:
    losses, given, report = four_steps(path)
    assert losses == plain_losses()
    assert given[2] == given[3]
    assert (report.replayed, report.mismatches) == (len(given[2]) + len(given[3]), 0)
    assert report.replayed > 0


def test_a_step_that_fails_while_it_is_recorded_is_recorded_anew(path: Path) -> None:
    decisions = byte_decisions()
    failing = False
    asked: list[int] = []
    kernels = asking(path, asked)

    def gelu(call: Call) -> None:
        if failing:
            raise ZeroDivisionError
        KERNELS["gelu"](call)

    with play(decisions, allocator=on_host(path), kernels={**kernels, "gelu": gelu}) as interpreter:
        batches = batch(decisions)
        interpreter.run_step(batches, scalars(batches))
        failing = True
        with pytest.raises(ZeroDivisionError):
            interpreter.run_step(batches, scalars(batches))
        failing = False
        for _ in range(2):
            asked.clear()
            interpreter.run_step(batches, scalars(batches))
        assert interpreter.below is not None
        assert (interpreter.below.report().replayed, interpreter.below.report().mismatches) == (len(asked), 0)
