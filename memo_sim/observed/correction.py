"""Changes a profile's rates to what a recorded step, or a benchmark of links, measured.

A factor is measured / predicted seconds of all work that one rate is about. The rate is divided by it, so the profile
keeps the form of its curves and predicts this work's total as it was measured. The names of rates:

    product.bf16.wgrad              the rows of one dtype and pass
    attention.flash2.bf16.backward  the tables of one kernel, dtype and pass
    row-wise                        all curves of row-wise operators that have no factor of their own
    row-wise.memory-bound           the common curve, and operators' curves that have no factor of their own
    row-wise.own.gelu               an operator's curve
    row-wise.eager.elementwise      the curve of a framework's kernels of one pattern
    copy.d2h                        all rates of one direction
    collective.all_reduce           a kind's tables that have no factor of their own
    collective.all_reduce.8         the table of so many ranks

Every changed number names the recording as its source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from memo_sim.contract.cluster import Cluster, NodesCurve
from memo_sim.contract.errors import UsageError
from memo_sim.contract.hardware import (
    AttentionTable,
    CollectiveKind,
    CollectiveTable,
    CopyRates,
    Curve,
    GemmPass,
    GemmTable,
    GroupedGemmTable,
    Hardware,
    Quantity,
    Source,
)
from memo_sim.costs.collective import ALIKE
from memo_sim.observed.link_benchmarks import LinkTest

PRODUCT, ATTENTION, ROWWISE, COPY, COLLECTIVE = "product", "attention", "row-wise", "copy", "collective"
MEMORY_BOUND = f"{ROWWISE}.memory-bound"
PASSES: tuple[GemmPass, ...] = ("fprop", "dgrad", "wgrad")

RINGS = ("all_gather", "reduce_scatter")
"""Collectives that are rings over any number of nodes; an all-reduce may be a tree."""
TWO, MOST_EFFICIENCY = 2, 1.05

NameOf = Callable[[str], str]
"""Returns the source of a factor's changes by the factor's name."""


def product_rate(dtype: str, gemm_pass: str) -> str:
    """Return the name of the rate of products of one dtype and pass."""
    return f"{PRODUCT}.{dtype}.{gemm_pass}"


def attention_rate(kernel: str, dtype: str, *, backward: bool) -> str:
    """Return the name of the rate of one attention kernel's pass."""
    return f"{ATTENTION}.{kernel}.{dtype}.{'backward' if backward else 'forward'}"


def own_rate(kind: str) -> str:
    """Return the name of the rate of a row-wise operator that was measured alone."""
    return f"{ROWWISE}.own.{kind}"


def library_rate(library: str, pattern: str) -> str:
    """Return the name of the rate of a library's row-wise kernels of one pattern."""
    return f"{ROWWISE}.{library}.{pattern}"


def collective_rate(kind: str, ranks: int) -> str:
    """Return the name of the rate of a collective of so many ranks inside a node."""
    return f"{COLLECTIVE}.{kind}.{ranks}"


def group_of(rate: str) -> str:
    """Return the rate that stands for one without a factor of its own; itself where there is none."""
    parts = rate.split(".")
    if parts[0] == ROWWISE:
        return ROWWISE
    return ".".join(parts[:2]) if parts[0] == COLLECTIVE else rate


def corrected(hardware: Hardware, factors: Mapping[str, float], *, text: str, host_factor: float = 1.0) -> Hardware:
    """Return the profile with its rates divided by ``factors``, by the rates' names; ``text`` says who measured.

    ``host_factor`` divides the rate of host memory where that is what limits copies.
    """
    sources = dict(hardware.sources)

    def name_of(rate: str) -> str:
        name = f"recorded-{rate.replace('.', '-')}"
        said = f"{text}: {rate} took {factors[rate]:.3f} of the predicted time; rates divided by it"
        if group_of(rate) == rate and rate.startswith((ROWWISE, COLLECTIVE)):
            said += ", also where no call was recorded"
        sources[name] = Source(kind="derived", text=said)
        return name

    changed: dict[str, object] = {
        "gemm": _products(hardware.gemm, factors, name_of),
        "grouped_gemm": [_grouped(table, factors, name_of) for table in hardware.grouped_gemm],
        "attention": [_attention(table, factors, name_of) for table in hardware.attention],
        "collectives": _collectives(hardware.collectives, factors, name_of),
        **_rowwise(hardware, factors, name_of),
    }
    for field in ("d2h", "h2d"):
        if (rate := f"{COPY}.{field}") in factors:
            changed[field] = _copies(getattr(hardware, field), factors[rate], name_of(rate))
            if host_factor != 1:
                value = hardware.host_copy_bytes_per_s.value / host_factor
                changed["host_copy_bytes_per_s"] = Quantity(value=value, source=name_of(rate))
    return msgspec.structs.replace(hardware, sources=sources, **changed)


