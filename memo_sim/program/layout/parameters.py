"""Where each parameter lies in its block: ``embed``, one block a layer, ``head``; matrices (decayed) before vectors.

Blocks are flat: element ranges, features 1, so that an optimizer sees two runs (decay, no decay) and a checkpoint
sees names. Names inside a layer are ours; ``memo_exec`` maps them to Hugging Face's. Vectors whose gradient a
tensor-parallel rank computes in part come last, so that one all-reduce completes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import prod

from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions


class Part(IntEnum):
    """What part of a parameter's gradient a tensor-parallel rank computes."""

    WHOLE = 0
    """All of its own: a divided parameter, or one whose gradient every rank computes in full."""
    TOKENS = 1
    """Of its token shard, with sequence parallelism; without it in full."""
    HEADS = 2
    """Of its heads."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a block: shape on one rank, first element in the block, whether weight decay applies."""

    name: str
    shape: tuple[int, ...]
    first: int
    decay: bool
    part: Part = Part.WHOLE

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

    def partial_elements(self, *, sequence_parallel: bool) -> int:
        """Return how many trailing elements have gradients that tensor-parallel ranks must sum."""
        least = Part.TOKENS if sequence_parallel else Part.HEADS
        return sum(p.elements for p in self.parameters if p.part >= least)

    def find(self, name: str) -> Parameter | None:
        """Return the parameter called ``name``, or None where the model has none (a bias, say)."""
        return next((p for p in self.parameters if p.name == name), None)


Matrices = list[tuple[str, tuple[int, ...]]]
Vectors = list[tuple[str, int, Part]]


def _block(name: str, matrices: Matrices, vectors: Vectors) -> Block:
    first = 0
    parameters = []
    for label, shape in matrices:
        parameters.append(Parameter(label, shape, first, decay=True))
        first += prod(shape)
    for label, width, part in sorted(vectors, key=lambda vector: vector[2]):
        parameters.append(Parameter(label, (width,), first, decay=False, part=part))
        first += width
    return Block(name, tuple(parameters))


def embed_block(model: Model, tp: int, *, positions: bool = True) -> Block:
    """Return the embedding block: the vocabulary's rows of this rank, and learned positions.

    The head's stage, where it is tied to an embedding on another, has no use for ``positions``.
    """
    matrices: Matrices = [("tokens.weight", (-(-model.vocab // tp), model.hidden))]
    if model.learned_positions and positions:
        matrices.append(("positions.weight", (model.max_positions, model.hidden)))
    return _block("embed", matrices, [])


def layer_block(model: Model, tp: int) -> Block:
    """Return one transformer layer's block; matrices are (out, in), Q, K, V packed in that order."""
    h, f = model.hidden, model.ffn_hidden // tp
    q, kv = model.q_width // tp, model.kv_width // tp
    up = 2 * f if model.gated else f
    matrices: Matrices = [
        ("qkv.weight", (q + 2 * kv, h)),
        ("proj.weight", (h, q)),
        ("ffn_up.weight", (up, h)),
        ("ffn_down.weight", (h, f)),
    ]
    vectors: Vectors = [("norm1.weight", h, Part.TOKENS), ("norm2.weight", h, Part.TOKENS)]
    if model.family == "gpt":
        vectors += [("norm1.bias", h, Part.TOKENS), ("norm2.bias", h, Part.TOKENS)]
    if model.qkv_bias:
        vectors.append(("qkv.bias", q + 2 * kv, Part.WHOLE))
    if model.linear_bias:
        vectors += [("proj.bias", h, Part.TOKENS), ("ffn_up.bias", up, Part.WHOLE)]
        vectors.append(("ffn_down.bias", h, Part.TOKENS))
    if model.qk_norm:
        vectors += [("q_norm.weight", model.head_dim, Part.HEADS), ("k_norm.weight", model.head_dim, Part.HEADS)]
    return _block("layer", matrices, vectors)


def head_block(model: Model, tp: int) -> Block:
    """Return the final norm and, unless it is tied to the embedding, the classifier."""
    matrices: Matrices = []
    if not model.tied_embeddings:
        matrices.append(("classifier.weight", (-(-model.vocab // tp), model.hidden)))
    vectors: Vectors = [("norm.weight", model.hidden, Part.TOKENS)]
    if model.family == "gpt":
        vectors.append(("norm.bias", model.hidden, Part.TOKENS))
    return _block("head", matrices, vectors)


def half_gradients(decisions: Decisions) -> bool:
    """Return whether gradients are summed in fp16, micro-batch by micro-batch and over ranks, instead of fp32.

    Megatron-LM forces fp32 for bf16 alone; with fp16 its ``--accumulate-allreduce-grads-in-fp32`` is off unless asked
    for (``megatron/training/arguments.py``), and a product's result is added to the sum by a kernel of its own.
    """
    return decisions.dtype == "fp16" and decisions.memory_policy == "eager"
