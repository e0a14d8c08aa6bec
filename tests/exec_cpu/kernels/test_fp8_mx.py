"""MXFP8 kernels by hand: scales in tiles, copies, products, parts of tokens, and what a GPU's product is given."""

from typing import Any

import pytest
import torch
from torch import Tensor

from memo_exec.kernels import KERNELS, Call, Context
from memo_exec.kernels.fp8_mx import blocks, multiply, values
from memo_exec.kernels.fp8_scales import Fp8Scales
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import Fp8Gemm, Rowwise, Work
from memo_sim.program.layout.fp8 import copied_elements, row_features, weights
from memo_sim.program.layout.parameters import layer_block
from tests.exec_cpu.small import decide, gpt

E4M3 = torch.float8_e4m3fn
PLAN = decide(gpt(hidden=128, head_dim=32, ffn_hidden=256), dtype="bf16", fp8="mx", fp8_layouts="any")


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers whose blocks have scales of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * torch.randn(*shape, generator=generator).exp()).bfloat16()


def by_hand(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what blocks of 32 values of a row stand for, and their scales, in plain torch."""
    groups = x.float().reshape(len(x), -1, 32)
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(2, keepdim=True) / 448)))
    return ((groups / scale).to(E4M3).float() * scale).flatten(1), scale.squeeze(2)


class Hand:
    """Calls kernels with the same scales, and with scratch for 256 rows of 256 features."""

    def __init__(self) -> None:
        self.context = Context(PLAN, torch.device("cpu"))
        self.scales = self.context.fp8 = Fp8Scales(torch.device("cpu"), scratch_bytes=4 * 256 * 256)

    def __call__(self, op: str, work: Work | None = None, **tensors: Tensor) -> None:
        instruction = Instruction(f"fwd/{op}", op, Lane.COMPUTE, work or Rowwise(op, 1, 0, 0), ())
        with torch.inference_mode():
            KERNELS[op](Call(instruction, self.context, tensors))

    def quantised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the copies by rows and by columns."""
        out, columns = (torch.empty(len(x), row_features("mx", x.shape[1]), dtype=E4M3) for _ in range(2))
        self("fp8.quantize", x=x, out=out, columns=columns)
        return out, columns


def stood_for(copy: Tensor, *, by_columns: bool = False) -> Tensor:
    return values(blocks(copy.view(-1), copy.shape[1], by_columns=by_columns))


def product(m: int, n: int, k: int) -> Fp8Gemm:
    return Fp8Gemm(m, n, k, "fprop", "bf16", "fp8-mx")


def test_copies_have_powers_of_two_for_32_features_and_for_32_tokens() -> None:
    x = random(384, 256)
    rows, columns = Hand().quantised(x)
    assert torch.equal(stood_for(rows), by_hand(x)[0])
    assert torch.equal(stood_for(columns, by_columns=True), by_hand(x.t())[0])
    assert not torch.equal(stood_for(columns, by_columns=True).t(), by_hand(x)[0])


def test_scales_lie_in_tiles_of_128_rows_and_4_blocks() -> None:
    """Every byte by a plain loop over rows and blocks: cuBLASLt's formula of the offset."""
    x = random(384, 256)
    for copy, source, by_columns in zip(Hand().quantised(x), (x, x.t()), (False, True), strict=True):
        scale = by_hand(source)[1]
        found = copy.view(-1)[source.numel() :].view(torch.uint8)
        assert found.numel() == scale.numel() == source.numel() // 32
        across = scale.shape[1] // 4
        for r, c in ((r, c) for r in range(scale.shape[0]) for c in range(scale.shape[1])):
            tile = (r // 128) * across + c // 4
            byte = tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
            assert 2.0 ** (int(found[byte]) - 127) == scale[r, c], (by_columns, r, c)


def test_blocks_of_powers_of_two_of_zeros_of_the_least_numbers_and_with_no_number() -> None:
    x = torch.zeros(128, 128).bfloat16()
    x[0, 0], x[1, 0], x[2, :32], x[3, 3], x[4, 0] = 448.0 * 4, 450.0, torch.nan, torch.inf, 2.0**-126
    found = stood_for(Hand().quantised(x)[0])
    assert float(found[0, 0]) == 448.0 * 4
    assert float(found[1, 0]) == 448.0  # 225 lies nearer to 224 than to 240, with a scale of 2
    assert found[2, :32].isnan().all()
    assert found[3, :32].isnan().all()
    assert torch.equal(found[:, 32:], torch.zeros(128, 96))
    assert float(found[4, 0]) == 2.0**-126


def test_every_matrix_of_a_layer_has_two_copies_of_its_bf16_values_in_the_bytes_that_are_planned() -> None:
    hand, block = Hand(), layer_block(PLAN.model, 1, PLAN.model.layer(0))
    matrices = weights(PLAN, block)
    elements = sum(each.elements for each in matrices)
    x, copies = random(elements), torch.empty(copied_elements(PLAN, block), dtype=E4M3)
    assert copies.numel() == 2 * elements + 2 * elements // 32
    hand("params.quantize", x=x, out=copies[:elements], columns=copies[elements:])
    for each in matrices:
        part, (n, k) = slice(each.first, each.first + each.elements), each.shape
        weight = x[part].view(n, k)
        rows, _ = hand.quantised(random(128, k, seed=1))
        grads, _ = hand.quantised(random(128, n, seed=2))
        out, d_x = torch.empty(128, n).bfloat16(), torch.empty(128, k).bfloat16()
        turned = copies[elements:][part]
        hand("linear", product(128, n, k), x=rows, weight=copies[part], out=out)
        hand("linear.dgrad", product(128, k, n), grad=grads, weight=turned, out=d_x)
        wanted = by_hand(random(128, k, seed=1))[0] @ by_hand(weight)[0].t()
        torch.testing.assert_close(out.float(), wanted, rtol=2**-7, atol=2**-3)
        wanted = by_hand(random(128, n, seed=2))[0] @ by_hand(weight.t())[0].t()
        torch.testing.assert_close(d_x.float(), wanted, rtol=2**-7, atol=2**-3)


def test_rows_that_ranks_quantised_apart_are_summed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient was quantised as one matrix, so its scales of some tokens are copied, in pieces that fit."""
    monkeypatch.setattr("memo_exec.kernels.fp8.MX_TOKENS", 128)
    hand, x, grad = Hand(), random(512, 256), random(512, 384, seed=2)
    rows, columns = (torch.empty(512, 264, dtype=E4M3) for _ in range(2))
    for part in (slice(0, 256), slice(256, 512)):
        hand("fp8.quantize", x=x[part], out=rows[part], columns=columns[part])
    assert len(hand.scales.whole_parts(columns)) == 2
    _, g_columns = hand.quantised(grad)
    sums = by_hand(grad.t())[0] @ by_hand(x.t())[0].t()
    d_w, alone = torch.ones(384 * 256), torch.empty(384, 256).bfloat16()
    hand("linear.wgrad", product(384, 256, 512), grad=g_columns, x=columns, out=d_w)
    torch.testing.assert_close(d_w.view(384, 256), sums + 1, rtol=1e-4, atol=1e-2)
    hand("linear.wgrad.product", product(384, 256, 512), grad=g_columns, x=columns, out=alone)
    torch.testing.assert_close(alone.float(), sums, rtol=2**-7, atol=2**-2)


def test_a_gpu_is_given_scales_in_the_sizes_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch checks sizes and dtypes of scales for a GPU also where there is none."""
    called = list[tuple[int, int]]()

    def checked(*operands: Any, out: Tensor) -> None:
        made = torch.ops.aten._scaled_mm_v2.default(*operands)
        assert (made.shape, made.dtype) == (out.shape, out.dtype)
        assert operands[2][0].is_contiguous()
        assert operands[5][0].is_contiguous()
        called.append((len(operands[0]), operands[1].shape[1]))

    monkeypatch.setattr(torch, "_scaled_mm_v2", checked)
    with torch.device("meta"):  # whose checks are those of a GPU
        scratch = torch.empty(2**18)
        x = blocks(torch.empty(384 * 264, dtype=E4M3), 264, by_columns=False)
        columns = blocks(torch.empty(384 * 264, dtype=E4M3), 264, by_columns=True)
        multiply(x, x, torch.empty(384, 384, dtype=torch.bfloat16), None, scratch)
        some, tokens = columns.rows(slice(128, 256), scratch), columns.tokens(128, 384)
        multiply(some, columns, torch.empty(128, 256), None, scratch)
        multiply(tokens, tokens, torch.empty(256, 256), None, scratch)
    assert called == [(384, 384), (128, 256), (256, 256)]


def test_scales_that_are_copied_for_a_gpu_are_those_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, x = Hand(), random(384, 256)
    part = blocks(hand.quantised(x)[1].view(-1), 264, by_columns=True).tokens(128, 256)
    given = list[Tensor]()
    monkeypatch.setattr(torch, "_scaled_mm_v2", lambda *o, out: given.extend((o[2][0].clone(), o[5][0].clone())))

    class Elsewhere:
        """A result on a GPU."""

        device, dtype = torch.device("cuda"), torch.float32

    multiply(part, part, Elsewhere(), None, hand.scales.wide)  # type: ignore[arg-type]
    assert all(torch.equal(each.view(torch.uint8), part.tiles.reshape(-1)) for each in given)


def test_scratch_has_room_for_a_part_of_the_widest_rows() -> None:
    hand, x = Hand(), random(256, 512)
    hand.scales.wide = hand.scales.wide[: 128 * 256]
    rows, columns = hand.quantised(x)
    assert torch.equal(stood_for(rows), by_hand(x)[0])
    assert torch.equal(stood_for(columns, by_columns=True), by_hand(x.t())[0])
