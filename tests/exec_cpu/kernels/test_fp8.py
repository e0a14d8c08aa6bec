"""FP8 kernels by hand: scales, copies by rows and by columns, and products of the values that the copies stand for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from memo_exec.kernels import KERNELS, Call, Context
from memo_exec.kernels.fp8 import Scaled, multiply
from memo_exec.kernels.fp8_scales import Fp8Scales
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import Fp8Gemm, Rowwise, Work
from memo_sim.program.layout.fp8 import weights
from memo_sim.program.layout.parameters import layer_block
from tests.exec_cpu.small import decide, gpt

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
ROWS_OF_SCRATCH = 32
PLAN: Decisions = decide(gpt(), dtype="bf16", fp8="tensor", fp8_layouts="tn")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what current scaling makes of ``x``, and the scale, in plain torch."""
    scale = x.float().abs().max() / LARGEST[dtype]
    return (x.float() / scale).to(dtype), scale


class Hand:
    """Calls kernels one after the other with the same scales, and with scratch for few rows of 64 features."""

    def __init__(self) -> None:
        self.context = Context(PLAN, torch.device("cpu"))
        self.context.fp8 = Fp8Scales(torch.device("cpu"), scratch_bytes=4 * 64 * ROWS_OF_SCRATCH)

    def __call__(self, op: str, work: Work | None = None, **tensors: Tensor) -> None:
        instruction = Instruction(f"fwd/{op}", op, Lane.COMPUTE, work or Rowwise(op, 1, 0, 0), ())
        with torch.inference_mode():
            KERNELS[op](Call(instruction, self.context, tensors))

    def scale(self, copy: Tensor) -> float:
        assert self.context.fp8 is not None
        return float(self.context.fp8.of(copy))

    def quantised(self, x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor, Tensor]:
        """Return the copies by rows and by columns, and the values that they stand for."""
        out, columns = torch.empty(x.shape, dtype=dtype), torch.empty(x.shape, dtype=dtype)
        self("fp8.quantize", x=x, out=out, columns=columns)
        return out, columns, out.float() * self.scale(out)


def product(m: int, n: int, k: int) -> Fp8Gemm:
    return Fp8Gemm(m, n, k, "fprop", "bf16", "fp8-tensor")


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_copies_are_the_rounded_values_and_their_transposition(dtype: torch.dtype) -> None:
    hand, x = Hand(), random(80, 64)
    out, columns, values = hand.quantised(x, dtype)
    wanted, scale = rounded(x, dtype)
    assert torch.equal(out.float(), wanted.float())
    assert torch.equal(columns.view(64, 80).float(), wanted.float().t())
    assert hand.scale(out) == hand.scale(columns) == float(scale)
    assert float(out.float().abs().max()) == LARGEST[dtype]
    assert float((values - x.float()).abs().max()) <= float(x.float().abs().max()) * 2.0 ** (
        -4 if dtype is E4M3 else -3
    )


def test_zeros_stay_zeros_and_what_is_not_a_number_stays_so() -> None:
    hand = Hand()
    assert torch.equal(hand.quantised(torch.zeros(16, 64).bfloat16())[2], torch.zeros(16, 64))
    assert hand.quantised(torch.full((16, 64), torch.nan).bfloat16())[2].isnan().all()


