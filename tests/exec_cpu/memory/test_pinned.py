"""Pinning runs on the cores near the GPU, which Linux reports, and then restores the thread's affinity."""

import os
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
    with refused(CannotRun, got="CUDA error 2 for 4096 bytes"):
        pinned.pin(pinned.mapping(4096))
    assert cores[1:] == [{1}, {0, 1, 2, 3}]
