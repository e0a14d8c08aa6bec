"""The MLP that every token goes to beside its experts (DeepSeek-V3), in the templates of ``experts.py``.

    norm2 -> shared_up -> shared_act -> shared_down, added to the sum of the experts

Its tensors are rows of tokens: with alpha of the tokens swapped, the first rows of ``shared_up`` and ``shared_act`` are
swapped and the others are recomputed. Tensor parallelism divides its features, as those of every expert.
"""

from __future__ import annotations

from memo_sim.program.ir.builder import Rows, accumulates, reads, writes
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Gemm
from memo_sim.program.operators.operators import OperatorWriter, RowBlock


class SharedExpert:
    """Writes the shared expert of a layer; writes nothing where the layer has none."""

    def __init__(self, writer: OperatorWriter) -> None:
        self.writer, self.builder = writer, writer.builder
        self.width, self.hidden = writer.shape.shared_width, writer.shape.hidden
        self.tokens = writer.shape.tokens

    def first_half(self, source: Rows, rows: RowBlock) -> None:
        """Write first product and activation of a range of rows; ``source``: the norm of all tokens."""
        if not self.width:
            return
        x = Rows(source.slot, source.first + rows[0], rows[1])
        self.writer.linear("shared_up", x, Rows("shared_up", *rows), 2 * self.width, self.hidden)
        self.writer.memory_bound(
            "shared_act",
            "swiglu",
            rows[1],
            2 * self.width,
            self.width,
            features=self.width,
            x=reads(Rows("shared_up", *rows)),
            out=writes(Rows("shared_act", *rows)),
        )

    def second_half(self, into: Rows) -> None:
        """Write the second product of all tokens, added to the experts' sum ``into``."""
        if not self.width:
            return
        self.builder.emit(
            f"shared_down{self.writer.suffix}",
            "linear.add",
            Lane.COMPUTE,
            Gemm(self.tokens, self.hidden, self.width, "fprop", self.writer.dtype),
            x=reads(self._all("shared_act")),
            weight=self.writer.param("shared_down.weight"),
            out=accumulates(into),
        )

    def backward(self, upstream: Rows) -> None:
        """Write the backward from the gradient of the output of all tokens to that of the first product."""
        if not self.width:
            return
        writer, width = self.writer, self.width
        d_act = Rows(writer.own("d_shared_act", self.tokens, width), 0, self.tokens)
        writer.dgrad("shared_down", upstream, d_act, width, self.hidden)
        writer.wgrad("shared_down", upstream, self._all("shared_act"), self.hidden, width)
        d_up = Rows(writer.own("d_shared_up", self.tokens, 2 * width), 0, self.tokens)
        writer.memory_bound(
            "shared_act.bwd",
            "swiglu.bwd",
            self.tokens,
            3 * width,
            2 * width,
            features=width,
            grad=reads(d_act),
            x=reads(self._all("shared_up")),
            grad_x=writes(d_up),
        )

    def input_gradient(self, source: Rows, d_norm: Rows) -> None:
        """Write the first product's weight gradient, and that of its input, added to ``d_norm``."""
        if not self.width:
            return
        d_up = self._all("d_shared_up")
        self.writer.wgrad("shared_up", d_up, source, 2 * self.width, self.hidden)
        self.builder.emit(
            f"shared_up.dgrad{self.writer.suffix}",
            "linear.dgrad.add",
            Lane.COMPUTE,
            Gemm(self.tokens, self.hidden, 2 * self.width, "dgrad", self.writer.dtype),
            grad=reads(d_up),
            weight=self.writer.param("shared_up.weight"),
            out=accumulates(d_norm),
        )

    def _all(self, slot: str) -> Rows:
        return Rows(slot, 0, self.tokens)