def _products(tables: Sequence[GemmTable], factors: Mapping[str, float], name_of: NameOf) -> list[GemmTable]:
    """Return the tables; a pass that was priced with another one's rows gets rows of its own."""
    found = list(tables)
    for rate, factor in factors.items():
        kind, *parts = rate.split(".")
        if kind != PRODUCT:
            continue
        dtype, gemm_pass = parts
        of_dtype = [table for table in tables if table.dtype == dtype]
        known = next(p for p in (gemm_pass, *PASSES) if any(table.gemm_pass == p for table in of_dtype))
        found = [table for table in found if (table.dtype, table.gemm_pass) != (dtype, gemm_pass)]
        found += [
            msgspec.structs.replace(
                table,
                gemm_pass=gemm_pass,
                rows=[[*row[:3], row[3] / factor] for row in table.rows],
                source=name_of(rate),
            )
            for table in of_dtype
            if table.gemm_pass == known
        ]
    return found


def _grouped(table: GroupedGemmTable, factors: Mapping[str, float], name_of: NameOf) -> GroupedGemmTable:
    rate = f"{PRODUCT}.{table.dtype}.{table.gemm_pass}"
    if rate not in factors:
        return table
    rows = [[*row[:4], row[4] / factors[rate]] for row in table.rows]
    return msgspec.structs.replace(table, rows=rows, source=name_of(rate))


def _attention(table: AttentionTable, factors: Mapping[str, float], name_of: NameOf) -> AttentionTable:
    rate = attention_rate(table.kernel, table.dtype, backward=table.attention_pass == "backward")
    if rate not in factors:
        return table
    rows = [[*row[:2], row[2] / factors[rate]] for row in table.rows]
    return msgspec.structs.replace(table, rows=rows, source=name_of(rate))


def _rowwise(hardware: Hardware, factors: Mapping[str, float], name_of: NameOf) -> dict[str, object]:
    """Return the curves of row-wise operators; one without a factor of its own has that of curves like it.

    Operators and the common curve were measured alike, on memo-exec's kernels.
    """
    if ROWWISE not in factors:
        return {}

    def curve(found: Curve, *rates: str) -> Curve:
        known = next(rate for rate in (*rates, ROWWISE) if rate in factors)
        return _scaled(found, factors[known], name_of(known))

    def of_library(library: str, curves: Mapping[Any, Curve]) -> dict[Any, Curve]:
        return {name: curve(found, library_rate(library, name)) for name, found in curves.items()}

    fused, framework = hardware.fused_rowwise_bytes_per_s, hardware.framework_rowwise_bytes_per_s
    return {
        "memory_bound_bytes_per_s": curve(hardware.memory_bound_bytes_per_s, MEMORY_BOUND),
        "rowwise_bytes_per_s": {
            kind: curve(found, own_rate(kind), MEMORY_BOUND) for kind, found in hardware.rowwise_bytes_per_s.items()
        },
        "fused_rowwise_bytes_per_s": {library: of_library(library, curves) for library, curves in fused.items()},
        "framework_rowwise_bytes_per_s": {
            library: of_library(library, curves) for library, curves in framework.items()
        },
    }


def _collectives(
    tables: Sequence[CollectiveTable], factors: Mapping[str, float], name_of: NameOf
) -> list[CollectiveTable]:
    """Return the tables; a kind that was priced with another one's tables gets tables of its own."""
    found = list(tables)
    kinds: list[CollectiveKind] = [kind for kind in ALIKE if f"{COLLECTIVE}.{kind}" in factors]
    for kind in kinds:
        known = next(like for like in ALIKE[kind] if any(table.kind == like for table in tables))
        found = [table for table in found if table.kind != kind]
        for table in tables:
            if table.kind != known:
                continue
            rate = collective_rate(kind, table.ranks)
            rate = rate if rate in factors else group_of(rate)
            found.append(
                msgspec.structs.replace(
                    table,
                    kind=kind,
                    alpha_s=table.alpha_s * factors[rate],
                    bus_bytes_per_s=_scaled(table.bus_bytes_per_s, factors[rate], name_of(rate)),
                    source=name_of(rate),
                )
            )
    return found


