"""The kinds of layers that a plan can have, behind one interface.

The rest of the lowering asks ``layer_kind`` how a plan writes layers of a shape and calls those functions; it never
names a kind. To add a kind, add a ``LayerKind`` to ``LAYER_KINDS``. ``registered`` adds one for the length of a
``with`` block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.builder import TemplateBuilder
from memo_sim.program.layers import huggingface
from memo_sim.program.layers.layer import LayerWriter
from memo_sim.program.layers.metp import MetpLayer, metp_tensors
from memo_sim.program.layers.rowwise import RowwiseLayer, rowwise_tensors
from memo_sim.program.layout import fp8
from memo_sim.program.layout.parameters import Block
from memo_sim.program.layout.rowwise_blocks import is_rowwise
from memo_sim.program.layout.rules.modules import saves_of_modules
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import Skeletal, skeletal_tensors
from memo_sim.program.operators.operators import RowBlock


class Layer(Protocol):
    """Writes one layer into a template whose slots are the kind's skeletal tensors, ``params`` and ``grads``."""

    defers_wgrad: bool
    """Whether backward leaves weight gradients to the W pass (``weight_gradients.py``)."""

    def forward(self, blocks: list[RowBlock], out: str) -> None:
        """Write the forward into slot ``out``; row-wise operators run once for each row block."""

    def recompute(self, rows: RowBlock, index: int, *, whole: bool) -> None:
        """Write the recompute of row block ``index``, or with ``whole`` of the layer's whole forward."""

    def backward(self, grad_out: str, grad_in: str) -> None:
        """Write the backward from the gradient of the output to the gradient of the input."""


class SkeletalTensors(Protocol):
    """The skeletal tensors of a kind, in the order forward writes them."""

    def __call__(
        self, model: Model, shape: Shape, dtype: str, *, scores: tuple[Skeletal, ...] = ()
    ) -> tuple[Skeletal, ...]:
        """Return the tensors; ``scores``: what attention keeps instead of the log-sum-exp."""


@dataclass(frozen=True)
class LayerKind:
    """One kind of layer."""

    name: str
    applies: Callable[[Decisions, LayerShape], bool]
    """Whether a plan's layers of a shape are of this kind."""
    writer: Callable[[TemplateBuilder, Decisions, Shape, Block], Layer]
    skeletal: SkeletalTensors = skeletal_tensors


LAYER_KINDS = [
    LayerKind("transformer", lambda _, __: True, LayerWriter),
    LayerKind("rowwise", lambda decisions, _: is_rowwise(decisions), RowwiseLayer, rowwise_tensors),
    LayerKind(
        "huggingface",
        lambda decisions, _: saves_of_modules(decisions),
        huggingface.HuggingFaceLayer,
        huggingface.module_tensors,
    ),
    LayerKind("metp", lambda decisions, _: decisions.layout.metp > 1, MetpLayer, metp_tensors),
]
"""The kind of a plan's layers is the last one that applies."""


def layer_kind(decisions: Decisions, layer: LayerShape) -> LayerKind:
    """Return the kind of a plan's layers of the shape ``layer``."""
    return next(kind for kind in reversed(LAYER_KINDS) if kind.applies(decisions, layer))


def skeletal_of(
    decisions: Decisions, shape: Shape, layer: LayerShape, *, scores: tuple[Skeletal, ...] = ()
) -> tuple[Skeletal, ...]:
    """Return the skeletal tensors of one layer of a plan; ``shape`` has the rank's sizes in any layer."""
    kind = layer_kind(decisions, layer)
    tensors = kind.skeletal(decisions.model, shape.of_layer(layer), decisions.dtype, scores=scores)
    return fp8.kept(decisions, layer, tensors)


@contextmanager
def registered(kind: LayerKind) -> Iterator[None]:
    """Register a kind while the context lasts; it takes precedence over all others."""
    LAYER_KINDS.append(kind)
    try:
        yield
    finally:
        LAYER_KINDS.remove(kind)
