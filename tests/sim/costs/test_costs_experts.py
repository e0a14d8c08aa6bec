"""Prices of the products of several experts: whole tiles of rows, and weights that are read once."""

import msgspec
import pytest

from memo_sim.contract.catalog import load_hardware
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import GroupedGemmTable, Source
from memo_sim.contract.plan import Layout
from memo_sim.costs.pricing import TILE_ROWS, Pricer
from memo_sim.program.ir.work import Gemm, GroupedGemm, WidenedGemm

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


def test_copying_a_kernels_result_comes_on_top() -> None:
    alone, copied = (GroupedGemm(((1024, 8),), 8192, 4096, "fprop", "bf16", count) for count in (0, 2**30))
    least_s = 2**30 / H100.memory_bound_bytes_per_s.y[-1]
    assert PRICER.seconds(copied) - PRICER.seconds(alone) == pytest.approx(least_s, rel=0.2)


@pytest.mark.parametrize("gemm_pass", ["fprop", "dgrad", "wgrad"])
def test_a_routers_product_has_the_price_of_fp32(gemm_pass: str) -> None:
    sizes = {"fprop": (65536, 128, 2048), "dgrad": (65536, 2048, 128), "wgrad": (128, 2048, 65536)}[gemm_pass]
    wide = PRICER.seconds(WidenedGemm(*sizes, gemm_pass, "fp32", "bf16"))
    moved_s = 65536 * 2048 * (2 + 4) / H100.memory_bound_bytes_per_s.y[-1]
    widened_s = wide - PRICER.seconds(Gemm(*sizes, gemm_pass, "fp32"))
    assert widened_s == pytest.approx((2 if gemm_pass == "dgrad" else 1) * moved_s, rel=0.2)


def test_a_profile_without_fp32_prices_a_router_in_bf16_and_says_so() -> None:
    narrow = msgspec.structs.replace(H100, gemm=tuple(t for t in H100.gemm if t.dtype == "bf16"))
    pricer = Pricer(narrow, Cluster(name="test", hardware="h100-sxm5-80gb", nodes=1, devices_per_node=8), Layout())
    work = WidenedGemm(4096, 128, 2048, "fprop", "fp32", "bf16")
    assert pricer.seconds(work) > pricer.seconds(Gemm(4096, 128, 2048, "fprop", "bf16"))
    assert "gemm.fp32.fprop" in pricer.outside_of[work]


def measured(gemm_pass: str, *rows: list[float]) -> Pricer:
    table = GroupedGemmTable(dtype="bf16", gemm_pass=gemm_pass, rows=list(rows), source="bench")
    sources = {**H100.sources, "bench": Source(kind="measured", text="a test")}
    hardware = msgspec.structs.replace(H100, grouped_gemm=[table], sources=sources)
    return Pricer(hardware, Cluster(name="test", hardware=H100.name, nodes=1, devices_per_node=8), Layout())


@pytest.mark.parametrize("gemm_pass", ["fprop", "wgrad"])
def test_measured_products_of_several_experts_have_their_time(gemm_pass: str) -> None:
    """At the measured place exactly (times what a step sustains), far from it the derived price, and it is said."""
    rows, n, k, rate = 8192, 8192, 4096, 2e14
    pricer = measured(gemm_pass, [8, rows, n, k, rate])
    size = (2 + 8) * 8 * n * k if gemm_pass == "wgrad" else 4 * rows * n
    work = GroupedGemm(((rows // 8, 8),), n, k, gemm_pass, "bf16", size)
    assert H100.sustained_gemm is not None
    product_s = pricer.seconds(work)
    assert work.flops / rate <= product_s <= work.flops / rate / H100.sustained_gemm.value
    assert f"grouped_gemm.bf16.{gemm_pass}" not in pricer.outside
    far = GroupedGemm(((64, 128),), 64, 64, gemm_pass, "bf16")
    assert pricer.seconds(far) == pytest.approx(PRICER.seconds(far), rel=0.05)
    assert f"grouped_gemm.bf16.{gemm_pass}" in pricer.outside


def test_a_pass_that_was_not_measured_has_the_derived_price() -> None:
    work = GroupedGemm(((1024, 8),), 8192, 4096, "dgrad", "bf16")
    assert measured("fprop", [8, 8192, 8192, 4096, 1e14]).seconds(work) == PRICER.seconds(work)
