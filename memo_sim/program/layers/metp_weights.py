"""The weights of a layer that METP's ranks send to each other, and their place in exchange buffers.

The parameters of two consecutive products are sent together. In a rank's parameter block they are two runs: the
matrices and, in the GPT family, the bias of the first product. In an exchange buffer the bias follows the matrices.
Sums of gradients are sent in the same order, in fp32.

    block    | qkv | proj | ffn_up | ffn_down | ... | qkv.bias | ffn_up.bias | ...
    ffn      | ffn_up | ffn_down | ffn_up.bias |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memo_sim.program.attention.ring import DOUBLE_BUFFER_SLOTS
from memo_sim.program.ir.builder import Rows
from memo_sim.program.layout.parameters import Block


@dataclass(frozen=True, slots=True)
class Run:
    """``elements`` elements, which begin at ``first`` in the block and at ``held`` in an exchange buffer."""

    name: str
    first: int
    held: int
    elements: int

    def own(self, slot: str) -> Rows:
        """Return the run in the rank's own block."""
        return Rows(slot, self.first, self.elements)

    def exchanged(self, slot: str) -> Rows:
        """Return the run in an exchange buffer."""
        return Rows(slot, self.held, self.elements)


@dataclass(frozen=True, slots=True)
class Bundle:
    """The parameters of two consecutive products, which are sent together."""

    block: Block
    kind: str
    """``ffn`` or ``attn``: the first word of the names of its buffers and instructions."""
    matrices: tuple[str, str]
    bias: str

    @property
    def elements(self) -> int:
        """Number of elements of an exchange buffer."""
        return sum(run.elements for run in self.runs())

    def runs(self) -> Iterator[Run]:
        """Yield the runs: the matrices, and the bias if the model has one."""
        first, second = (self.block.find(name) for name in self.matrices)
        assert first is not None  # every layer has these products
        assert second is not None
        matrices = first.elements + second.elements
        yield Run("weights", first.first, 0, matrices)
        if bias := self.block.find(self.bias):
            yield Run("bias", bias.first, matrices, bias.elements)

    def buffer(self, step: int, *, sums: bool = False) -> str:
        """Return the exchange buffer of a step's weights, or of its gradient sums; steps alternate between two."""
        return f"{'d_' if sums else ''}{self.kind}.weights{step % DOUBLE_BUFFER_SLOTS}"

    def held(self, name: str) -> tuple[int, int] | None:
        """Return a parameter's first element and length in an exchange buffer; None if it is not sent."""
        found = self.block.find(name)
        for run in self.runs():
            if found and run.first <= found.first < run.first + run.elements:
                return run.held + found.first - run.first, found.elements
        return None


def ffn_bundle(block: Block) -> Bundle:
    """Return the MLP's weights, which ranks pass round a ring."""
    return Bundle(block, "ffn", ("ffn_up.weight", "ffn_down.weight"), "ffn_up.bias")


def attention_bundle(block: Block) -> Bundle:
    """Return the attention weights of one group of heads, which their rank broadcasts."""
    return Bundle(block, "attn", ("qkv.weight", "proj.weight"), "qkv.bias")
