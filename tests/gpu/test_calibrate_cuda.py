"""Calibration of a CUDA device. Not yet run on a GPU."""

import importlib.util
import time
from dataclasses import replace

import pytest
import torch

from memo_exec.commands.calibrate import calibrate
from memo_exec.kernels import IN_TRITON
from memo_exec.probes import grid as grids
from memo_exec.probes import memory
from memo_exec.probes.timing import Effort, time_call
from memo_sim.contract.hardware import Hardware

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FEW = replace(
    grids.CUDA,
    widths=(4096,),
    lengths=(4096,),
    head_dims=(128,),
    heads=(32,),
    attention_lengths=(4096, 16384),
    copy_bytes=(2**20, 2**24, 2**28),
    budget_s=1.0,
)


@pytest.fixture(scope="module")
def profile() -> Hardware:
    found = calibrate(grid=FEW, command="a test")
    assert found is not None
    return found


def test_rates_are_those_of_a_gpu(profile: Hardware) -> None:
    assert profile.device == "cuda"
    assert max(row[3] for table in profile.gemm for row in table.rows) > 3e13
    assert all(5e12 < row[2] < 2e15 for table in profile.attention for row in table.rows)
    assert max(profile.memory_bound_bytes_per_s.y) > 2e11
    assert 5e-7 < profile.launch_floor_s.value < 5e-5


def test_fused_kernels_have_curves_where_triton_is_installed(profile: Hardware) -> None:
    curves = profile.fused_rowwise_bytes_per_s.get("triton", {})
    installed = importlib.util.find_spec("triton") is not None
    assert set(curves) == (set(IN_TRITON) if installed else set())
    assert all(1e11 < rate < 1e13 for curve in curves.values() for rate in curve.y)


def test_simultaneous_copies_are_not_faster(profile: Hardware) -> None:
    for rates in (profile.d2h, profile.h2d):
        alone = max(rates.alone.y)
        assert 1e9 < rates.duplex.value <= 1.1 * alone
        assert 1e9 < rates.all_devices.value <= 1.1 * alone
    assert profile.compute_slowdown["copy"].value < 1.5


def test_allocation_and_pinning_cost_something(profile: Hardware) -> None:
    assert 1e-6 < profile.device_malloc_s.value + (profile.device_malloc_s_per_gib or profile.device_malloc_s).value < 1
    assert profile.host_alloc_bytes_per_s is not None
    for rate in (profile.host_alloc_bytes_per_s, profile.host_register_bytes_per_s):
        assert 1e8 < rate.value < 1e12


def test_versions_and_clocks_are_written_down(profile: Hardware) -> None:
    assert {"cuda", "cudnn", "torch", "passes"} <= set(profile.provenance)
    assert {"driver", "sm_clock_mhz", "power_state", "power_w"} <= set(profile.provenance) or (
        profile.provenance["clocks"] == "unknown: nvidia-smi is not installed"
    )
    assert str(torch.version.cuda) in profile.sources["operators"].text


def test_a_single_call_costs_as_much_as_one_of_many() -> None:
    """The time of a call does not include the filler product before it."""
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    one = time_call(lambda _: torch.mm(a, a, out=out), device, Effort(seconds=0.2))

    def ten(i: int) -> None:
        for _ in range(10):
            torch.mm(a, a, out=out)

    assert one.seconds == pytest.approx(time_call(ten, device, Effort(seconds=0.2)).seconds / 10, rel=0.15)


def test_blocks_come_from_the_device_not_from_a_cache() -> None:
    device = torch.device("cuda")
    kept = torch.empty(2**28, dtype=torch.uint8, device=device)
    del kept
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    memory.allocation(device)
    assert torch.cuda.memory_stats()["segment.all.allocated"] - before >= 2 * memory.REPEATS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_curves_take_less_than_five_minutes() -> None:
    begin = time.perf_counter()
    found = calibrate(command="a test")
    assert time.perf_counter() - begin < 300
    assert found is not None
