"""Converts timed operators to the tables and curves of a profile.

Matrix products and attention calls of equal shape that differ in detail, such as with and without a bias, are averaged.
Row-wise operators of nearly equal bytes but different row lengths share a point: total bytes / total seconds.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import exp, log, log2, prod
from statistics import fmean

from memo_exec.probes.timing import Sample
from memo_sim.contract.hardware import (
    AttentionTable,
    Curve,
    GemmPass,
    GemmTable,
    GroupedGemmTable,
    LinearLossKernel,
    LinearLossPart,
    LinearLossTable,
)
from memo_sim.contract.knobs import DtypeName, RowwiseKernel
from memo_sim.program.ir.work import Attention, Gemm, GroupedGemm, LinearLoss, Rowwise, Work

POINTS_PER_OCTAVE = 2


def point_of(work: Rowwise) -> int:
    """Return the index of a row-wise operator's point; operators of the same kind and similar bytes share one."""
    return round(log2(work.moved_bytes) * POINTS_PER_OCTAVE)


@dataclass(frozen=True)
class Timed:
    """One operator's work, and its time in a step: that of its kernel alone, and the time that a step adds."""

    work: Work
    seconds: float
    spread: float
    rowwise: RowwiseKernel = "torch"
    """The library that ran a row-wise operator."""

    @classmethod
    def of(cls, work: Work, sample: Sample, added_s: float, rowwise: RowwiseKernel = "torch") -> Timed:
        """Return a sample's time plus the time that a step adds to one instruction."""
        return cls(work, sample.seconds + added_s, sample.spread, rowwise)


def gemm_tables(timed: list[Timed], source: str) -> list[GemmTable]:
    """Return one table per pass and dtype."""
    groups: dict[tuple[str, GemmPass], dict[Gemm, list[Timed]]] = defaultdict(lambda: defaultdict(list))
    for each in timed:
        if isinstance(each.work, Gemm):
            groups[each.work.dtype, each.work.gemm_pass][each.work].append(each)
    tables = []
    for (_, gemm_pass), by_work in sorted(groups.items()):
        first = next(iter(by_work))
        rows = [
            [float(w.m), float(w.n), float(w.k), w.flops / fmean(t.seconds for t in ts)] for w, ts in by_work.items()
        ]
        spread = fmean(t.spread for ts in by_work.values() for t in ts)
        tables.append(
            GemmTable(dtype=first.dtype, gemm_pass=gemm_pass, rows=sorted(rows), source=source, spread=spread)
        )
    return tables


def grouped_tables(timed: list[Timed], source: str) -> list[GroupedGemmTable]:
    """Return one table per pass and dtype of the products of several experts."""
    groups: dict[tuple[str, GemmPass], list[tuple[GroupedGemm, Timed]]] = defaultdict(list)
    for each in timed:
        if isinstance(each.work, GroupedGemm):
            groups[each.work.dtype, each.work.gemm_pass].append((each.work, each))
    tables = []
    for (_, gemm_pass), found in sorted(groups.items()):
        seconds: dict[tuple[float, ...], list[float]] = defaultdict(list)
        for work, each in found:
            seconds[work.experts, work.rows, work.n, work.k].append(each.seconds)
        rows = [[*map(float, shape), 2.0 * shape[1] * shape[2] * shape[3] / fmean(s)] for shape, s in seconds.items()]
        spread = fmean(each.spread for _, each in found)
        dtype = found[0][0].dtype
        tables.append(
            GroupedGemmTable(dtype=dtype, gemm_pass=gemm_pass, rows=sorted(rows), source=source, spread=spread)
        )
    return tables


def linear_loss_tables(timed: list[Timed], source: str) -> list[LinearLossTable]:
    """Return one table per kernel, dtype and part of the losses with the classifier's product inside."""
    groups: dict[tuple[LinearLossKernel, DtypeName, LinearLossPart], list[tuple[LinearLoss, Timed]]]
    groups = defaultdict(list)
    for each in timed:
        if isinstance(each.work, LinearLoss):
            groups[each.work.kernel, each.work.dtype, each.work.part].append((each.work, each))
    tables = []
    for (kernel, dtype, part), found in sorted(groups.items()):
        seconds: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        for work, each in found:
            seconds[work.m, work.n, work.k].append(each.seconds)
        rows = [[*map(float, shape), 2.0 * prod(shape) / fmean(each)] for shape, each in sorted(seconds.items())]
        spread = fmean(each.spread for _, each in found)
        tables.append(LinearLossTable(kernel=kernel, dtype=dtype, part=part, rows=rows, source=source, spread=spread))
    return tables


def attention_tables(timed: list[Timed], source: str) -> list[AttentionTable]:
    """Return one table per kernel, dtype, pass and head size, with the gain in rate of calls without a mask."""
    groups: dict[tuple[str, str, bool, int], list[tuple[Attention, Timed]]] = defaultdict(list)
    for each in timed:
        if isinstance(each.work, Attention):
            work = each.work
            groups[work.kernel, work.dtype, work.backward, work.head_dim].append((work, each))
    tables = []
    for (kernel, _, backward, head_dim), found in sorted(groups.items(), key=lambda item: str(item[0])):
        causal = {(w.q_tokens, w.heads): w.flops / t.seconds for w, t in found if w.mask == "causal"}
        gains = [
            [float(w.q_tokens), w.flops / t.seconds / causal[w.q_tokens, w.heads]]
            for w, t in found
            if w.mask == "none" and (w.q_tokens, w.heads) in causal
        ]
        tables.append(
            AttentionTable(
                kernel=kernel,
                dtype=found[0][0].dtype,
                attention_pass="backward" if backward else "forward",
                head_dim=head_dim,
                rows=[[float(tokens), float(heads), rate] for (tokens, heads), rate in sorted(causal.items())],
                source=source,
                full_mask_gains=sorted(gains),
                spread=fmean(t.spread for _, t in found),
            )
        )
    return tables


def rowwise_curves(timed: list[Timed], source: str, rowwise: RowwiseKernel = "torch") -> dict[str, Curve]:
    """Return a curve for every kind of row-wise operator that the library ``rowwise`` ran."""
    kinds: dict[str, dict[int, list[tuple[float, Timed]]]] = defaultdict(lambda: defaultdict(list))
    for each in timed:
        if isinstance(each.work, Rowwise) and each.work.moved_bytes > 0 and each.rowwise == rowwise:
            kinds[each.work.kind][point_of(each.work)].append((float(each.work.moved_bytes), each))
    return {kind: _curve(list(found.values()), source) for kind, found in sorted(kinds.items())}


def _curve(found: list[list[tuple[float, Timed]]], source: str) -> Curve:
    points = []
    for members in found:
        x = exp(fmean(log(size) for size, _ in members))
        rate = sum(size for size, _ in members) / sum(each.seconds for _, each in members)
        points.append((x, rate))
    points.sort()
    spread = fmean(each.spread for members in found for _, each in members)
    return Curve(x=[x for x, _ in points], y=[y for _, y in points], source=source, spread=spread)
