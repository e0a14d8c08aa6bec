"""A framework's row-wise operator costs the sum of its kernels, each at the rate of its pattern."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memo_sim.contract.catalog import load_cluster, load_hardware
from memo_sim.contract.hardware import Curve, Hardware, Quantity, Source
from memo_sim.contract.knobs import FrameworkLibrary
from memo_sim.contract.plan import Layout
from memo_sim.costs.pricing import Pricer
from memo_sim.costs.rowwise import RowwiseRates
from memo_sim.program.ir.work import Gemm, Rowwise
from memo_sim.program.operators.framework_kernels import framework_kernels, launches

ELEMENTS = 8192 * 4096
LIBRARIES: tuple[FrameworkLibrary, ...] = ("eager", "compiled", "fused")
H100 = load_hardware("h100-sxm5-80gb")


def norm(backward: bool = False, *, residual: bool = True) -> Rowwise:
    moved = 2 * ELEMENTS
    if not backward:
        return Rowwise("rms_norm", 8192, moved, moved, elements=ELEMENTS)
    written = 2 * moved if residual else moved
    return Rowwise("rms_norm.bwd", 8192, 3 * moved, written, elements=ELEMENTS)


def with_curves(hardware: Hardware, **rates: float) -> Hardware:
    """Return the profile with flat curves of eager kernels by pattern, in bytes/s."""
    curves = {pattern: Curve(x=[1e3, 1e12], y=[rate, rate], source="test") for pattern, rate in rates.items()}
    sources = {**hardware.sources, "test": Source(kind="assumed", text="a test's")}
    return replace(hardware, framework_rowwise_bytes_per_s={"eager": curves}, sources=sources)


def seconds(work: Rowwise, library: FrameworkLibrary, hardware: Hardware = H100) -> float:
    return RowwiseRates(hardware).seconds(work, set(), library)


def test_eager_norms_are_many_kernels_and_take_several_times_as_long() -> None:
    own = RowwiseRates(H100).seconds(norm(), set())
    assert 8 * own < seconds(norm(), "eager") < 12 * own
    assert seconds(norm(), "fused") == seconds(norm(), "compiled") == pytest.approx(own)


def test_a_compiled_backward_adds_the_residual_in_the_same_kernel() -> None:
    with_residual, alone = (framework_kernels(norm(True, residual=r), "compiled") for r in (True, False))
    assert [k.reads for k in with_residual] == ["nnn", "nn", ""]
    assert [k.reads for k in alone] == ["nn", "nn", ""]
    for library in ("eager", "fused"):
        both, one = (launches(norm(True, residual=r), library) for r in (True, False))
        assert both == one + 1


def test_a_kernel_runs_at_the_rate_of_its_pattern() -> None:
    slow = with_curves(H100, elementwise=1e12, row_sum=0.5e12)
    # 32 of 36 bytes an element are elementwise, four are read by the mean; two kernels are one launch each.
    wanted = ELEMENTS * (32 / 1e12 + 4 / 0.5e12) + 2 * H100.launch_floor_s.value
    assert seconds(norm(), "eager", slow) == pytest.approx(wanted, rel=1e-9)
    assert seconds(norm(), "fused", slow) == seconds(norm(), "fused")


def test_a_curve_that_is_left_is_named() -> None:
    outside: set[str] = set()
    narrow = Curve(x=[1.0, 2.0], y=[1e12, 1e12], source="test")
    sources = {**H100.sources, "test": Source(kind="assumed", text="a test's")}
    hardware = replace(H100, framework_rowwise_bytes_per_s={"fused": {"norm": narrow}}, sources=sources)
    RowwiseRates(hardware).seconds(norm(), outside, "fused")
    assert outside == {"rowwise.fused.norm"}


def test_an_operator_that_a_library_has_no_kernels_for_is_one_kernel() -> None:
    copy = Rowwise("copy", 8192, 2 * ELEMENTS, 2 * ELEMENTS)
    for library in LIBRARIES:
        assert framework_kernels(copy, library) == ()
        assert seconds(copy, library) == RowwiseRates(H100).seconds(copy, set())
        assert launches(copy, library) == 1


@pytest.mark.parametrize("kind", ["rms_norm", "rotary", "gelu", "swiglu"])
def test_compiled_and_fused_move_less_and_launch_less_than_eager(kind: str) -> None:
    moved, count = {}, {}
    for library in LIBRARIES:
        both = [Rowwise(f"{kind}{end}", 8192, 4 * ELEMENTS, 2 * ELEMENTS, elements=ELEMENTS) for end in ("", ".bwd")]
        moved[library] = sum(k.moved_bytes(work) for work in both for k in framework_kernels(work, library))
        count[library] = sum(launches(work, library) for work in both)
    assert max(moved["compiled"], moved["fused"]) <= moved["eager"]
    assert max(count["compiled"], count["fused"]) <= count["eager"]


def test_products_run_at_their_sustained_rate() -> None:
    work = Gemm(8192, 4096, 4096, "fprop", "bf16")
    sources = {**H100.sources, "test": Source(kind="assumed", text="a test's")}
    slower = replace(H100, sustained_gemm=Quantity(value=0.8, source="test"), sources=sources)
    cluster = load_cluster("h100-1x8")[0]
    alone, inside = (Pricer(each, cluster, Layout()).seconds(work) for each in (H100, slower))
    assert inside == pytest.approx(alone / 0.8)
