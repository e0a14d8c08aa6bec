"""Other boards with a profile's chip, and other power limits: what gets slower, by how much, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from memo_sim.contract.boards import with_board, with_power
from memo_sim.contract.catalog import list_clusters, load_cluster, load_hardware
from memo_sim.contract.errors import UsageError
from memo_sim.contract.hardware import BOARD, POWER, Hardware, Quantity
from tests.refusals import refused

LIMITED = ("a100-sxm4-80gb", "a800-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm5-141gb")


def rates(hardware: Hardware) -> list[float]:
    return [row[-1] for table in (*hardware.gemm, *hardware.attention) for row in table.rows]


@pytest.mark.parametrize("name", LIMITED)
def test_its_own_limit_changes_no_rate(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.power_w is not None
    same = with_power(hardware, hardware.power_w.value)
    assert rates(same) == rates(hardware)
    assert same.memory_bound_bytes_per_s == hardware.memory_bound_bytes_per_s


@pytest.mark.parametrize("name", LIMITED)
def test_more_power_is_never_slower(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.power_rates is not None
    low, high = hardware.power_rates.x[0], hardware.power_rates.x[-1]
    limits = [low + step * (high - low) / 8 for step in range(9)]
    tables = [rates(with_power(hardware, limit)) for limit in limits]
    for less, more in pairwise(tables):
        assert all(a < b for a, b in zip(less, more, strict=True))


def test_a_limit_slows_products_and_attention_alike_and_memory_not_at_all() -> None:
    h100 = load_hardware("h100-sxm5-80gb")
    slow = with_power(h100, 405)
    assert rates(slow) == pytest.approx([0.72 * rate for rate in rates(h100)])
    assert slow.memory_bound_bytes_per_s == h100.memory_bound_bytes_per_s
    assert "405 W: products and attention run at 0.720 of their rate at 700 W" in slow.provenance[POWER]


def test_a_limit_on_a_limited_profile_counts_from_there() -> None:
    h100 = load_hardware("h100-sxm5-80gb")
    twice = with_power(with_power(h100, 500), 700)
    assert rates(twice) == pytest.approx(rates(h100))


def test_limits_that_no_measurement_covers_are_refused() -> None:
    with refused(UsageError, what="no rates are known", got="300 W", wanted="405 to 700 W"):
        with_power(load_hardware("h100-sxm5-80gb"), 300)
    with refused(UsageError, what="no rates by power limit", where="b200"):
        with_power(load_hardware("b200-sxm6-180gb"), 500)


def test_a_board_is_named_behind_its_gpu() -> None:
    assert "h100hbm2e-1x8" in list_clusters()
    cluster, board = load_cluster("h100hbm2e-2x8")
    assert (cluster.name, cluster.devices, cluster.hardware) == ("h100hbm2e-2x8", 16, "h100-sxm5-80gb")
    own = load_hardware("h100-sxm5-80gb")
    assert board.power_w == Quantity(value=500.0, source="hbm2e-board")
    assert board.device_memory_bytes.value > own.device_memory_bytes.value
    assert "HBM2e" in board.provenance[BOARD]
    with pytest.raises(UsageError):
        load_cluster("h100hbm9-1x8")
    with pytest.raises(UsageError):
        load_cluster("b200hbm2e-1x8")


def test_slower_memory_keeps_the_fraction_that_large_kernels_reach() -> None:
    h100 = load_hardware("h100-sxm5-80gb")
    board = with_board(h100, "hbm2e")
    own, other = (h.memory_bytes_per_s.value for h in (h100, board) if h.memory_bytes_per_s)
    fast, slow = h100.memory_bound_bytes_per_s.y, board.memory_bound_bytes_per_s.y
    assert slow[-1] / other == pytest.approx(fast[-1] / own)
    # A small kernel waits for its launch, whatever the memory is.
    assert 0.98 < slow[0] / fast[0] < 1
    assert all(less < more for less, more in zip(slow, fast, strict=True))


def test_rates_that_fall_with_power_and_other_factors_than_fractions_are_refused() -> None:
    h100 = load_hardware("h100-sxm5-80gb")
    assert h100.power_rates is not None
    with pytest.raises(ValueError, match="must not fall"):
        replace(h100, power_rates=replace(h100.power_rates, y=[1.0, 0.7]))
    for value in (0.0, 1.01):
        with pytest.raises(ValueError, match="sustained_gemm"):
            replace(h100, sustained_gemm=Quantity(value=value, source="datasheet"))
