"""The slowest of many devices sets the pace: one node keeps its profile's rates, more nodes are slightly slower."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.plan import Layout
from memo_sim.costs.pace import SPREAD, pace, slowest, slowest_device
from memo_sim.costs.pricing import Pricer
from memo_sim.program.ir.work import Attention, Copy, Gemm, Rowwise

GEMM = Gemm(8192, 4096, 4096, "fprop", "bf16")
ATTENTION = Attention(
    batch=1,
    q_tokens=65536,
    k_tokens=65536,
    mask="causal",
    heads=8,
    kv_heads=8,
    head_dim=128,
    backward=True,
    kernel="flash2",
    dtype="bf16",
)


@pytest.mark.parametrize("devices", [8, 32, 512])
def test_the_expected_slowest_is_that_of_normal_draws(devices: int) -> None:
    draws = np.random.default_rng(7).normal(size=(20_000, devices))
    assert slowest(devices) == pytest.approx(draws.max(axis=1).mean(), rel=0.02)


@pytest.mark.parametrize("devices", [1, 8, 32, 512])
def test_the_expected_slowest_device_is_that_of_draws_from_the_measured_spread(devices: int) -> None:
    shares, deviations = zip(*SPREAD, strict=True)
    draws = np.interp(np.random.default_rng(7).random((20_000, devices)), shares, deviations)
    assert slowest_device(devices) == pytest.approx(draws.max(axis=1).mean(), rel=0.02, abs=0.02)


def test_the_spread_has_the_unit_of_the_profiles_and_ends_at_the_slowest_measured_device() -> None:
    """A profile's deviation is the expected range of eight devices, divided by that of eight normal draws."""
    shares, deviations = zip(*SPREAD, strict=True)
    at = (np.arange(100_000) + 0.5) / 100_000
    fastest = float((np.interp(at, shares, deviations) * 8 * (1 - at) ** 7).mean())
    assert slowest_device(8) - fastest == pytest.approx(2.85, rel=0.03)
    counts = [2**n for n in range(14)]
    assert sorted(map(slowest_device, counts)) == list(map(slowest_device, counts))
    assert slowest_device(2**13) == pytest.approx(4.51, rel=1e-3)


@pytest.mark.parametrize(("devices", "measured"), [(8, 0.0), (32, 0.0150), (64, 0.0233), (512, 0.0457)])
def test_many_devices_are_slower_than_eight_as_measured(devices: int, measured: float) -> None:
    """The measured devices' own figures: expected slowest of 391 V100, against the expected slowest of eight."""
    deviation, eight = 0.0170, slowest_device(8)
    ratio = (1 + deviation * slowest_device(devices)) / (1 + deviation * eight) - 1
    assert ratio == pytest.approx(measured, abs=1e-3)


def test_only_devices_beyond_a_node_slow_products_and_attention_and_nothing_else() -> None:
    _, hardware = load_cluster("a800-1x8")
    assert hardware.device_deviation is not None
    assert pace(hardware, 1) == pace(hardware, 8) == 1.0
    assert 1.015 < pace(hardware, 32) < 1.02 < pace(hardware, 64) < 1.03
    assert pace(msgspec.structs.replace(hardware, device_deviation=None), 64) == 1.0
    node, nodes = (Pricer(hardware, load_cluster(f"a800-{n}x8")[0], Layout(tp=8, dp=n)) for n in (1, 4))
    for work in (GEMM, ATTENTION):
        assert nodes.seconds(work) == pytest.approx(node.seconds(work) * pace(hardware, 32))
    for other in (Rowwise("gelu", 8192, 2**28, 2**28), Copy(2**28, "d2h")):
        assert nodes.seconds(other) == node.seconds(other)


def test_rates_of_one_device_are_too_high_for_a_node_of_them() -> None:
    _, hardware = load_cluster("b200-1x8")
    assert hardware.rated_devices == 1
    assert hardware.device_deviation is not None
    assert pace(hardware, 1) == 1.0
    assert pace(hardware, 8) == pytest.approx(1.0 + hardware.device_deviation.value * slowest_device(8), rel=1e-4)
