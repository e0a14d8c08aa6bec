"""Where each parameter lies in its block: ``embed``, one block a layer, ``head``; matrices (decayed) before vectors.

Blocks are flat: element ranges, features 1, so that an optimizer sees two runs (decay, no decay) and a checkpoint
sees names. Names inside a layer are ours; ``memo_exec`` maps them to Hugging Face's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from memo_sim.contract.model import Model


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a block: shape on one rank, first element in the block, whether weight decay applies."""

    name: str
    shape: tuple[int, ...]
    first: int
    decay: bool

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Block:
    """The parameters that are stored together."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def elements(self) -> int:
        """Number of elements of the block."""
        return sum(p.elements for p in self.parameters)

    @property
    def decayed_elements(self) -> int:
        """Number of leading elements under weight decay."""
        return sum(p.elements for p in self.parameters if p.decay)

    def find(self, name: str) -> Parameter | None:
        """Return the parameter called ``name``, or None where the model has none (a bias, say)."""
        return next((p for p in self.parameters if p.name == name), None)


def _block(name: str, shapes: list[tuple[str, tuple[int, ...], bool]]) -> Block:
    first = 0
    parameters = []
    for wanted in (True, False):
        for label, shape, decay in shapes:
            if decay is wanted:
                parameters.append(Parameter(label, shape, first, decay))
                first += prod(shape)
    return Block(name, tuple(parameters))


def embed_block(model: Model, tp: int) -> Block:
    """Return the embedding block: the vocabulary's rows of this rank, and learned positions."""
    shapes: list[tuple[str, tuple[int, ...], bool]] = [("tokens.weight", (-(-model.vocab // tp), model.hidden), True)]
    if model.learned_positions:
        shapes.append(("positions.weight", (model.max_positions, model.hidden), True))
    return _block("embed", shapes)


def layer_block(model: Model, tp: int) -> Block:
    """Return one transformer layer's block; matrices are (out, in), Q, K, V packed in that order."""
    h, f = model.hidden, model.ffn_hidden // tp
    q, kv = model.q_width // tp, model.kv_width // tp
    shapes: list[tuple[str, tuple[int, ...], bool]] = [("qkv.weight", (q + 2 * kv, h), True)]
    shapes.append(("proj.weight", (h, q), True))
    up = (2 * f if model.gated else f, h)
    shapes += [("ffn_up.weight", up, True), ("ffn_down.weight", (h, f), True)]
    shapes += [("norm1.weight", (h,), False), ("norm2.weight", (h,), False)]
    if model.family == "gpt":
        shapes += [("norm1.bias", (h,), False), ("norm2.bias", (h,), False)]
    if model.qkv_bias:
        shapes.append(("qkv.bias", (q + 2 * kv,), False))
    if model.linear_bias:
        shapes += [("proj.bias", (h,), False), ("ffn_up.bias", up[:1], False), ("ffn_down.bias", (h,), False)]
    if model.qk_norm:
        shapes += [("q_norm.weight", (model.head_dim,), False), ("k_norm.weight", (model.head_dim,), False)]
    return _block("layer", shapes)


def head_block(model: Model, tp: int) -> Block:
    """Return the final norm and, unless it is tied to the embedding, the classifier."""
    shapes: list[tuple[str, tuple[int, ...], bool]] = []
    if not model.tied_embeddings:
        shapes.append(("classifier.weight", (-(-model.vocab // tp), model.hidden), True))
    shapes.append(("norm.weight", (model.hidden,), False))
    if model.family == "gpt":
        shapes.append(("norm.bias", (model.hidden,), False))
    return _block("head", shapes)
