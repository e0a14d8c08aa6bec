"""A layer kind that only tests have: attention and its residual, without an MLP."""

from __future__ import annotations

from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.program.attention.ulysses import Ulysses
from memo_sim.program.ir.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.layers.attention_half import WholeAttention
from memo_sim.program.layers.kinds import LayerKind
from memo_sim.program.layout.parameters import Block
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import Skeletal, skeletal_tensors
from memo_sim.program.operators.operators import OperatorWriter, RowBlock

NAME = "attention-only"
"""Models of this name have such layers."""
OF_THE_MLP = ("norm2", "norm2_stats", "up", "act")


class AttentionOnly(OperatorWriter):
    """Writes one layer; its MLP parameters exist, are never read, and have no gradient."""

    def __init__(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape, block: Block) -> None:
        super().__init__(builder, decisions, shape, block)
        self.attention = WholeAttention(self, Ulysses(builder, shape, decisions.dtype))

    def forward(self, blocks: list[RowBlock], out: str) -> None:
        self.attention.forward(blocks)
        for i, rows in enumerate(blocks):
            self.suffix = f".r{i}" if len(blocks) > 1 else ""
            self.attention.project(rows)
            self._copy("pass_on", self.shard_rows("resid", rows), self.shard_rows(out, rows))
        self.suffix = ""

    def recompute(self, rows: RowBlock, index: int, *, whole: bool) -> None:
        self.suffix = "" if whole else f".r{index}"
        self.attention.recompute(rows, whole=whole)
        self.attention.project(rows)
        self.suffix = ""

    def backward(self, grad_out: str, grad_in: str) -> None:
        d_resid = self.own("d_resid", self.shape.shard_tokens, self.shape.hidden)
        self._copy("take_gradient", self.builder.all(grad_out), self.builder.all(d_resid))
        self.attention.backward(grad_in)

    def _copy(self, name: str, source: Rows, target: Rows) -> None:
        hidden = self.shape.hidden
        self.memory_bound(name, "copy", source.tokens, hidden, hidden, source=reads(source), target=writes(target))


def tensors(model: Model, shape: Shape, dtype: str, *, scores: tuple[Skeletal, ...] = ()) -> tuple[Skeletal, ...]:
    return tuple(t for t in skeletal_tensors(model, shape, dtype, scores=scores) if t.name not in OF_THE_MLP)


ATTENTION_ONLY = LayerKind(NAME, lambda decisions, _: decisions.model.name == NAME, AttentionOnly, tensors)
