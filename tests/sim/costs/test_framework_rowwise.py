"""A framework's row-wise operator costs the sum of its kernels, each at the rate of its pattern."""

from __future__ import annotations

from typing import get_args

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
LIBRARIES: tuple[FrameworkLibrary, ...] = get_args(FrameworkLibrary)
H100 = replace(
    load_hardware("h100-sxm5-80gb"),
    rowwise_bytes_per_s={},
    framework_rowwise_bytes_per_s={},
    sustained_gemm=None,
)
"""A profile whose row-wise operators all have the common curve."""


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
    assert [k.reads for k in with_residual] == ["nnn", "", ""]
    assert [k.reads for k in alone] == ["nn", "", ""]
    for library in ("eager", "fused", "internevo"):
        both, one = (launches(norm(True, residual=r), library) for r in (True, False))
        assert both == one + 1


def test_megatrons_jit_drops_out_what_joins_the_residual() -> None:
    """Forward writes a mask of a byte an element; backward reads it beside the gradient, in a kernel of its own."""
    added = Rowwise("residual_add", 8192, 4 * ELEMENTS, 2 * ELEMENTS, elements=ELEMENTS)
    moved = {
        library: [
            sum(k.moved_bytes(work) for k in framework_kernels(work, library)) // ELEMENTS
            for work in (added, norm(True, residual=True), norm(True, residual=False))
        ]
        for library in LIBRARIES
    }
    assert moved["fused"] == [6, 12, 6]
    assert moved["jit"] == [7, 12 + 5, 6]


def test_internevos_norms_read_and_write_fp32_copies() -> None:
    forward, backward = ([(k.reads, k.writes) for k in framework_kernels(norm(b), "internevo")] for b in (False, True))
    assert forward == [("n", "w"), ("w", "n")]
    assert backward == [("nw", ""), ("", ""), ("nw", "w"), ("w", "n"), ("nn", "n")]


def test_flash_attentions_kernels_have_an_fp32_residual_and_fuse_gelu_into_products() -> None:
    added = Rowwise("residual_add", 8192, 4 * ELEMENTS, 2 * ELEMENTS, elements=ELEMENTS)
    layer_norm = Rowwise("layer_norm", 8192, 2 * ELEMENTS, 2 * ELEMENTS, elements=ELEMENTS)
    backward = Rowwise("layer_norm.bwd", 8192, 6 * ELEMENTS, 4 * ELEMENTS, elements=ELEMENTS)
    gelu = Rowwise("gelu", 8192, 2 * ELEMENTS, 2 * ELEMENTS, elements=ELEMENTS)
    moved = [
        sum(k.moved_bytes(work) for k in framework_kernels(work, "flash-attn")) // ELEMENTS
        for work in (added, layer_norm, backward, gelu)
    ]
    assert moved == [2 + 4 + 4 + 1, 2, 2 + 4 + 4 + 1 + 2 + 4, 2]


def test_a_library_without_a_curve_has_that_of_the_one_whose_kernels_it_shares() -> None:
    slow = with_curves(H100, elementwise=1e12)
    gate = Rowwise("swiglu", 8192, 4 * ELEMENTS, 2 * ELEMENTS, elements=ELEMENTS)
    assert seconds(gate, "internevo", slow) == pytest.approx(10 * ELEMENTS / 1e12)
    assert seconds(gate, "jit", slow) == seconds(gate, "fused", slow) < seconds(gate, "internevo", slow)
    a100 = load_cluster("a100-1x8")[1]
    gelu = Rowwise("gelu", 8192, 2 * ELEMENTS, 2 * ELEMENTS, elements=ELEMENTS)
    assert seconds(gelu, "jit", a100) > 2 * seconds(gelu, "fused", a100)


def test_a_kernel_runs_at_the_rate_of_its_pattern() -> None:
    slow = with_curves(H100, elementwise=1e12, widen=1e12, broadcast=1e12, strided=1e12, row_sum=0.5e12)
    # Four of 36 bytes an element are read by the mean; two kernels are one launch each.
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


@pytest.mark.parametrize(
    ("kind", "library", "measured_s"),
    [
        ("layer_norm", "eager", 134e-6),
        ("layer_norm.bwd", "eager", 321e-6),
        ("rms_norm", "eager", 1047e-6),
        ("rms_norm.bwd", "eager", 2392e-6),
        ("rotary", "eager", 815e-6),
        ("rotary.bwd", "eager", 1002e-6),
        ("swiglu", "eager", 233e-6),
        ("swiglu.bwd", "eager", 409e-6),
        ("gelu.bwd", "eager", 137e-6),
        ("rms_norm", "compiled", 91e-6),
        ("rms_norm.bwd", "compiled", 164e-6),
        ("rotary", "compiled", 91e-6),
        ("swiglu.bwd", "compiled", 222e-6),
    ],
)
def test_operators_take_what_was_measured_on_h100(kind: str, library: FrameworkLibrary, measured_s: float) -> None:
    """Whole operators of 16,384 rows of 4096 under the profiler; rates were taken from single kernels."""
    elements = 16384 * 4096
    work = Rowwise(kind, 16384, 0, 2 * elements, elements=elements)
    found = RowwiseRates(load_hardware("h100-sxm5-80gb")).seconds(work, set(), library)
    assert found == pytest.approx(measured_s, rel=0.2)


def test_a_measured_library_never_takes_the_curves_of_our_own_kernels() -> None:
    own = {"rms_norm": Curve(x=[1e3, 1e12], y=[1e11, 1e11], source="test")}
    sources = {**H100.sources, "test": Source(kind="assumed", text="a test's")}
    ours = replace(H100, rowwise_bytes_per_s=own, sources=sources)
    assert seconds(norm(), "eager", ours) > 5 * seconds(norm(), "eager", H100)
    without = with_curves(H100, elementwise=1e12)
    measured = replace(without, rowwise_bytes_per_s=own)
    assert seconds(norm(), "eager", measured) == seconds(norm(), "eager", without)


def test_torchs_loss_parallel_makes_more_passes_than_megatrons() -> None:
    """Sixteen passes over the fp32 logits of a rank instead of Megatron-LM's ten, in fourteen kernels."""
    logits = 4 * ELEMENTS
    megatron = [
        Rowwise("loss.max", 8192, logits, 0, elements=ELEMENTS),
        Rowwise("loss.exp", 8192, 3 * logits, 2 * logits, elements=ELEMENTS),
        Rowwise("loss.softmax", 8192, logits, logits, elements=ELEMENTS),
        Rowwise("loss.gradient", 8192, logits, logits, elements=ELEMENTS),
    ]
    assert sum(work.moved_bytes for work in megatron) == 10 * logits
    for library in ("eager", "compiled"):  # torchtitan compiles the blocks of the model
        kernels = [(kernel, work) for work in megatron for kernel in framework_kernels(work, library)]
        assert sum(kernel.moved_bytes(work) for kernel, work in kernels) == 16 * logits
        assert sum(launches(work, library) for work in megatron) == 14
    assert [framework_kernels(work, "fused") for work in megatron] == [()] * 4
