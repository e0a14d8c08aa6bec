"""Every decision of a plan by its path, as ``Knob.path`` says it: ``layout.tp``, ``decisions.kernels.attention``."""

from __future__ import annotations

from typing import Any

import msgspec

from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels, Layout

_PARTS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "model": ("model", Model),
    "layout": ("layout", Layout),
    "kernels": ("decisions.kernels", Kernels),
}
"""Fields of ``Decisions`` that have fields of their own: the path of the part, and its type."""

NO_DECISION = ("model.name", "model.source")
"""Texts of a model file that no framework needs."""


NOT_WRITTEN = ("query_scalar", "post_norms", "scaled_embeddings", "norms_from_one")
"""Fields of a model that Megatron and most others have no options of.

Models with one of them are refused (``model_parts.py``), except ``norms_from_one``, which is about files of weights.
"""


def plan_paths() -> tuple[str, ...]:
    """Return the paths of all decisions, the model's shape among them."""
    found = list[str]()
    for field in msgspec.structs.fields(Decisions):
        if field.name in _PARTS:
            part, kind = _PARTS[field.name]
            found += [f"{part}.{inner.name}" for inner in msgspec.structs.fields(kind)]
        else:
            found.append(f"decisions.{field.name}")
    return tuple(path for path in found if path not in NO_DECISION)


def value_at(decisions: Decisions, path: str) -> Any:
    """Return the value of the decision at ``path``."""
    part, _, name = path.rpartition(".")
    holder = next((getattr(decisions, field) for field, (at, _) in _PARTS.items() if at == part), decisions)
    return getattr(holder, name)


def differences(wanted: Decisions, other: Decisions) -> list[str]:
    """Return the paths at which two plans differ."""
    found = [path for path in plan_paths() if value_at(wanted, path) != value_at(other, path)]
    if wanted.model.layers == other.model.layers and _layers(wanted.model) == _layers(other.model):
        return [path for path in found if path != "model.layer_pattern"]  # the same layers, written otherwise
    return found


def _layers(model: Model) -> list[LayerShape]:
    """Return the shapes of all layers; a base of their own that is the model's, unscaled, is none."""
    same = model.rope_theta if model.rope_scaling is None else 0.0
    shapes = [model.layer(number) for number in range(model.layers)]
    return [msgspec.structs.replace(shape, rope_theta=0.0) if shape.rope_theta == same else shape for shape in shapes]
