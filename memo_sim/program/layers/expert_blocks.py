"""Experts of a layer in row blocks, of row-wise recompute (``rowwise.py``).

A router decides for each token by itself, so a row block is routed, dispatched, multiplied and combined by itself, and
has the bits that it has among all rows. Experts get fewer rows at a time, so their products are smaller:

    forward    norm2 router route sort places dispatch up act down combine .b0 | .b1
    backward   norm2 router route sort places dispatch up act .b0 again, then experts' backward of that block | .b1

Weight gradients, and the rows that each expert got (for a selection bias), are sums over blocks.

Where ranks divide the experts (``expert_exchange.py``), each block has seats and exchanges of its own:

    forward    ... seats [ends, gates] dispatch [rows] arrange up act down arrange [rows back] combine .b0 | .b1
    backward   norm2 ... up act .b0 again, with the exchanges before them, then those of backward | .b1

So a rank can send to each rank as many rows of a block as the capacity says, and rows beyond it have no seat.
Recompute seats a block as forward did, because the router decides from the same bits.

For a loss of balance forward sums the rows that experts get over blocks (``expert_ends.py``).
"""

from __future__ import annotations

from memo_sim.contract.experts import Experts
from memo_sim.program.ir.builder import Rows
from memo_sim.program.ir.kinds import TemplateKind
from memo_sim.program.layers import expert_ends
from memo_sim.program.layers.expert_exchange import ExchangedExperts
from memo_sim.program.layers.experts import ExpertMlp
from memo_sim.program.operators.operators import OperatorWriter, RowBlock


class ExpertBlocks:
    """Writes the experts of each row block into a layer's templates, with the calls of ``Mlp``."""

    def __init__(self, layer: OperatorWriter, experts: Experts, blocks: list[RowBlock]) -> None:
        self._layer = layer
        kind = ExchangedExperts if layer.shape.ep > 1 else ExpertMlp
        suffixes = [f".b{number}" if len(blocks) > 1 else "" for number in range(len(blocks))]
        self._of = {
            rows: kind(_writer(layer, rows[1], suffix), experts, first=rows[0])
            for rows, suffix in zip(blocks, suffixes, strict=True)
        }
        """The experts of each row block, in buffers that the blocks share; the first block is the largest."""
        self._last = blocks[-1]
        self._summed = expert_ends.balanced(layer.shape) and layer.builder.kind is TemplateKind.FORWARD
        """Whether the template sums the rows that experts get, so that each block's lie behind those of the others."""
        for number, mlp in enumerate(self._of.values()):
            mlp.ends_first = number * experts.count if self._summed else 0

    def first_product(self, rows: RowBlock) -> None:
        """Write the norm of a row block, its routing, and the first product of its dispatched rows."""
        at = (0, rows[1])
        self._of[rows].first_product(at)
        self._of[rows].inner([at], routed=False)
        if self._summed and rows == self._last:
            expert_ends.keep(self._layer.builder, self._layer.decisions, self._layer.shape)

    def second_product(self, rows: RowBlock, out: str) -> None:
        """Write the second product of a row block, the sum over each token's experts, and the layer's output."""
        self._of[rows].forward(out)

    def block_backward(self, rows: RowBlock, grad_out: str, source: Rows | None) -> None:
        """Write the backward of a row block from ``grad_out`` to ``d_resid``; the norm's output is gathered again."""
        del source
        shape = self._layer.shape
        self._layer.own("d_resid", shape.shard_tokens, shape.hidden)
        self._of[rows].backward(grad_out)


def _writer(layer: OperatorWriter, tokens: int, suffix: str) -> OperatorWriter:
    """Return a writer of the same template with the sizes of a row block; ``suffix`` ends names of instructions."""
    writer = OperatorWriter(layer.builder, layer.decisions, layer.shape.of_rows(tokens), layer.block)
    writer.suffix = suffix
    return writer
