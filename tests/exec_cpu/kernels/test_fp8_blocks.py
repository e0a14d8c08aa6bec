"""FP8 kernels with scales of blocks by hand: scales, copies, products, parts, and what a GPU's product is given."""

from typing import Any

import pytest
import torch
from torch import Tensor

from memo_exec.kernels import KERNELS, Call, Context
from memo_exec.kernels.fp8_blocks import Blocks, blocks, multiply, quantise_weight, weight_blocks
from memo_exec.kernels.fp8_scales import Fp8Scales
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import Fp8Gemm, Rowwise, Work
from memo_sim.program.layout.fp8 import weights
from memo_sim.program.layout.parameters import layer_block
from tests.exec_cpu.small import decide, gpt

E4M3 = torch.float8_e4m3fn
PLAN = decide(gpt(hidden=128, head_dim=32, ffn_hidden=256), dtype="bf16", fp8="block", fp8_layouts="tn")


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers whose blocks have scales of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * torch.randn(*shape, generator=generator).exp()).bfloat16()


def by_hand(x: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """Return what blocks of ``high`` x 128 values stand for, and their scales, in plain torch."""
    groups = x.float().reshape(len(x) // high, high, -1, 128)
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax((1, 3), keepdim=True) / 448)))
    return ((groups / scale).to(E4M3).float() * scale).flatten(2).flatten(0, 1), scale.flatten(2).flatten(0, 1)


