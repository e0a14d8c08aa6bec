"""Ranks the answers to one what-if question about several clusters by price or by tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from memo_sim.contract.result import Result
from memo_sim.contract.results import Results


def several_clusters(results: Sequence[Result], *, priced: bool) -> Results:
    """Return the results of one question in one document, the best cluster first; where nothing fits comes last.

    With ``priced``, every summary has a price, in one currency: the lowest price of a billion tokens comes first.
    Otherwise the most tokens per second of the whole cluster do.
    """
    return Results(
        model=results[0].model,
        seq_tokens=results[0].seq_tokens,
        ranked_by="price" if priced else "tokens per second",
        results=sorted(results, key=lambda result: _key(result, priced=priced)),
    )


def _key(result: Result, *, priced: bool) -> tuple[bool, float]:
    """Return what clusters are ranked by, the lowest first."""
    summary = result.summary
    if summary is None or summary.step_s is None:
        return True, float(summary.shortfall_bytes) if summary else inf
    if priced:
        return False, summary.price_per_billion_tokens or 0.0
    return False, -summary.tokens_per_step / summary.step_s
