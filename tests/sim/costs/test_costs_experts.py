"""Prices of the products of several experts: whole tiles of rows, and weights that are read once."""

import pytest

from memo_sim.contract.catalog import load_hardware
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.plan import Layout
from memo_sim.costs.pricing import TILE_ROWS, Pricer
from memo_sim.program.ir.work import Gemm, GroupedGemm

H100 = load_hardware("h100-sxm5-80gb")
PRICER = Pricer(H100, Cluster(name="test", hardware="h100-sxm5-80gb", nodes=1, devices_per_node=8), Layout())


def grouped(*sizes: tuple[int, int], gemm_pass: str = "fprop", n: int = 8192, k: int = 4096) -> float:
    return PRICER.seconds(GroupedGemm(sizes, n, k, gemm_pass, "bf16"))


def test_whole_tiles_cost_what_one_product_costs() -> None:
    for gemm_pass in ("fprop", "dgrad"):
        one = PRICER.seconds(Gemm(8192, 8192, 4096, gemm_pass, "bf16"))
        assert grouped((1024, 8), gemm_pass=gemm_pass) == pytest.approx(one, rel=1e-12)
    weight = PRICER.seconds(Gemm(8 * 8192, 4096, 1024, "wgrad", "bf16"))
    assert grouped((1024, 8), gemm_pass="wgrad") == pytest.approx(weight, rel=1e-12)


def test_a_row_more_is_a_tile_more() -> None:
    assert grouped((1024 + 1, 8)) == grouped((1024 + TILE_ROWS, 8))
    assert grouped((1024 + 1, 8)) > grouped((1024, 8))


def test_an_uneven_load_never_costs_less() -> None:
    even, uneven = grouped((512, 16)), grouped((4096, 1), (3000, 1), *[(78, 1)] * 14, (4, 1))
    assert uneven > even


def test_few_rows_cost_the_reading_of_every_weight() -> None:
    """128 experts with one row each: 128 x 768 x 2048 weights of two bytes."""
    weights = 2 * 128 * 768 * 2048
    assert grouped((1, 128), n=768, k=2048) >= weights / H100.memory_bound_bytes_per_s.y[-1]