def test_products_are_those_of_the_values_that_the_copies_stand_for() -> None:
    hand, x, weight, grad = Hand(), random(80, 64), random(48, 64, seed=1), random(80, 48, seed=2)
    x_rows, x_columns, x_values = hand.quantised(x)
    w_rows, w_columns, w_values = hand.quantised(weight)
    g_rows, g_columns, g_values = hand.quantised(grad, E5M2)
    bias = random(48, seed=3)
    out, d_x, d_w = torch.empty(80, 48).bfloat16(), torch.empty(80, 64).bfloat16(), random(48 * 64, seed=4).float()
    begun = d_w.clone().view(48, 64)
    hand("linear", product(80, 48, 64), x=x_rows, weight=w_rows.view(-1), bias=bias, out=out)
    # Weights are flat in their block, and so is the copy by columns.
    assert hand.context.fp8 is not None
    hand("linear.dgrad", product(80, 64, 48), grad=g_rows, weight=w_columns.view(-1), out=d_x)
    hand("linear.wgrad", product(48, 64, 80), grad=g_columns, x=x_columns, out=d_w)
    torch.testing.assert_close(out.float(), x_values @ w_values.t() + bias.float(), rtol=2**-7, atol=2**-6)
    torch.testing.assert_close(d_x.float(), g_values @ w_values, rtol=2**-7, atol=2**-6)
    torch.testing.assert_close(d_w.view(48, 64), begun + g_values.t() @ x_values, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("contiguous", [True, False], ids=["rows", "columns"])
def test_a_gpu_is_given_operands_that_are_contiguous_where_it_sums(
    contiguous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch checks the layouts of operands for a GPU also where there is none; on a CPU no such product runs."""
    called = list[tuple[int, ...]]()

    def checked(*operands: Any, out: Tensor, **options: Any) -> None:
        made = torch.ops.aten._scaled_mm.default(*operands, **options)
        assert (made.shape, made.dtype) == (out.shape, out.dtype)
        called.append(tuple(made.shape))

    monkeypatch.setattr(torch, "_scaled_mm", checked)
    with torch.device("meta"):  # whose checks are those of a GPU
        x, weight, out = torch.empty(80, 64, dtype=E4M3), torch.empty(48, 64, dtype=E4M3), torch.empty(80, 48)
        scale, bias = torch.empty(1), torch.empty(48, dtype=torch.bfloat16)
        if not contiguous:
            with pytest.raises(RuntimeError, match="col_major"):
                multiply(Scaled(x, scale), Scaled(weight.t().contiguous().t(), scale), out, scratch=out.view(-1))
            return
        multiply(Scaled(x, scale), Scaled(weight, scale), out.bfloat16(), scratch=out.view(-1), bias=bias, fast=True)
        part = Scaled(torch.empty(48, 160, dtype=E5M2), scale).tokens(80, 160).rows(slice(16, 48), out.view(-1))
        multiply(part, Scaled(torch.empty(64, 80, dtype=E4M3), scale), torch.empty(32, 64), scratch=out.view(-1))
    assert called == [(80, 48), (32, 64)]


def test_every_matrix_of_a_layer_has_a_scale_of_its_own() -> None:
    hand, block = Hand(), layer_block(PLAN.model, 1, PLAN.model.layer(0))
    matrices = weights(PLAN, block)
    elements = sum(each.elements for each in matrices)
    x = torch.cat([random(each.elements, seed=i) * (i + 1) for i, each in enumerate(matrices)])
    out, columns = torch.empty(elements, dtype=E4M3), torch.empty(elements, dtype=E4M3)
    hand("params.quantize", x=x, out=out, columns=columns)
    for each in matrices:
        part = slice(each.first, each.first + each.elements)
        wanted, scale = rounded(x[part].view(each.shape), E4M3)
        assert hand.scale(out[part]) == hand.scale(columns[part]) == float(scale)
        assert torch.equal(out[part].view(each.shape).float(), wanted.float())
        assert torch.equal(columns[part].view(each.shape[::-1]).float(), wanted.float().t())


def test_a_copy_that_is_moved_keeps_its_scale() -> None:
    hand = Hand()
    out, _, _ = hand.quantised(random(16, 64))
    host, back = torch.empty_like(out), torch.empty_like(out)
    hand("d2h", source=out, target=host)
    hand("h2d", source=host, target=back)
    assert hand.scale(back) == hand.scale(out)


def test_rows_that_were_not_quantised_have_no_scale() -> None:
    hand = Hand()
    never = torch.empty(16, 64, dtype=E4M3)  # before copies, so that they have no address of one that was freed
    both = torch.empty(64, 64, dtype=E4M3)
    out, _, _ = hand.quantised(random(32, 64))
    scales = hand.context.fp8
    assert scales is not None
    assert [(p.first, p.elements) for p in scales.parts(out[:16])] == [(0, 16 * 64)]
    with pytest.raises(ValueError, match="not quantised"):
        hand.scale(never)
    hand("fp8.quantize", x=random(32, 64), out=both[:32], columns=torch.empty(32, 64, dtype=E4M3))
    with pytest.raises(ValueError, match="not quantised"):
        scales.parts(both)
    hand("fp8.quantize", x=random(32, 64, seed=1) * 2, out=both[32:], columns=torch.empty(32, 64, dtype=E4M3))
    assert len(scales.parts(both)) == 2
    with pytest.raises(ValueError, match="2 scales"):
        hand.scale(both)
    # Quantised together, the same addresses have one scale again.
    hand("fp8.quantize", x=random(64, 64, seed=2), out=both, columns=torch.empty(64, 64, dtype=E4M3))
    assert len(scales.parts(both)) == 1


def test_rows_with_several_scales_are_multiplied_part_by_part() -> None:
    hand, weight, grad = Hand(), random(48, 64, seed=1), random(80, 48, seed=2)
    x = torch.cat([random(32, 64), random(48, 64, seed=3) * 8])
    rows, columns = torch.empty(80, 64, dtype=E4M3), torch.empty(80, 64, dtype=E4M3)
    for part in (slice(0, 32), slice(32, 80)):
        hand("fp8.quantize", x=x[part], out=rows[part], columns=columns[part])
    values = torch.cat([rows[part].float() * hand.scale(rows[part]) for part in (slice(0, 32), slice(32, 80))])
    w_rows, _, w_values = hand.quantised(weight)
    _, g_columns, g_values = hand.quantised(grad, E5M2)
    out, d_w, alone = torch.empty(80, 48).bfloat16(), torch.zeros(48 * 64), torch.empty(48, 64).bfloat16()
    hand("linear", product(80, 48, 64), x=rows, weight=w_rows.view(-1), out=out)
    torch.testing.assert_close(out.float(), values @ w_values.t(), rtol=2**-7, atol=2**-5)
    hand("linear.wgrad", product(48, 64, 80), grad=g_columns, x=columns, out=d_w)
    torch.testing.assert_close(d_w.view(48, 64), g_values.t() @ values, rtol=1e-5, atol=1e-3)
    hand("linear.wgrad.product", product(48, 64, 80), grad=g_columns, x=columns, out=alone)
    torch.testing.assert_close(alone.float(), g_values.t() @ values, rtol=2**-7, atol=2**-5)
    # A copy that was gathered by rows is transposed part by part.
    turned = torch.empty_like(columns)
    hand("fp8.transpose", x=rows, out=turned)
    assert torch.equal(turned.view(torch.uint8), columns.view(torch.uint8))


def test_moves_keep_the_scale_of_each_part() -> None:
    hand, rows, back = Hand(), torch.empty(64, 64, dtype=E4M3), torch.empty(64, 64, dtype=E4M3)
    for number, part in enumerate((slice(0, 32), slice(32, 64))):
        hand("fp8.quantize", x=random(32, 64, seed=number) * (number + 1), out=rows[part])
    hand("copy", source=rows, target=back)
    assert [hand.scale(back[p]) for p in (slice(0, 32), slice(32, 64))] == [
        hand.scale(rows[p]) for p in (slice(0, 32), slice(32, 64))
    ]
