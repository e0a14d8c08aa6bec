"""The allocator that records and replays, driven through ctypes with host memory in place of a device's."""

import ctypes
import random
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from memo_exec.memory.recorder import Recorder, library, library_path, requests_of_events
from memo_exec.memory.replaying import Replay, Replayer
from memo_sim.contract.errors import BadInput, CannotRun
from memo_sim.contract.placement import Placement
from memo_sim.memory.place import place

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

MIB = 2**20
STEP = [("a", 4 * MIB), ("b", MIB), ("c", 2 * MIB), ("-a", 0), ("d", 3 * MIB), ("-c", 0), ("e", 5 * MIB)]
"""Names and sizes; a name with - is given back. What is left is given back at the end."""


class Caller:
    """Asks the way torch does."""

    def __init__(self, path: Path) -> None:
        self.library = library(path)

    def malloc(self, size: int, stream: int = 0) -> int:
        return int(self.library.memo_malloc(size, 0, stream) or 0)

    def free(self, pointer: int, size: int) -> None:
        self.library.memo_free(pointer, size, 0, None)

    def play(self, step: list[tuple[str, int]]) -> list[int]:
        """Play a step; write to every block and read it back when it is given back."""
        held: dict[str, tuple[int, int, int]] = {}
        addresses = []
        for mark, (name, size) in enumerate(step, start=1):
            if name.startswith("-"):
                self.release(held.pop(name[1:]))
            else:
                pointer = self.malloc(size)
                ctypes.memset(pointer, mark, size)
                held[name] = pointer, size, mark
                addresses.append(pointer)
        for block in held.values():
            self.release(block)
        return addresses

    def release(self, block: tuple[int, int, int]) -> None:
        pointer, size, mark = block
        assert ctypes.string_at(pointer, size) == bytes([mark]) * size
        self.free(pointer, size)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library_path(tmp_path_factory.mktemp("built"))


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMO_REPLAY_HOST", "1")


def recorded(path: Path, step: list[tuple[str, int]]) -> Placement:
    recorder = Recorder(path)
    recorder.start()
    Caller(path).play(step)
    return place(recorder.stop(), solver="greedy")


def replaying(path: Path, placement: Placement) -> Replayer:
    replayer = Replayer(path)
    replayer.start(placement)
    replayer.begin_step()
    return replayer


def test_what_is_recorded_is_what_was_asked(path: Path) -> None:
    recorder = Recorder(path)
    recorder.start()
    Caller(path).play(STEP)
    found = recorder.stop()
    assert found.size_bytes == [4 * MIB, MIB, 2 * MIB, 3 * MIB, 5 * MIB]
    assert found.lower == [0, 1, 2, 4, 6]
    assert found.upper == [3, 7, 5, 8, 9]


def test_a_step_is_replayed_at_its_planned_addresses(path: Path) -> None:
    placement = recorded(path, STEP)
    replayer, caller = replaying(path, placement), Caller(path)
    wanted = [replayer.address() + offset for offset in placement.offset_bytes]
    for _ in range(3):
        replayer.begin_step()
        assert caller.play(STEP) == wanted
    report = replayer.stop()
    assert (report.replayed, report.mismatches, report.fallback_bytes, report.unknown_frees) == (15, 0, 0, 0)
    assert report.line().startswith("15 of 15 requests at planned addresses")


def test_a_step_that_differs_falls_back_and_is_counted(path: Path) -> None:
    replayer, caller = replaying(path, recorded(path, STEP)), Caller(path)
    changed = [*STEP[:1], ("b", 7 * MIB), *STEP[2:], ("f", MIB)]
    addresses = caller.play(changed)
    report = replayer.stop()
    assert report == Replay(4, 1, 1, 0, 0, 8 * MIB, 0)
    end = replayer.address() + recorded(path, STEP).arena_bytes
    inside = [replayer.address() <= address < end for address in addresses]
    assert inside == [True, False, True, True, True, False]
    assert "1 of another size, 1 beyond the plan" in report.line()


def test_a_slot_that_still_lives_is_not_handed_out_twice(path: Path) -> None:
    """A step that gives a back later than it was recorded to: its bytes stay its own."""
    replayer, caller = replaying(path, recorded(path, STEP)), Caller(path)
    caller.play([entry for entry in STEP if entry[0] != "-a"])
    report = replayer.stop()
    assert report.slot_taken > 0
    assert report.replayed + report.slot_taken == 5


def test_a_second_stream_gets_no_slot(path: Path) -> None:
    replayer, caller = replaying(path, recorded(path, STEP)), Caller(path)
    one, two = caller.malloc(4 * MIB, stream=1), caller.malloc(MIB, stream=2)
    report = replayer.stop()
    assert (report.replayed, report.other_stream) == (1, 1)
    caller.free(one, 4 * MIB)
    caller.free(two, MIB)


def test_random_steps_never_share_bytes(path: Path) -> None:
    chance = random.Random(0)
    for _ in range(20):
        step: list[tuple[str, int]] = []
        held: list[str] = []
        for i in range(40):
            if held and chance.random() < 0.4:
                step.append((f"-{held.pop(chance.randrange(len(held)))}", 0))
            else:
                step.append((f"t{i}", chance.randrange(1, 200_000)))
                held.append(f"t{i}")
        replayer = replaying(path, recorded(path, step))
        Caller(path).play(step)
        assert replayer.report().mismatches == 0
        replayer.begin_step()
        other = [(name, size + chance.choice((0, 0, 512))) if size else (name, size) for name, size in step]
        late = chance.sample(range(len(other)), 10)
        Caller(path).play([e for i, e in enumerate(other) if not e[0].startswith("-") or i not in late])
        assert replayer.stop().mismatches > 0


def test_an_arena_in_use_stays(path: Path) -> None:
    placement = recorded(path, STEP)
    replayer, caller = replaying(path, placement), Caller(path)
    block = caller.malloc(4 * MIB)
    with pytest.raises(CannotRun, match="still in use"):
        replayer.start(placement)
    caller.free(block, 4 * MIB)
    caller.free(block, 4 * MIB)
    assert replayer.stop().unknown_frees == 1
    replayer.start(placement)


def test_a_placement_of_something_else_is_refused(path: Path) -> None:
    named = msgspec.structs.replace(recorded(path, STEP), ids=["a", "b", "c", "d", "e"])
    with pytest.raises(BadInput, match="not of recorded requests"):
        Replayer(path).start(named)


def test_events_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="never made"):
        requests_of_events([(0, -1)])


def test_the_library_is_built_once_and_a_missing_compiler_is_said(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert library_path(path.parent) == path
    with pytest.raises(CannotRun, match="no compiler"):
        library_path(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_without_cuda_nothing_is_handed_out(path: Path) -> None:
    """In a process of its own: no host memory asked for, no CUDA there."""
    code = f"from memo_exec.memory.recorder import *; print(library(Path({str(path)!r})).memo_malloc(512, 0, None))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={})
    assert done.stdout.strip() == "None"
