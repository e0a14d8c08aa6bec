"""Operators on METP's weights: this rank's own, or those of another rank in an exchange buffer.

A product whose weights are divided over the ranks is a sum of one product for each rank's part: the first one is
written, the others are added to it.
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.builder import Access, Rows, TemplateBuilder, accumulates, reads
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Gemm
from memo_sim.program.layers.metp_weights import Bundle
from memo_sim.program.layout.parameters import Block
from memo_sim.program.layout.shape import Shape
from memo_sim.program.operators.operators import OperatorWriter


class MetpWriter(OperatorWriter):
    """Emits operators on the weights of a step; ``source`` says where these are."""

    def __init__(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape, block: Block) -> None:
        super().__init__(builder, decisions, shape, block)
        self.source: tuple[Bundle, int, int] | None = None
        """The weights that operators use: a bundle, the step of its weights, and the step of its gradient sums.

        None for this rank's own weights.
        """

    def param(self, name: str) -> Access | None:
        """Return a parameter as an operand that is read: this rank's own, or the received one of a step."""
        if self.source and (found := self.source[0].held(name)):
            return reads(Rows(self.source[0].buffer(self.source[1]), *found))
        return super().param(name)

    def grad(self, name: str) -> Access | None:
        """Return a gradient as an operand that is added to: this rank's own, or the sum of a step."""
        if self.source and (found := self.source[0].held(name)):
            return accumulates(Rows(self.source[0].buffer(self.source[2], sums=True), *found))
        return super().grad(name)

    def sum_linear(self, name: str, x: Rows, out: Rows, n: int, k: int, step: int) -> None:  # noqa: PLR0917
        """Emit a product: the first one of a sum is written, the others are added."""
        if not step:
            self.linear(name, x, out, n, k, bias=False)
            return
        work, weight = Gemm(out.tokens, n, k, "fprop", self.decisions.dtype), self.param(f"{name}.weight")
        operands = {"x": reads(x), "weight": weight, "out": accumulates(out)}
        self.builder.emit(name + self.suffix, "linear.add", Lane.COMPUTE, work, **operands)

    def sum_dgrad(self, name: str, grad: Rows, out: Rows, n: int, k: int, step: int) -> None:  # noqa: PLR0917
        """Emit an input's gradient: the first one of a sum is written, the others are added."""
        if not step:
            self.dgrad(name, grad, out, n, k)
            return
        work, weight = Gemm(out.tokens, n, k, "dgrad", self.decisions.dtype), self.param(f"{name}.weight")
        operands = {"grad": reads(grad), "weight": weight, "out": accumulates(out)}
        self.builder.emit(f"{name}.dgrad{self.suffix}", "linear.dgrad.add", Lane.COMPUTE, work, **operands)
