"""A loss with the classifier's product inside has its own measured rates, or those of torch's products and passes."""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import LinearLossTable, Source
from memo_sim.contract.plan import Layout
from memo_sim.costs.pricing import Pricer
from memo_sim.costs.rowwise import RowwiseRates
from memo_sim.program.ir.work import Gemm, LinearLoss, Rowwise, TileGemm

CLUSTER, H100 = load_cluster("h100-1x8")
PLAIN = Pricer(H100, CLUSTER, Layout())
SIZES = (32768, 4096)


def work(part: str, kernel: str, columns: int, tile: int = 8192) -> LinearLoss:
    return LinearLoss(part, kernel, SIZES[0], columns, SIZES[1], "bf16", tile)  # type: ignore[arg-type]


@pytest.mark.parametrize(("part", "kind", "passes"), [("statistics", "stats", 1), ("gradient", "divided", 2)])
def test_torchs_operators_are_products_and_passes_over_each_tile(part: str, kind: str, passes: int) -> None:
    expected = 0.0
    for columns, times in ((8192, 2), (1024, 1)):
        size = 2 * SIZES[0] * columns
        product = Gemm(SIZES[0], columns, SIZES[1], "fprop", "bf16")
        logits = Rowwise(f"cross_entropy.{kind}", SIZES[0], size, (passes - 1) * size)
        expected += times * (PLAIN.seconds(product) + PLAIN.seconds(logits))
    assert PLAIN.seconds(work(part, "torch", 2 * 8192 + 1024)) == pytest.approx(expected, rel=1e-12)


def test_tritons_kernels_without_rates_are_refused() -> None:
    with pytest.raises(Infeasible, match="has not measured triton's loss") as caught:
        PLAIN.seconds(work("gradient", "triton", 8192))
    assert "--loss linear" in caught.value.hint


def test_a_measured_kernel_has_its_rate() -> None:
    rows = [[16384.0, 8192.0, 4096.0, 3e14], [65536.0, 8192.0, 4096.0, 4e14]]
    table = LinearLossTable(kernel="triton", dtype="bf16", part="gradient", rows=rows, source="bench")
    sources = {**H100.sources, "bench": Source(kind="measured", text="made up")}
    pricer = Pricer(msgspec.structs.replace(H100, linear_loss=[table], sources=sources), CLUSTER, Layout())
    sustained = 1.0 if H100.sustained_gemm is None else H100.sustained_gemm.value
    asked = LinearLoss("gradient", "triton", 16384, 8192, 4096, "bf16", 8192)
    assert pricer.seconds(asked) == pytest.approx(asked.flops / 3e14 / sustained, rel=0.02)
    assert not pricer.outside
    pricer.seconds(LinearLoss("gradient", "triton", 131072, 8192, 4096, "bf16", 8192))
    assert pricer.outside == {"linear_loss.triton.bf16.gradient"}
    with pytest.raises(Infeasible):
        pricer.seconds(work("statistics", "triton", 8192))


def test_an_inputs_gradient_is_summed_in_fp32() -> None:
    """The first tile writes 4 bytes an element in place of 2, a further one reads and writes 4."""

    def beyond_the_product(column: int) -> float:
        shape = (32768, 4096, 8192, "dgrad", "bf16")
        return PLAIN.seconds(TileGemm(*shape, column)) - PLAIN.seconds(Gemm(*shape))  # type: ignore[arg-type]

    rates = RowwiseRates(H100)
    for column, size in ((0, 2), (8192, 6)):
        assert beyond_the_product(column) == pytest.approx(rates.stream_seconds(32768 * 4096 * size))
    assert PLAIN.seconds(TileGemm(8192, 4096, 32768, "wgrad", "bf16", 8192)) == PLAIN.seconds(
        Gemm(8192, 4096, 32768, "wgrad", "bf16")
    )
