"""Products of experts in FP8 by hand: rows of each expert, wherever they begin, and empty seats."""

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from memo_exec.kernels import KERNELS, Call, Context, fp8_blocks
from memo_exec.kernels.fp8_experts import weights_of
from memo_sim.contract.experts import Experts
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.instruction import Instruction, Lane, Mode, Operand
from memo_sim.program.ir.work import Fp8GroupedGemm, Rowwise, Work
from tests.exec_cpu.small import decide, llama

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, OUT, IN, COUNT = 384, 256, 128, 4
ENDS = [0, 70, 200, 333]
"""No row of the first expert, ends inside of blocks, and 51 rows of no expert."""
RECIPES = ("tensor", "block")
MODEL = llama(hidden=IN, experts=Experts(count=COUNT, per_token=2, hidden=OUT // 2))


def plan(recipe: str) -> Decisions:
    return decide(MODEL, dtype="bf16", fp8=recipe, fp8_layouts="tn", fp8_experts=True)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Hand:
    """Calls kernels one after the other with the same scales."""

    def __init__(self, recipe: str) -> None:
        self.recipe, self.context = recipe, Context(plan(recipe), torch.device("cpu"))
        self.grads = E5M2 if recipe == "tensor" else E4M3

    def call(self, op: str, work: Work, first: int = 0, **tensors: Tensor) -> Call:
        operands = tuple(Operand(role, 0, first, len(each), Mode.READ) for role, each in tensors.items())
        return Call(Instruction(f"fwd/{op}", op, Lane.COMPUTE, work, operands), self.context, tensors)

    def __call__(self, op: str, work: Work, first: int = 0, **tensors: Tensor) -> None:
        with torch.inference_mode():
            KERNELS[op](self.call(op, work, first, **tensors))

    def quantised(self, x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
        """Return the copies by rows and by columns."""
        width = x.shape[1] if self.recipe == "tensor" else x.shape[1] * 33 // 32
        out, columns = (torch.empty(len(x), width, dtype=dtype) for _ in range(2))
        self.quantise(x, out, columns)
        return out, columns

    def quantise(self, x: Tensor, out: Tensor, columns: Tensor) -> None:
        self("fp8.quantize", Rowwise("fp8.quantize", 1, 0, 0), x=x, out=out, columns=columns)

    def weights(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the copies of the weights of all experts (rows of all, in)."""
        out, columns = (torch.empty(weight.numel(), dtype=E4M3) for _ in range(2))
        scales = self.context.fp8
        assert scales is not None
        if self.recipe == "block":
            fp8_blocks.quantise_weight(scales, weight, out.view(weight.shape), columns)
        else:
            self.quantise(weight, out.view(weight.shape), columns.view(weight.shape))
        return out, columns


def near(found: Tensor, wanted: Tensor, error: float) -> bool:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm()) <= error


def work(n: int, k: int, gemm_pass: Any) -> Fp8GroupedGemm:
    return Fp8GroupedGemm(((ROWS // COUNT, COUNT),), n, k, gemm_pass, "bf16", operands="fp8-block")


def runs(begin: int, end: int) -> list[tuple[int, slice]]:
    """Return the rows of each expert among [begin, end), counted from ``begin``."""
    firsts = [0, *ENDS[:-1]]
    return [
        (expert, slice(max(first, begin) - begin, max(first, begin, min(last, end)) - begin))
        for expert, (first, last) in enumerate(zip(firsts, ENDS, strict=True))
    ]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("begin", [0, 128])
def test_each_row_is_multiplied_with_the_weight_of_its_expert(recipe: str, begin: int) -> None:
    hand, rows = Hand(recipe), ROWS - begin
    ends = torch.tensor(ENDS, dtype=torch.int32)
    x, grad, weight = random(rows, IN), random(rows, OUT, seed=1), random(COUNT * OUT, IN, seed=2)
    (x_rows, x_columns), (g_rows, g_columns) = hand.quantised(x), hand.quantised(grad, hand.grads)
    w_rows, w_columns = hand.weights(weight)
    out, d_x = torch.full((rows, OUT), torch.nan).bfloat16(), torch.full((rows, IN), torch.nan).bfloat16()
    d_w = random(COUNT * OUT * IN, seed=3).float()
    begun = d_w.clone().view(COUNT, OUT, IN)
    hand("experts.linear", work(OUT, IN, "fprop"), begin, x=x_rows, weight=w_rows, ends=ends, out=out)
    hand("experts.linear.dgrad", work(IN, OUT, "dgrad"), begin, grad=g_rows, weight=w_columns, ends=ends, out=d_x)
    hand("experts.linear.wgrad", work(OUT, IN, "wgrad"), begin, grad=g_columns, x=x_columns, ends=ends, out=d_w)
    wide, x, grad = weight.float().view(COUNT, OUT, IN), x.float(), grad.float()
    wanted = torch.zeros(COUNT, OUT, IN)
    for expert, mine in runs(begin, ROWS):
        if mine.start == mine.stop:
            continue
        assert near(out[mine], x[mine] @ wide[expert].t(), 0.05)
        assert near(d_x[mine], grad[mine] @ wide[expert], 0.1)
        wanted[expert] = grad[mine].t() @ x[mine]
    assert near(d_w.view(COUNT, OUT, IN) - begun, wanted, 0.1)
    assert not any(bool(each[ENDS[-1] - begin :].any()) for each in (out, d_x))


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_of_two_parts_have_scales_of_their_own(recipe: str) -> None:
    """Row blocks are quantised one after the other; 64 times larger values in one must not round the other's away."""
    hand, ends = Hand(recipe), torch.tensor(ENDS, dtype=torch.int32)
    x, grad = random(ROWS, IN), random(ROWS, OUT, seed=1)
    x[128:] *= 2.0**12
    whole = [torch.empty_like(each) for each in hand.quantised(x)]
    for part in (slice(0, 128), slice(128, ROWS)):
        hand.quantise(x[part], whole[0][part], whole[1][part])
    w_rows, _ = hand.weights(weight := random(COUNT * OUT, IN, seed=2))
    out, d_w = torch.empty(ROWS, OUT).bfloat16(), torch.zeros(COUNT * OUT * IN)
    hand("experts.linear", work(OUT, IN, "fprop"), x=whole[0], weight=w_rows, ends=ends, out=out)
    columns = hand.quantised(grad, hand.grads)[1]
    hand("experts.linear.wgrad", work(OUT, IN, "wgrad"), grad=columns, x=whole[1], ends=ends, out=d_w)
    wide = weight.float().view(COUNT, OUT, IN)
    for expert, mine in runs(0, ROWS)[1:]:
        assert near(out[mine], x[mine].float() @ wide[expert].t(), 0.05)
        assert near(d_w.view(COUNT, OUT, IN)[expert], grad[mine].float().t() @ x[mine].float(), 0.1)
    assert near(out[:70], x[:70].float() @ wide[1].t(), 0.05)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("begin", [0, 128])
def test_one_kernel_for_all_experts_gives_what_a_product_for_each_gives(recipe: str, begin: int) -> None:
    from memo_exec.kernels import fp8, triton_fp8_experts

    hand, rows = Hand(recipe), ROWS - begin
    ends = torch.tensor(ENDS, dtype=torch.int32)
    x_rows, x_columns = hand.quantised(random(rows, IN))
    g_rows, g_columns = hand.quantised(random(rows, OUT, seed=1), hand.grads)
    w_rows, w_columns = hand.weights(random(COUNT * OUT, IN, seed=2))
    calls = [
        ("experts.linear", work(OUT, IN, "fprop"), {"x": x_rows, "weight": w_rows}, OUT),
        ("experts.linear.dgrad", work(IN, OUT, "dgrad"), {"grad": g_rows, "weight": w_columns}, IN),
    ]
    for op, of, operands, features in calls:
        wanted, found = (torch.full((rows, features), torch.nan).bfloat16() for _ in range(2))
        hand(op, of, begin, **operands, ends=ends, out=wanted)
        call = hand.call(op, of, begin, **operands, ends=ends, out=found)
        ((_, _, part),) = fp8.parts_of(call, next(iter(operands)))
        weights = weights_of(call, by_columns=op.endswith("dgrad"))
        triton_fp8_experts.multiply_rows(part, weights, ends, begin, found)
        assert near(found, wanted, 2.0**-7)  # Triton's interpreter cuts bits off where it makes bf16
        assert not found[ENDS[-1] - begin :].any()
    wanted, found = (random(COUNT * OUT * IN, seed=3).float() for _ in range(2))
    operands = {"grad": g_columns, "x": x_columns, "ends": ends}
    hand("experts.linear.wgrad", work(OUT, IN, "wgrad"), begin, **operands, out=wanted)
    call = hand.call("experts.linear.wgrad", work(OUT, IN, "wgrad"), begin, **operands, out=found)
    ((grad, x),) = fp8.terms_of(call)
    triton_fp8_experts.add_gradients(grad, x, ends, begin, found.view(COUNT, OUT, IN))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
