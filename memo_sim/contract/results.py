"""The answer of ``memo-sim what-if`` about several clusters, the best cluster first (``memo.results/1``)."""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.result import Result
from memo_sim.contract.units import Positive


class Results(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.results/1"
):
    """The same question about several clusters, each with its own result; those on which nothing fits come last."""

    model: str
    seq_tokens: Positive
    ranked_by: Literal["price", "tokens per second"]
    """price: of a billion tokens, the lowest first. tokens per second: of the whole cluster, the highest first."""
    results: list[Result]
    notes: list[str] = []
    """Where the clusters are not compared on equal terms: other kernels or batches, prices that are missing."""