def with_collectives(hardware: Hardware, tables: Sequence[CollectiveTable], source: Source, name: str) -> Hardware:
    """Return the profile with ``tables`` in the place of those of the same kind and number of ranks."""
    new = {(table.kind, table.ranks) for table in tables}
    kept = [table for table in hardware.collectives if (table.kind, table.ranks) not in new]
    return msgspec.structs.replace(hardware, collectives=[*kept, *tables], sources={**hardware.sources, name: source})


def with_copies(hardware: Hardware, rates: Mapping[str, float], source: Source, name: str) -> Hardware:
    """Return the profile with rates of large copies in bytes/s: ``d2h.alone``, ``h2d.duplex``, ``d2h.all_devices`` ...

    The curve of single copies keeps its form: all of its rates are scaled so that the largest is the given one.
    """
    changed: dict[str, CopyRates] = {}
    for field, found in (("d2h", hardware.d2h), ("h2d", hardware.h2d)):
        copies = found
        if alone := rates.get(f"{field}.alone"):
            curve = _scaled(copies.alone, max(copies.alone.y) / alone, name)
            copies = msgspec.structs.replace(copies, alone=curve)
        for part in ("duplex", "all_devices"):
            if value := rates.get(f"{field}.{part}"):
                copies = msgspec.structs.replace(copies, **{part: Quantity(value=value, source=name)})
        changed[field] = copies
    return msgspec.structs.replace(hardware, sources={**hardware.sources, name: source}, **changed)


def with_network(cluster: Cluster, test: LinkTest, source: Source, name: str) -> Cluster:
    """Return the cluster with a ring's efficiency over several whole nodes, as nccl-tests measured it.

    Raises:
        UsageError: when the cluster has no network, the run used other nodes than whole ones, or the cards' rate is
            lower than what was measured.
    """
    network = cluster.network
    if network is None:
        raise UsageError(
            "a run over several nodes measures a network, and this cluster has none",
            got=f"{test.ranks} ranks on {test.nodes} nodes, {cluster.name}",
            wanted="--cluster of several nodes",
        )
    if test.kind not in RINGS:
        raise UsageError(
            "of runs over several nodes, a network takes those that are rings",
            got=f"{test.kind} over {test.nodes} nodes",
            wanted="the output of all_gather_perf or reduce_scatter_perf",
        )
    if test.ranks != test.nodes * cluster.devices_per_node:
        raise UsageError(
            "a network's efficiency is that of rings over whole nodes",
            got=f"{test.ranks} ranks on {test.nodes} nodes",
            wanted=f"{test.nodes * cluster.devices_per_node} ranks, {cluster.devices_per_node} on a node",
        )
    curve = test.curve(name, network.node_bytes_per_s)
    if max(curve.y) > MOST_EFFICIENCY:
        raise UsageError(
            "the run is faster than the cards of the cluster",
            got=f"{max(curve.y) * network.node_bytes_per_s / 1e9:.0f} GB/s from a node",
            wanted=f"at most {network.node_bytes_per_s / 1e9:.0f} GB/s, those of {network.nics_per_node} cards",
            hint="name the cards in --cluster: h100-2x8-ndr8, or a cluster file",
        )
    if test.nodes == TWO:
        network = msgspec.structs.replace(network, size_efficiency=curve)
    else:
        others = [each for each in network.efficiency_by_nodes if each.nodes != test.nodes]
        mine = NodesCurve(x=curve.x, y=curve.y, source=name, nodes=test.nodes)
        by_nodes = sorted([*others, mine], key=lambda each: each.nodes)
        network = msgspec.structs.replace(network, efficiency_by_nodes=by_nodes)
    return msgspec.structs.replace(cluster, network=network, sources={**cluster.sources, name: source})


def _scaled(curve: Curve, factor: float, name: str) -> Curve:
    return Curve(x=curve.x, y=[value / factor for value in curve.y], source=name, spread=curve.spread)


def _copies(rates: CopyRates, factor: float, name: str) -> CopyRates:
    return CopyRates(
        alone=_scaled(rates.alone, factor, name),
        duplex=Quantity(value=rates.duplex.value / factor, source=name),
        all_devices=Quantity(value=rates.all_devices.value / factor, source=name),
    )
