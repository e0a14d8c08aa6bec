"""How many rows each expert of a run got, layer by layer (``memo.expert_load/1``).

``memo-exec run --expert-load FILE`` writes it, and ``--expert-load FILE`` of a question reads it: a plan gets the mean
over layers of ``by_fullness``, as text (``measured``).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from memo_sim.contract.units import MOST_EXPERTS, Positive, Tokens

THOUSANDTHS = 1_000
"""What a plan writes for an expert with the mean number of rows."""
MOST_SHARE = 9_999_999


class LayerLoad(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows of one layer's experts, summed over the run's micro-batches and ranks."""

    layer: Annotated[int, msgspec.Meta(ge=0)]
    """Number of the layer in the model, from 0."""
    rows: list[Tokens]
    """Rows of each expert, by its number."""
    by_fullness: list[Tokens]
    """Rows of each micro-batch's fullest expert, of its next one, and so on: which experts these are may change."""

    def __post_init__(self) -> None:
        """Refuse columns that do not describe the same rows."""
        if len(self.rows) != len(self.by_fullness) or sum(self.rows) != sum(self.by_fullness):
            raise ValueError("rows and by_fullness are not of the same rows")
        if not sum(self.rows):
            raise ValueError("no expert has a row")


class MeasuredLoad(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.expert_load/1"
):
    """The rows of every expert of a run."""

    model: str
    experts: Annotated[int, msgspec.Meta(ge=2, le=MOST_EXPERTS)]
    per_token: Positive
    steps: Positive
    """Steps whose rows are counted."""
    layers: Annotated[list[LayerLoad], msgspec.Meta(min_length=1, max_length=10_000)]
    """The layers that have experts."""

    def __post_init__(self) -> None:
        """Refuse layers with another number of experts, and layers that are listed twice."""
        if any(len(each.rows) != self.experts for each in self.layers):
            raise ValueError(f"a layer does not have {self.experts} experts")
        if len({each.layer for each in self.layers}) < len(self.layers):
            raise ValueError("a layer is listed twice")

    @property
    def load(self) -> str:
        """The load as a plan has it: thousandths of the mean rows for each expert, the fullest first.

        measured-2310-1200-490-0    four experts, of which the fullest gets 2.31 times the mean of the rows
        """
        shares = [0.0] * self.experts
        for each in self.layers:
            mean = sum(each.by_fullness) / self.experts
            shares = [
                share + rows / mean / len(self.layers) for share, rows in zip(shares, each.by_fullness, strict=True)
            ]
        ordered = sorted((min(MOST_SHARE, round(share * THOUSANDTHS)) for share in shares), reverse=True)
        return "-".join(("measured", *map(str, ordered)))
