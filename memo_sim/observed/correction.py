"""Changes a profile's rates to what a recorded step, or a benchmark of links, measured.

A factor is measured / predicted seconds of one kind of work. Rates are divided by it, so the profile keeps the form of
its curves, and predicts this kind's total as it was measured. Every changed number names the recording as its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from memo_sim.contract.hardware import CollectiveTable, CopyRates, Curve, GemmTable, Hardware, Quantity, Source

PRODUCTS, ATTENTION, BACKWARD, ROWWISE = "product", "attention", "attention.bwd", "row-wise"
D2H, H2D = "copy.d2h", "copy.h2d"


def corrected(hardware: Hardware, factors: Mapping[str, float], *, text: str) -> Hardware:
    """Return the profile with the rates of each kind in ``factors`` (measured / predicted) corrected.

    Kinds are ``product`` (all passes), ``attention``, ``attention.bwd``, ``row-wise``, ``copy.d2h``, ``copy.h2d`` and
    ``collective.KIND``. ``text`` says who measured.
    """
    sources = dict(hardware.sources)

    def name_of(kind: str) -> str:
        name = f"recorded-{kind.replace('.', '-')}"
        sources[name] = Source(
            kind="derived", text=f"{text}: {kind} took {factors[kind]:.3f} of the predicted time; rates divided by it"
        )
        return name

    changed: dict[str, object] = {}
    if PRODUCTS in factors:
        changed |= _products(hardware, factors[PRODUCTS], name_of(PRODUCTS))
    tables = list(hardware.attention)
    for kind, which in ((ATTENTION, "forward"), (BACKWARD, "backward")):
        if kind in factors:
            name = name_of(kind)
            tables = [
                msgspec.structs.replace(
                    table, rows=[[*row[:2], row[2] / factors[kind]] for row in table.rows], source=name
                )
                if table.attention_pass == which
                else table
                for table in tables
            ]
    changed["attention"] = tables
    if ROWWISE in factors:
        changed["memory_bound_bytes_per_s"] = _scaled(
            hardware.memory_bound_bytes_per_s, factors[ROWWISE], name_of(ROWWISE)
        )
    for kind, field in ((D2H, "d2h"), (H2D, "h2d")):
        if kind in factors:
            changed[field] = _copies(getattr(hardware, field), factors[kind], name_of(kind))
    names = {
        f"collective.{t.kind}": name_of(f"collective.{t.kind}")
        for t in hardware.collectives
        if f"collective.{t.kind}" in factors
    }
    changed["collectives"] = [
        msgspec.structs.replace(
            table,
            alpha_s=table.alpha_s * factors[kind],
            bus_bytes_per_s=_scaled(table.bus_bytes_per_s, factors[kind], names[kind]),
            source=names[kind],
        )
        if (kind := f"collective.{table.kind}") in factors
        else table
        for table in hardware.collectives
    ]
    return msgspec.structs.replace(hardware, sources=sources, **changed)


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


def _products(hardware: Hardware, factor: float, name: str) -> dict[str, object]:
    """Return the fields that make products slower by ``factor``; one that is faster than alone changes the rows."""
    now = 1.0 if hardware.sustained_gemm is None else hardware.sustained_gemm.value
    if now / factor <= 1:
        return {"sustained_gemm": Quantity(value=now / factor, source=name)}

    def faster(table: GemmTable) -> GemmTable:
        return msgspec.structs.replace(
            table, rows=[[*row[:3], row[3] * now / factor] for row in table.rows], source=name
        )

    return {"sustained_gemm": None, "gemm": [faster(table) for table in hardware.gemm]}


def _scaled(curve: Curve, factor: float, name: str) -> Curve:
    return Curve(x=curve.x, y=[value / factor for value in curve.y], source=name, spread=curve.spread)


def _copies(rates: CopyRates, factor: float, name: str) -> CopyRates:
    return CopyRates(
        alone=_scaled(rates.alone, factor, name),
        duplex=Quantity(value=rates.duplex.value / factor, source=name),
        all_devices=Quantity(value=rates.all_devices.value / factor, source=name),
    )
