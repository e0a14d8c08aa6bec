"""A layer's weights that METP's ranks pass to each other: what travels, in which buffers, and what it is called there.

A product's parts lie in a rank's block as two runs, matrices and (in the GPT family) the bias of the first product; in
an exchange buffer one follows the other. Sums of gradients travel in the same order, in fp32.

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
    """``elements`` from ``first`` of the block, which lie from ``held`` on in an exchange buffer."""

    name: str
    first: int
    held: int
    elements: int

    def own(self, slot: str) -> Rows:
        """Return it in the rank's own block."""
        return Rows(slot, self.first, self.elements)

    def travelling(self, slot: str) -> Rows:
        """Return it in an exchange buffer."""
        return Rows(slot, self.held, self.elements)


@dataclass(frozen=True, slots=True)
class Bundle:
    """The parameters of two consecutive products that travel together."""

    block: Block
    kind: str
    """``ffn`` or ``attn``: begins the names of its buffers and instructions."""
    matrices: tuple[str, str]
    bias: str

    @property
    def elements(self) -> int:
        """Elements of an exchange buffer."""
        return sum(run.elements for run in self.runs())

    def runs(self) -> Iterator[Run]:
        """Yield its runs: the matrices, and the bias where the model has one."""
        first, second = (self.block.find(name) for name in self.matrices)
        assert first is not None  # every layer has these products
        assert second is not None
        matrices = first.elements + second.elements
        yield Run("weights", first.first, 0, matrices)
        if bias := self.block.find(self.bias):
            yield Run("bias", bias.first, matrices, bias.elements)

    def buffer(self, step: int, *, sums: bool = False) -> str:
        """Return the exchange buffer of a step's weights, or of its sums of gradients."""
        return f"{'d_' if sums else ''}{self.kind}.weights{step % DOUBLE_BUFFER_SLOTS}"

    def held(self, name: str) -> tuple[int, int] | None:
        """Return where a parameter lies in an exchange buffer and how long it is; None for one that does not travel."""
        found = self.block.find(name)
        for run in self.runs():
            if found and run.first <= found.first < run.first + run.elements:
                return run.held + found.first - run.first, found.elements
        return None


def ffn_bundle(block: Block) -> Bundle:
    """Return what the MLP's ranks pass round."""
    return Bundle(block, "ffn", ("ffn_up.weight", "ffn_down.weight"), "ffn_up.bias")


def attention_bundle(block: Block) -> Bundle:
    """Return what a group of heads needs of the rank that has its weights."""
    return Bundle(block, "attn", ("qkv.weight", "proj.weight"), "qkv.bias")
