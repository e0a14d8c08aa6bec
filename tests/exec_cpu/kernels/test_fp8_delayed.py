"""Delayed scaling by hand: scales of the steps before, the history of largest values, and values that are clipped."""

import pytest
import torch
from torch import Tensor

from memo_exec.kernels import KERNELS, Call, Context, StepScalars
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.layout.fp8 import HISTORY, scaled_operands, scaled_row, weights
from memo_sim.program.layout.parameters import layer_block
from tests.exec_cpu.small import decide, gpt

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LAYERS = 3
PLAN = decide(gpt(layers=LAYERS), dtype="bf16", fp8="delayed", fp8_layouts="tn")
INPUT, GRADIENT = scaled_row(PLAN, "qkv", "input"), scaled_row(PLAN, "qkv", "gradient")


class Hand:
    """Calls kernels with the states of delayed scaling."""

    def __init__(self) -> None:
        rows = len(scaled_operands(PLAN))
        self.context = Context(PLAN, torch.device("cpu"))
        self.amaxes, self.scales = torch.zeros(rows, LAYERS), torch.ones(rows, LAYERS)
        self.history = torch.zeros(rows, LAYERS * HISTORY)

    def __call__(self, op: str, layer: int = 0, **tensors: Tensor) -> None:
        instruction = Instruction(f"fwd/{op}", op, Lane.COMPUTE, Rowwise(op, 1, 0, 0), ())
        with torch.inference_mode():
            KERNELS[op](Call(instruction, self.context, tensors, layer=layer))

    def quantised(self, x: Tensor, row: int, layer: int, dtype: torch.dtype = E4M3) -> Tensor:
        """Return the values that the copy of ``x`` stands for."""
        out = torch.empty(x.shape, dtype=dtype)
        states = {"scale": self.scales[row : row + 1], "amax": self.amaxes[row : row + 1]}
        self("fp8.quantize", layer, x=x, out=out, **states)
        assert self.context.fp8 is not None
        return out.float() * self.context.fp8.of(out)

    def end(self, step: int) -> None:
        """End a step."""
        self.context.scalars = StepScalars(step=step)
        self("fp8.history", amax=self.amaxes, scale=self.scales, history=self.history)


def test_a_scale_follows_from_the_steps_before_and_what_exceeds_it_is_clipped() -> None:
    hand, x = Hand(), torch.full((16, 64), 600.0).bfloat16()
    assert float(hand.quantised(x, INPUT, 1).max()) == 448.0  # the first scale is 1
    assert float(hand.quantised(x / 2, INPUT, 1).max()) == 288.0  # of another micro-batch: 300 lies nearest to 288
    assert float(hand.amaxes[INPUT, 1]) == 600.0
    hand.end(1)
    assert float(hand.scales[INPUT, 1]) == pytest.approx(600 / 448)
    assert float(hand.quantised(x, INPUT, 1).max()) == pytest.approx(600.0)
    assert float(hand.scales[INPUT, 0]) == float(hand.scales[INPUT, 2]) == 1.0  # layers that saw nothing
    assert not hand.amaxes[:INPUT].any()


def test_gradients_have_the_range_of_e5m2() -> None:
    hand, x = Hand(), torch.full((16, 64), 7.0).bfloat16()
    hand.quantised(x, GRADIENT, 2, E5M2)
    hand.end(1)
    assert float(hand.scales[GRADIENT, 2]) == pytest.approx(7 / 57344)


def test_the_largest_value_of_1024_steps_counts() -> None:
    hand = Hand()
    for step in range(1, HISTORY + 2):
        hand.amaxes.fill_(8.0 if step == 1 else 2.0)
        hand.end(step)
        assert not hand.amaxes.any()
        assert float(hand.scales[INPUT, 0]) == pytest.approx((8.0 if step <= HISTORY else 2.0) / 448)


def test_a_largest_value_that_is_zero_or_no_number_leaves_the_scale() -> None:
    hand = Hand()
    hand.scales.fill_(0.25)
    hand.amaxes[INPUT, 1], hand.amaxes[INPUT, 2] = torch.nan, torch.inf
    hand.end(1)
    assert hand.scales[INPUT].tolist() == [0.25] * LAYERS


def test_every_matrix_of_a_layer_has_a_history_of_its_own() -> None:
    hand, block = Hand(), layer_block(PLAN.model, 1, PLAN.model.layer(0))
    matrices = weights(PLAN, block)
    elements = sum(each.elements for each in matrices)
    x = torch.cat([torch.full((each.elements,), float(i + 1)) for i, each in enumerate(matrices)]).bfloat16()
    states = dict[str, Tensor]()
    for each in matrices:
        product = each.name.removesuffix(".weight")
        row = scaled_row(PLAN, product, "weight")
        states |= {f"scale.{product}": hand.scales[row : row + 1], f"amax.{product}": hand.amaxes[row : row + 1]}
    out, columns = torch.empty(elements, dtype=E4M3), torch.empty(elements, dtype=E4M3)
    hand("params.quantize", 1, x=x, out=out, columns=columns, **states)
    found = [float(hand.amaxes[scaled_row(PLAN, each.name.removesuffix(".weight"), "weight"), 1]) for each in matrices]
    assert found == [1.0, 2.0, 3.0, 4.0]
    assert float(hand.amaxes.sum()) == 10.0