class Hand:
    """Calls kernels with the same scales, and with scratch for 256 rows of 128 features."""

    def __init__(self) -> None:
        self.context = Context(PLAN, torch.device("cpu"))
        self.scales = self.context.fp8 = Fp8Scales(torch.device("cpu"), scratch_bytes=4 * 256 * 128)

    def __call__(self, op: str, work: Work | None = None, **tensors: Tensor) -> None:
        instruction = Instruction(f"fwd/{op}", op, Lane.COMPUTE, work or Rowwise(op, 1, 0, 0), ())
        with torch.inference_mode():
            KERNELS[op](Call(instruction, self.context, tensors))

    def quantised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the copies by rows and by columns."""
        out, columns = (torch.empty(len(x), x.shape[1] * 33 // 32, dtype=E4M3) for _ in range(2))
        self("fp8.quantize", x=x, out=out, columns=columns)
        return out, columns


def values(copy: Tensor, *, by_columns: bool = False) -> Tensor:
    part = blocks(copy.view(-1), copy.shape[1], by_columns=by_columns)
    return part.matrix.float() * part.scale.repeat_interleave(128, 1)


def product(m: int, n: int, k: int) -> Fp8Gemm:
    return Fp8Gemm(m, n, k, "fprop", "bf16", "fp8-block")


def test_copies_have_powers_of_two_for_128_features_and_for_128_tokens() -> None:
    x = random(384, 256)
    rows, columns = Hand().quantised(x)
    wanted, scale = by_hand(x, 1)
    assert torch.equal(values(rows), wanted)
    assert torch.equal(blocks(rows.view(-1), rows.shape[1], by_columns=False).scale, scale)
    assert torch.equal(values(columns, by_columns=True), by_hand(x.t(), 1)[0])
    assert not torch.equal(values(columns, by_columns=True).t(), wanted)


def test_a_block_of_powers_of_two_and_of_zeros_and_one_with_no_number() -> None:
    x = torch.zeros(128, 256).bfloat16()
    x[0, 0], x[1, 0], x[2, :128], x[3, 3] = 448.0 * 4, 450.0, torch.nan, torch.inf
    rows, _ = Hand().quantised(x)
    scale = blocks(rows.view(-1), rows.shape[1], by_columns=False).scale
    assert scale[:2, 0].tolist() == [4.0, 2.0]
    found = values(rows)
    assert float(found[0, 0]) == 448.0 * 4
    assert torch.equal(found[4:], torch.zeros(124, 256))
    assert found[2, :128].isnan().all()
    assert found[3, 3].isnan()
    assert torch.equal(found[:, 128:], torch.zeros(128, 128))


def test_every_matrix_of_a_layer_has_scales_of_128_x_128_and_its_copy_by_columns_the_same() -> None:
    hand, block = Hand(), layer_block(PLAN.model, 1, PLAN.model.layer(0))
    matrices = weights(PLAN, block)
    elements = sum(each.elements for each in matrices)
    x, out, columns = random(elements), torch.empty(elements, dtype=E4M3), torch.empty(elements, dtype=E4M3)
    hand("params.quantize", x=x, out=out, columns=columns)
    for each in matrices:
        part, (n, k) = slice(each.first, each.first + each.elements), each.shape
        wanted, scale = by_hand(x[part].view(n, k), 128)
        one, other = weight_blocks(hand.scales, out[part], n, k), weight_blocks(hand.scales, columns[part], k, n)
        assert torch.equal(one.scale[:, : k // 128], scale)
        assert torch.equal(other.scale[:, : n // 128], scale.t())
        assert torch.equal(one.matrix.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1), wanted)
        assert torch.equal(other.matrix.float(), one.matrix.float().t())


def test_rows_that_were_gathered_are_multiplied_part_by_part_and_joined_by_columns() -> None:
    hand, x, grad = Hand(), random(384, 256), random(384, 128, seed=2)
    rows, columns = (torch.empty(384, 264, dtype=E4M3) for _ in range(2))
    for part in (slice(0, 128), slice(128, 384)):
        hand("fp8.quantize", x=x[part], out=rows[part], columns=columns[part])
    wanted, g_values = by_hand(x, 1)[0], by_hand(grad.t(), 1)[0]
    x_values = by_hand(x.t(), 1)[0]
    weight, w_rows = random(128, 256, seed=1), torch.empty(128, 256, dtype=E4M3)
    model_weight = by_hand(weight, 128)[0]
    quantise_weight(hand.scales, weight, w_rows, None)
    bias, out = random(128, seed=3), torch.empty(384, 128).bfloat16()
    hand("linear", product(384, 128, 256), x=rows, weight=w_rows.view(-1), bias=bias, out=out)
    torch.testing.assert_close(out.float(), wanted @ model_weight.t() + bias.float(), rtol=2**-7, atol=2**-4)
    _, g_columns = hand.quantised(grad)
    d_w, alone, joined = torch.zeros(128 * 256), torch.empty(128, 256).bfloat16(), torch.empty_like(columns)
    sums = g_values @ x_values.t()
    hand("linear.wgrad", product(128, 256, 384), grad=g_columns, x=columns, out=d_w)
    torch.testing.assert_close(d_w.view(128, 256), sums, rtol=1e-4, atol=1e-2)
    hand("linear.wgrad.product", product(128, 256, 384), grad=g_columns, x=columns, out=alone)
    torch.testing.assert_close(alone.float(), sums, rtol=2**-7, atol=2**-2)
    hand("fp8.transpose", x=columns, out=joined)
    assert torch.equal(values(joined, by_columns=True), x_values)
    assert len(hand.scales.whole_parts(joined)) == 1


def test_a_cut_part_is_no_matrix() -> None:
    hand = Hand()
    rows, _ = hand.quantised(random(256, 128))
    out = torch.empty(128, 128).bfloat16()
    weight = torch.empty(128, 128, dtype=E4M3)
    hand.scales.made(weight)
    with pytest.raises(ValueError, match="part of tokens that were quantised together"):
        hand("linear", product(128, 128, 128), x=rows[:128], weight=weight.view(-1), out=out)


@pytest.mark.parametrize("rows", [slice(0, 256), slice(128, 256)], ids=["all", "a part"])
def test_a_gpu_is_given_scales_in_the_strides_that_it_takes(rows: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch checks shapes and strides of scales for a GPU also where there is none."""
    called = list[str]()

    def checked(*operands: Any, out: Tensor) -> None:
        made = torch.ops.aten._scaled_mm_v2.default(*operands)
        assert (made.shape, made.dtype) == (out.shape, out.dtype)
        called.append(str(operands[6]))

    monkeypatch.setattr(torch, "_scaled_mm_v2", checked)
    with torch.device("meta"):  # whose checks are those of a GPU
        x = blocks(torch.empty(384 * 264, dtype=E4M3), 264, by_columns=False)
        columns = blocks(torch.empty(384 * 264, dtype=E4M3), 264, by_columns=True)
        weight = Blocks(torch.empty(640, 256, dtype=E4M3), torch.empty(640 // 128, 4), weight=True)
        multiply(x, weight, torch.empty(384, 640, dtype=torch.bfloat16))
        some, tokens = columns.rows(rows, torch.empty(2**18)), columns.tokens(128, 384)
        multiply(some, columns, torch.empty(rows.stop - rows.start, 256))
        multiply(tokens, tokens, torch.empty(256, 256))
    assert len(called) == 3


def test_scratch_holds_a_block_of_the_widest_rows() -> None:
    x = random(256, 512)
    hand = Hand()
    hand.scales.wide = hand.scales.wide[: 128 * 256]
    assert torch.equal(values(hand.quantised(x)[0]), by_hand(x, 1)[0])
