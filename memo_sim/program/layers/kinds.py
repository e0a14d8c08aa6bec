"""The kinds of layers that a model may be made of, behind one interface.

The rest of the lowering asks ``layer_kind`` which kind a plan has, and calls what the kind declares. It names no kind.
A new kind is one ``LayerKind`` in ``LAYER_KINDS``, or in ``registered`` for the length of a ``with`` block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.builder import TemplateBuilder
from memo_sim.program.layers.layer import LayerWriter
from memo_sim.program.layers.metp import MetpLayer, metp_tensors
from memo_sim.program.layout.parameters import Block
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import Skeletal, skeletal_tensors
from memo_sim.program.operators.operators import RowBlock


class Layer(Protocol):
    """Writes one layer into a template whose slots are the kind's skeletal tensors, ``params`` and ``grads``."""

    defers_wgrad: bool
    """Whether weight gradients are left to the W pass (``weight_gradients.py``)."""

    def forward(self, blocks: list[RowBlock], out: str) -> None:
        """Write the forward, row-wise operators once per row block; slot ``out`` gets the layer's output."""

    def recompute(self, rows: RowBlock, index: int, *, whole: bool) -> None:
        """Write the rebuilding of row block ``index``, or (``whole``) of all that a layer's forward makes."""

    def backward(self, grad_out: str, grad_in: str) -> None:
        """Write the backward from the gradient of the output to the gradient of the input."""


class SkeletalTensors(Protocol):
    """The skeletal tensors of a kind, in the order forward writes them."""

    def __call__(
        self, model: Model, shape: Shape, dtype: str, *, scores: tuple[Skeletal, ...] = ()
    ) -> tuple[Skeletal, ...]:
        """Return them; ``scores``: what attention keeps in place of the log-sum-exp."""


@dataclass(frozen=True)
class LayerKind:
    """One kind of layer."""

    name: str
    applies: Callable[[Decisions], bool]
    """Whether the layers of a plan are of this kind."""
    writer: Callable[[TemplateBuilder, Decisions, Shape, Block], Layer]
    skeletal: SkeletalTensors = skeletal_tensors


LAYER_KINDS = [
    LayerKind("transformer", lambda _: True, LayerWriter),
    LayerKind("metp", lambda decisions: decisions.layout.metp > 1, MetpLayer, metp_tensors),
]
"""The last one that applies is a plan's."""


def layer_kind(decisions: Decisions) -> LayerKind:
    """Return the kind of a plan's layers."""
    return next(kind for kind in reversed(LAYER_KINDS) if kind.applies(decisions))


def skeletal_of(decisions: Decisions, shape: Shape, *, scores: tuple[Skeletal, ...] = ()) -> tuple[Skeletal, ...]:
    """Return the skeletal tensors of one layer of a plan, with the sizes of ``shape``."""
    return layer_kind(decisions).skeletal(decisions.model, shape, decisions.dtype, scores=scores)


@contextmanager
def registered(kind: LayerKind) -> Iterator[None]:
    """Let a kind apply before all others while the context lasts."""
    LAYER_KINDS.append(kind)
    try:
        yield
    finally:
        LAYER_KINDS.remove(kind)
