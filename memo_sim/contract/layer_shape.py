"""What one layer of a model is, and the pattern in which layers differ."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, cycle, islice
from typing import Annotated

import msgspec

from memo_sim.contract.experts import Experts
from memo_sim.contract.units import MOST_TOKENS, Layers, NonNegative, Width

MOST_LAYER_KINDS = 64
"""Models whose every layer has a width of its own (OpenELM) have a few dozen; a search takes longer with each kind."""


class LayerShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one layer may have other than the model's other layers. Layers with equal shapes are of one layer kind."""

    ffn_hidden: Width
    """Features of the MLP's hidden row."""
    experts: Experts | None = None
    """The experts in place of the MLP; None: an MLP."""
    window: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] = 0
    """Keys that a token attends to at most: its own and those right before it; 0: all before it."""
    rope_theta: NonNegative = 0.0
    """Base of this layer's rotary tables, which then have no scaling; 0: the model's base and scaling."""


class LayerRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``times`` layers in a row that are alike."""

    shape: LayerShape
    times: Layers = 1


@lru_cache(maxsize=1024)
def every_layer(
    pattern: tuple[LayerRun, ...], layers: int, ffn_hidden: int, experts: Experts | None, window: int
) -> tuple[LayerShape, ...]:
    """Return the shape of every layer."""
    if not pattern:
        return (LayerShape(ffn_hidden=ffn_hidden, experts=experts, window=window),) * layers
    return tuple(islice(cycle(chain.from_iterable([run.shape] * run.times for run in pattern)), layers))


@lru_cache(maxsize=1024)
def distinct_layers(
    pattern: tuple[LayerRun, ...], layers: int, ffn_hidden: int, experts: Experts | None, window: int
) -> tuple[LayerShape, ...]:
    """Return the distinct shapes of layers; a search asks for them hundreds of thousands of times."""
    return tuple(dict.fromkeys(every_layer(pattern, layers, ffn_hidden, experts, window)))


@lru_cache(maxsize=1024)
def kinds_of_layers(
    pattern: tuple[LayerRun, ...], layers: int, ffn_hidden: int, experts: Experts | None, window: int
) -> tuple[int, ...]:
    """Return for every layer the number of its shape among the distinct ones."""
    kinds = {shape: kind for kind, shape in enumerate(distinct_layers(pattern, layers, ffn_hidden, experts, window))}
    return tuple(kinds[shape] for shape in every_layer(pattern, layers, ffn_hidden, experts, window))
