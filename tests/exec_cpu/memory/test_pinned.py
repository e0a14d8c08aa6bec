"""Pinning runs on the cores near the GPU, which Linux reports, and then restores the thread's affinity."""

import mmap
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from memo_exec.memory import pinned
from memo_sim.contract.errors import CannotRun
from tests.refusals import refused

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: GPU)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Pretend that there are four cores; return the list of affinities that the thread has had."""
    ran = [{0, 1, 2, 3}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: ran[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, allowed: ran.append(set(allowed)))
    return ran


def tells(root: Path, ranges: str) -> Path:
    device = root / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text(ranges)
    return root


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("ranges", "wanted"),
    [("2-3,8-11\n", {2, 3}), ("1\n", {1}), ("0-63\n", {0, 1, 2, 3})],
)
def test_pinning_runs_near_the_gpu(tmp_path: Path, cores: list[set[int]], ranges: str, wanted: set[int]) -> None:
    with pinned.near_gpu(tells(tmp_path, ranges)):
        assert cores[-1] == wanted
    assert cores[-1] == {0, 1, 2, 3}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("ranges", ["8-11\n", "\n", "none\n"])
def test_affinity_stays_if_no_core_near_the_gpu_is_allowed(tmp_path: Path, cores: list[set[int]], ranges: str) -> None:
    with pinned.near_gpu(tells(tmp_path, ranges)):
        pass
    assert cores == [{0, 1, 2, 3}]


@pytest.mark.usefixtures("gpu")
def test_affinity_stays_if_the_node_is_unknown(tmp_path: Path, cores: list[set[int]]) -> None:
    with pinned.near_gpu(tmp_path):
        pass
    assert cores == [{0, 1, 2, 3}]


@pytest.mark.usefixtures("gpu")
def test_affinity_is_restored_if_the_driver_refuses(monkeypatch: pytest.MonkeyPatch, cores: list[set[int]]) -> None:
    monkeypatch.setattr(pinned, "_cores_of_gpu", lambda _: {1})
    monkeypatch.setattr("torch.cuda.cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    with refused(CannotRun, got="CUDA error 2 for 4096 of 4096 bytes"):
        pinned.pin(pinned.mapping(4096))
    assert cores[1:] == [{1}, {0, 1, 2, 3}]


class Runtime:
    """A fake CUDA runtime that refuses to register the piece with number ``fails``."""

    def __init__(self, fails: int = -1) -> None:
        self.fails = fails
        self.registered: dict[int, int] = {}
        self.asked = 0

    def cudaHostRegister(self, first: int, size: int, flags: int) -> int:  # noqa: N802 (the runtime's name)
        assert flags == 0
        self.asked += 1
        if self.asked - 1 == self.fails:
            return 712
        self.registered[first] = size
        return 0

    def cudaHostUnregister(self, first: int) -> int:  # noqa: N802
        del self.registered[first]
        return 0


def runtime(monkeypatch: pytest.MonkeyPatch, fails: int = -1) -> Runtime:
    fake = Runtime(fails)
    monkeypatch.setattr("torch.cuda.cudart", lambda: fake)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(pinned, "PIECE_BYTES", 4 * mmap.PAGESIZE)
    return fake


def test_a_large_block_is_pinned_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pinned.PIECE_BYTES == 64 * 2**30
    fake, page = runtime(monkeypatch), mmap.PAGESIZE
    memory = pinned.mapping(9 * page + 5)
    first = memory.data_ptr()
    pinned.pin(memory)
    assert fake.registered == {first: 4 * page, first + 4 * page: 4 * page, first + 8 * page: page + 5}
    pinned.unpin(memory)
    assert fake.registered == {}


def test_pieces_before_a_refused_one_are_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = runtime(monkeypatch, fails=2)
    whole = 9 * mmap.PAGESIZE
    with refused(CannotRun, got=f"CUDA error 712 for {mmap.PAGESIZE} of {whole} bytes"):
        pinned.pin(pinned.mapping(whole))
    assert (fake.asked, fake.registered) == (3, {})


def test_every_page_is_touched_by_a_thread_before_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the pages at huge pages' borders, and run with the affinity of the thread that pins."""
    fake = runtime(monkeypatch)
    touched: list[tuple[int, int]] = []
    threads: set[str] = set()
    rendezvous = threading.Barrier(3, timeout=10)

    def memset(first: int, value: int, size: int) -> None:
        assert value == 0
        assert fake.asked == 0
        rendezvous.wait()  # all threads touch at the same time
        threads.add(threading.current_thread().name)
        touched.append((first, size))

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(pinned, "TOUCHED_BYTES", pinned.HUGE_PAGE_BYTES)
    monkeypatch.setattr(pinned, "ctypes", SimpleNamespace(memset=memset))
    monkeypatch.setattr(pinned, "PIECE_BYTES", 2**30)
    memory = pinned.mapping(3 * pinned.HUGE_PAGE_BYTES)
    pinned.pin(memory)
    first, part = memory.data_ptr(), pinned.HUGE_PAGE_BYTES
    assert sorted(touched) == [(first, part), (first + part, part), (first + 2 * part, part)]
    assert len(threads) == 3
    assert fake.registered == {first: 3 * part}


def test_touching_writes_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime(monkeypatch)
    memory = pinned.mapping(3 * mmap.PAGESIZE + 7)
    memory.fill_(9)
    pinned.pin(memory)
    assert not memory.any()


@pytest.mark.parametrize("answer", [None, OSError(22, "Invalid argument")])
def test_huge_pages_are_asked_for(monkeypatch: pytest.MonkeyPatch, answer: OSError | None) -> None:
    """A system without them gives ordinary pages."""
    asked: list[int] = []

    class Pages(mmap.mmap):
        def madvise(self, option: int, *where: int) -> None:
            asked.append(option)
            if answer is not None:
                raise answer

    monkeypatch.setattr(mmap, "mmap", Pages)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    assert not pinned.mapping(4096).any()
    assert asked == [14]
