"""The replaying allocator, called through ctypes with host memory instead of device memory."""

import ctypes
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from memo_exec.commands.run import run
from memo_exec.commands.run_options import RunOptions
from memo_exec.memory.native_library import FLAGS, SOURCE, cache_directory, library_path
from memo_exec.memory.recorder import Recorder, place_recorded, requests_of_events
from memo_exec.memory.replaying import Replay, Replayer, counted
from memo_sim.contract.errors import BadInput, CannotRun
from memo_sim.contract.placement import Placement
from memo_sim.memory.place import place
from tests.exec_cpu.memory.native_allocator import Caller, on_host
from tests.exec_cpu.plans import write_plan
from tests.refusals import refused

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

MIB = 2**20
STEP = [("a", 4 * MIB), ("b", MIB), ("c", 2 * MIB), ("-a", 0), ("d", 3 * MIB), ("-c", 0), ("e", 5 * MIB)]
"""(name, size) of each request; a name with - is freed. All remaining requests are freed at the end."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library_path(tmp_path_factory.mktemp("built"))


@pytest.fixture(autouse=True)
def nothing_leaks(path: Path) -> Iterator[None]:
    """Check at the end of every test that all memory has been freed."""
    loaded = on_host(path)
    yield
    loaded.memo_stop()
    assert loaded.memo_living() == 0
    assert loaded.memo_arena() == 0


def recorded(path: Path, step: list[tuple[str, int]]) -> Placement:
    recorder = Recorder(on_host(path))
    recorder.start()
    Caller(path).play(step)
    return place(recorder.stop(), solver="greedy")


def replaying(path: Path, placement: Placement) -> Replayer:
    replayer = Replayer(on_host(path))
    replayer.start(placement)
    replayer.begin_step()
    return replayer


def test_recorded_requests_equal_those_made(path: Path) -> None:
    recorder = Recorder(on_host(path))
    recorder.start()
    Caller(path).play(STEP)
    found = recorder.stop()
    assert found.size_bytes == [4 * MIB, MIB, 2 * MIB, 3 * MIB, 5 * MIB]
    assert found.lower == [0, 1, 2, 4, 6]
    assert found.upper == [3, 7, 5, 8, 9]


def test_a_step_is_replayed_at_its_planned_addresses(path: Path) -> None:
    placement = recorded(path, STEP)
    replayer, caller = replaying(path, placement), Caller(path)
    assert replayer.address()
    wanted = [replayer.address() + offset for offset in placement.offset_bytes]
    for _ in range(3):
        replayer.begin_step()
        assert caller.play(STEP) == wanted
    report = replayer.stop()
    assert (report.replayed, report.mismatches, report.fallback_bytes, report.unknown_frees) == (15, 0, 0, 0)
    assert report.line().startswith("allocator: 15 of 15 requests at planned addresses")


def test_a_step_that_differs_falls_back_and_is_counted(path: Path) -> None:
    replayer, caller = replaying(path, recorded(path, STEP)), Caller(path)
    changed = [*STEP[:1], ("b", 7 * MIB), *STEP[2:], ("f", MIB)]
    start = replayer.address()
    addresses = caller.play(changed)
    report = replayer.stop()
    assert report == Replay(4, 0, 1, 1, 0, 0, 0, 8 * MIB, 0)
    end = start + recorded(path, STEP).arena_bytes
    inside = [start <= address < end for address in addresses]
    assert inside == [True, False, True, True, True, False]
    assert "1 of another size, 1 beyond the plan" in report.line()


def test_a_slot_that_still_lives_is_not_handed_out_twice(path: Path) -> None:
    """A step frees "a" later than in the recorded step; its bytes are not handed out before that."""
    replayer, caller = replaying(path, recorded(path, STEP)), Caller(path)
    caller.play([entry for entry in STEP if entry[0] != "-a"])
    report = replayer.stop()
    assert report.slot_taken > 0
    assert report.replayed + report.slot_taken == 5


def test_a_second_stream_gets_no_slot_and_takes_no_number(path: Path) -> None:
    replayer, caller = replaying(path, recorded(path, STEP)), Caller(path)
    blocks = [caller.malloc(4 * MIB), caller.malloc(MIB, stream=2), caller.malloc(MIB)]
    report = replayer.stop()
    assert (report.replayed, report.mismatches, report.other_stream) == (2, 1, 1)
    for block in blocks:
        caller.free(block, 1)


def test_a_second_stream_is_not_recorded(path: Path) -> None:
    recorder, caller = Recorder(on_host(path)), Caller(path)
    recorder.start(stream=7)
    blocks = [caller.malloc(MIB), caller.malloc(2 * MIB, stream=7)]
    for block in blocks:
        caller.free(block, MIB)
    found = recorder.stop()
    assert (found.size_bytes, found.lower, found.upper) == ([2 * MIB], [0], [1])


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
        assert counted(on_host(path)).mismatches == 0
        replayer.begin_step()
        other = [(name, size + chance.choice((0, 0, 512))) if size else (name, size) for name, size in step]
        late = chance.sample(range(len(other)), 10)
        Caller(path).play([e for i, e in enumerate(other) if not e[0].startswith("-") or i not in late])
        assert replayer.stop().mismatches > 0


def test_an_arena_in_use_is_kept(path: Path) -> None:
    placement = recorded(path, STEP)
    replayer, caller = replaying(path, placement), Caller(path)
    block = caller.malloc(4 * MIB)
    with refused(CannotRun, what="in use"):
        replayer.start(placement)
    assert replayer.stop().unknown_frees == 0
    assert replayer.address()
    ctypes.memset(block, 1, 4 * MIB)
    caller.free(block, 4 * MIB)
    assert not replayer.address()
    replayer.start(placement)


def test_frees_of_unknown_pointers_are_only_counted(path: Path) -> None:
    """Freeing a pointer twice, one inside a block, or a foreign one is counted and does nothing else."""
    replayer, caller = replaying(path, recorded(path, STEP)), Caller(path)
    inside, outside = caller.malloc(4 * MIB), caller.malloc(9 * MIB)
    own = ctypes.create_string_buffer(b"mine", 4096)
    for pointer in (inside + 512, outside + 512, ctypes.addressof(own)):
        caller.free(pointer, 512)
    ctypes.memset(inside, 1, 4 * MIB)
    ctypes.memset(outside, 1, 9 * MIB)
    assert own.raw[:4] == b"mine"
    for pointer in (inside, outside, inside, outside):
        caller.free(pointer, 1)
    assert replayer.stop().unknown_frees == 5


def test_a_slot_outside_the_arena_is_refused(path: Path) -> None:
    wrong = msgspec.structs.replace(recorded(path, STEP), arena_bytes=MIB)
    with refused(BadInput, wanted=f"{MIB} bytes"):
        Replayer(on_host(path)).start(wrong)
    assert not Replayer(on_host(path)).address()


def test_too_much_memory_is_an_error_and_not_a_null_pointer(path: Path, tmp_path: Path) -> None:
    """The function that torch calls throws; an arena that does not fit is refused with a message."""
    huge = Placement(
        arena_bytes=2**62,
        lower_bound_bytes=2**62,
        ids=["0"],
        lower=[0],
        upper=[1],
        size_bytes=[2**62],
        offset_bytes=[0],
    )
    with refused(CannotRun, wanted=f"{2**62} bytes"):
        Replayer(on_host(path)).start(huge)
    caller = tmp_path / "caller.cpp"
    caller.write_text(
        "#include <sys/types.h>\n#include <new>\n"
        'extern "C" { int memo_use_host_memory(); void* memo_torch_malloc(ssize_t, int, void*); }\n'
        "int main() {\n  memo_use_host_memory();\n  if (!memo_torch_malloc(512, 0, nullptr)) return 1;\n"
        "  if (memo_torch_malloc(0, 0, nullptr)) return 2;\n"
        "  try { memo_torch_malloc(1L << 62, 0, nullptr); } catch (const std::bad_alloc&) { return 0; }\n"
        "  return 3;\n}\n"
    )
    program = tmp_path / "caller"
    subprocess.run(["g++", "-std=c++17", str(caller), str(SOURCE), "-o", str(program), "-ldl"], check=True)
    assert subprocess.run([str(program)], check=False).returncode == 0


def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    command = ["g++", *FLAGS, "-Wshadow", "-Werror", str(SOURCE), "-o", str(tmp_path / "x.so"), "-ldl"]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""


def test_threads_never_get_the_same_bytes(path: Path) -> None:
    """Four threads make requests at once, one of them for the served stream; each finds its own bytes unchanged."""
    replayer = replaying(path, recorded(path, STEP))
    wrong: list[int] = []

    def ask(mark: int) -> None:
        caller, chance = Caller(path), random.Random(mark)
        for _ in range(200):
            size = chance.choice((4 * MIB, MIB, 700))
            pointer = caller.malloc(size, stream=0 if mark == 1 else mark)
            ctypes.memset(pointer, mark, 64)
            if ctypes.string_at(pointer, 64) != bytes([mark]) * 64:
                wrong.append(mark)
            caller.free(pointer, size)

    threads = [threading.Thread(target=ask, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = replayer.stop()
    assert wrong == []
    assert report.replayed + report.mismatches == 800
    assert (report.other_stream, report.unknown_frees) == (600, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_a_machine_without_cuda_is_refused(tmp_path: Path) -> None:
    """The run is refused before anything is compiled or allocated."""
    plan = write_plan(tmp_path / "plan.json")
    with refused(CannotRun, got="CPU", wanted="CUDA", hint="--replay-allocator"):
        run(plan, RunOptions(steps=1, replay_allocator=True))


def test_recorded_requests_get_slots_of_their_own(path: Path) -> None:
    """The placement passes the checker, and its arena is close to the largest live sum."""
    chance = random.Random(1)
    for _ in range(20):
        events: list[tuple[int, int]] = []
        held: list[int] = []
        for number in range(60):
            events.append((number, chance.randrange(1, 100_000)))
            held.append(number)
            while held and chance.random() < 0.5:
                events.append((held.pop(chance.randrange(len(held))), -1))
        found = place_recorded(requests_of_events(events))
        assert found.lower_bound_bytes <= found.arena_bytes <= 1.3 * found.lower_bound_bytes


def test_a_placement_of_other_buffers_is_refused(path: Path) -> None:
    named = msgspec.structs.replace(recorded(path, STEP), ids=["a", "b", "c", "d", "e"])
    with refused(BadInput, wanted="0, 1, 2"):
        Replayer(on_host(path)).start(named)


def test_events_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="never"):
        requests_of_events([(0, -1)])


def test_the_library_is_built_once_and_a_missing_compiler_is_reported(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert library_path(path.parent) == path
    with refused(CannotRun, wanted="g++"):
        library_path(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_without_cuda_nothing_is_handed_out(path: Path) -> None:
    """It runs in a separate process that has no CUDA and does not select host memory."""
    code = (
        f"from memo_exec.memory.native_library import *; print(library(Path({str(path)!r})).memo_malloc(512, 0, None))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={})
    assert done.stdout.strip() == "None"


def test_the_library_is_not_loaded_from_where_others_may_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with refused(CannotRun, where=str(tmp_path), got="mode 777", hint=("chmod go-w", "XDG_CACHE_HOME")):
        library_path(tmp_path)
    tmp_path.chmod(0o700)
    built = library_path(tmp_path)
    built.chmod(0o722)
    with refused(CannotRun, where=str(built), got="mode 722"):
        library_path(tmp_path)


def test_where_built_libraries_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "memo"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "memo"
    (tmp_path / ".cache").write_text("")
    with refused(CannotRun, where=str(tmp_path / ".cache" / "memo"), hint="XDG_CACHE_HOME"):
        library_path()
