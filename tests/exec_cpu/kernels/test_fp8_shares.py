"""Shares of weights in FP8 alone, cut anywhere: largest values, copies and scales are those of whole masters."""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from memo_exec.kernels import KERNELS, Call, Context, fp8_shares
from memo_exec.kernels.fp8_blocks import weight_blocks
from memo_exec.kernels.fp8_scales import Fp8Scales
from memo_sim.contract.plan import Layout
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.layout.fp8 import largest_values, weights
from memo_sim.program.layout.parameters import layer_block
from tests.exec_cpu.small import decide, gpt

E4M3 = torch.float8_e4m3fn
PLAN = decide(gpt(hidden=384, head_dim=128, ffn_hidden=256), dtype="bf16", fp8_layouts="tn", fp8_params=True)


class Rank:
    """Calls kernels as one rank of several, with its scratch for 2 x 192 rows of 384 features."""

    def __init__(self, decisions: Any, rank: int = 0) -> None:
        self.context = Context(decisions, torch.device("cpu"), rank=rank)
        self.scales = self.context.fp8 = Fp8Scales(torch.device("cpu"), scratch_bytes=4 * 2 * 192 * 384)

    def call(self, op: str, **tensors: Tensor) -> Call:
        instruction = Instruction("optimizer/params.layer", op, Lane.COMPUTE, Rowwise(op, 1, 0, 0), ())
        return Call(instruction, self.context, tensors)

    def __call__(self, op: str, **tensors: Tensor) -> None:
        with torch.inference_mode():
            KERNELS[op](self.call(op, **tensors))


@pytest.mark.parametrize("ranks", [2, 3, 7, 1000])
@pytest.mark.parametrize("recipe", ["tensor", "block"])
def test_shares_have_the_bits_of_whole_masters(recipe: Any, ranks: int) -> None:
    """With 1000 ranks, of which three play, a share is about two rows; with 7 it ends inside a block of 128 x 128."""
    whole = msgspec.structs.replace(PLAN, fp8=recipe)
    block = layer_block(PLAN.model, 1, PLAN.model.layer(0))
    matrices = weights(whole, block)
    elements, number = sum(each.elements for each in matrices), largest_values(whole, block)
    masters = torch.randn(elements, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.01, 9.0, elements)
    alone, wanted = Rank(whole), torch.empty(elements, dtype=E4M3)
    alone("params.quantize", x=masters, out=wanted)

    divided = msgspec.structs.replace(whole, layout=Layout(dp=ranks, zero=1), global_batch=ranks)
    size = -(-elements // ranks)
    team = [Rank(divided, rank) for rank in range(ranks)] if ranks < 1000 else [Rank(divided, r) for r in (0, 313, 999)]
    reduced = torch.zeros(number)
    shares = [slice(min(r.context.rank * size, elements), min((r.context.rank + 1) * size, elements)) for r in team]
    for rank, share in zip(team, shares, strict=True):
        found = torch.full((number,), torch.nan)
        rank("params.largest", x=masters[share], out=found)
        reduced = torch.maximum(reduced, found)
    if ranks == 1000:
        Rank(whole)("params.largest", x=masters, out=reduced)
    gathered = torch.empty(elements, dtype=E4M3)
    for rank, share in zip(team, shares, strict=True):
        copy = gathered[share]
        rank("params.quantize", x=masters[share], out=copy, largest=reduced)
        assert torch.equal(copy.view(torch.uint8), wanted[share].view(torch.uint8))
    last = team[-1]
    fp8_shares.keep_scales(last.call("params.all_gather", largest=reduced), gathered)
    for each in matrices:
        part = slice(each.first, each.first + each.elements)
        if recipe == "tensor":
            assert torch.equal(last.scales.of(gathered[part]), alone.scales.of(wanted[part]))
        else:
            one, other = (
                weight_blocks(s, c[part], *each.shape) for s, c in ((last.scales, gathered), (alone.scales, wanted))
            )
            columns = each.shape[1] // 128
            assert torch.equal(one.scale[:, :columns], other.scale[:, :columns])
