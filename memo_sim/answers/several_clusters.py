"""Ranks the answers to one what-if question about several clusters by price or by tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from memo_sim.contract.result import Result
from memo_sim.contract.results import Results
from memo_sim.contract.summary import Summary

ALIKE = {"dtype": "--dtype", "libraries": "--libraries", "device memory": "--memory-policy"}
"""Assumptions that make clusters unequal where they differ, and the options that make them equal."""


def several_clusters(results: Sequence[Result], *, prices: Sequence[float | None]) -> Results:
    """Return the results of one question in one document, the best cluster first; where nothing fits comes last.

    ``prices``: of a device of each cluster for an hour, in one currency. Where all have one, the lowest price of a
    billion tokens comes first; otherwise the most tokens per second of the whole cluster do, and a note says which
    price is missing.
    """
    priced = None not in prices
    return Results(
        model=results[0].model,
        seq_tokens=results[0].seq_tokens,
        ranked_by="price" if priced else "tokens per second",
        results=sorted(results, key=lambda result: _key(result, priced=priced)),
        notes=[*_without_price(results, prices), *_other_kernels(results), *_other_batches(results), *_unlike(results)],
    )


def without_price(names: Sequence[str], prices: Sequence[float | None]) -> list[str]:
    """Return what has no price, where others have one."""
    missing = [name for name, price in zip(names, prices, strict=True) if price is None]
    if not missing or len(missing) == len(names):
        return []
    keys = ",".join(f"{name}=PRICE" for name in missing)
    return [f"No price of {', '.join(missing)}, so prices are not compared (add {keys} to --price-per-gpu-hour)."]


def _without_price(results: Sequence[Result], prices: Sequence[float | None]) -> list[str]:
    return without_price([result.cluster for result in results], prices)


def _other_kernels(results: Sequence[Result]) -> list[str]:
    """Return which kernels the clusters' plans have, where they differ: faster ones may have been measured on one."""
    found = [result for result in results if result.best is not None]
    if len({_kernels(result) for result in found}) < 2:
        return []
    listed = "; ".join(f"{result.cluster}: {_kernels(result)}" for result in found)
    options = []
    if len({result.best.rowwise for result in found if result.best}) > 1:
        options.append("--rowwise torch makes the others than attention equal")
    if len({result.best.attention for result in found if result.best}) > 1:
        options.append("--attention names one for all, where all have it")
    return [f"Kernels differ, as each profile has rates of its own: {listed}. {', '.join(options)}."]


def _kernels(result: Result) -> str:
    assert result.best is not None
    return f"{result.best.attention} and {result.best.rowwise}"


def _other_batches(results: Sequence[Result]) -> list[str]:
    """Return the sequences of a step on each cluster, where they differ."""
    batches = {r.cluster: r.summary.tokens_per_step // r.seq_tokens for r in results if r.summary is not None}
    if len(set(batches.values())) < 2:
        return []
    listed = ", ".join(f"{name}: {count}" for name, count in batches.items())
    return [f"Sequences of a step differ: {listed}. --global-batch {max(batches.values())} makes them equal."]


def _unlike(results: Sequence[Result]) -> list[str]:
    """Return the other assumptions that differ."""
    notes = []
    for name, option in ALIKE.items():
        values = {
            r.cluster: each.value for r in results if r.summary for each in r.summary.assumptions if each.name == name
        }
        if len(set(values.values())) > 1:
            listed = "; ".join(f"{cluster}: {value}" for cluster, value in values.items())
            notes.append(f"{name.capitalize()} differ: {listed}. {option} makes them equal.")
    return notes


def _key(result: Result, *, priced: bool) -> tuple[bool, float]:
    """Return what clusters are ranked by, the lowest first."""
    summary = result.summary
    if summary is None or summary.step_s is None:
        return True, float(_missing_bytes(summary)) if summary else inf
    if priced:
        return False, summary.price_per_billion_tokens or 0.0
    return False, -summary.tokens_per_step / summary.step_s


def _missing_bytes(summary: Summary) -> int:
    """Return the bytes that a device and a node's host lack together."""
    host = summary.host_memory
    also = max(0, host.needed_bytes - host.capacity_bytes) if summary.status == "gpu_oom" else 0
    return summary.shortfall_bytes + also
