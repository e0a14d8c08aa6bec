"""Which features go together (``memo.combinations/1``)."""

from __future__ import annotations

import msgspec


class NamedFeature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that a plan or a model may have."""

    name: str
    about: str
    options: str
    """The options that choose it; of a model's feature, what the model has."""


class Pair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two features, and whether a program can be written for a plan that has both."""

    first: str
    second: str
    together: bool
    one_knob: bool = False
    """Whether they are two values of one knob, so that no plan has both."""
    rule: str = ""
    """The rule that refuses them; empty where none does."""
    reason: str = ""
    """Why they do not go together."""
    hint: str = ""
    """What to do instead."""


class Combinations(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.combinations/1"
):
    """Every feature, and every pair of two of them."""

    features: list[NamedFeature]
    pairs: list[Pair]
