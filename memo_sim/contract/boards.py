"""Profiles of other boards with the same chip, and of a chip under another power limit.

    h100-1x8         NVIDIA's SXM board: HBM3 at 3.35 TB/s, 700 W
    h100hbm2e-1x8    a board with HBM2e at 2.4 TB/s and a limit of 500 W (``Hardware.boards``)
    --power-w 500    the profile's board under another limit

A power limit lowers the clocks that products and attention sustain; ``Hardware.power_rates`` says by how much. Kernels
that wait for device memory keep their rates, because its clocks do not change. Slower memory adds to their time what
the same bytes take longer on its bus:

    1 / rate' = 1 / rate + (1 / bus' - 1 / bus) / efficiency,    efficiency = largest rate / bus
"""

from __future__ import annotations

from bisect import bisect_right
from math import log

import msgspec

from memo_sim.contract.errors import UsageError
from memo_sim.contract.hardware import BOARD, POWER, Curve, Hardware, Quantity, Source

OPTION_SOURCE = "option"
"""The source of numbers that were given on the command line or in a case file."""


def with_power(hardware: Hardware, power_w: float, *, source: Source | None = None) -> Hardware:
    """Return the profile under another power limit, in watts.

    ``source``: of the limit; by default the command line.

    Raises:
        UsageError: when the profile does not know its rates by power limit, or not at this one.
    """
    rates, own = hardware.power_rates, hardware.power_w
    if rates is None or own is None:
        raise UsageError(
            "the profile has no rates by power limit",
            where=hardware.name,
            got=f"{power_w:g} W",
            wanted="a profile with power_w and power_rates",
            hint="leave --power-w out",
        )
    if not rates.x[0] <= power_w <= rates.x[-1]:
        raise UsageError(
            "no rates are known at this power limit",
            where=hardware.name,
            got=f"{power_w:g} W",
            wanted=f"{rates.x[0]:g} to {rates.x[-1]:g} W",
        )
    factor = _at(rates, power_w) / _at(rates, own.value)
    gemm = [
        msgspec.structs.replace(table, rows=[[*shape, rate * factor] for *shape, rate in table.rows])
        for table in hardware.gemm
    ]
    attention = [
        msgspec.structs.replace(table, rows=[[*shape, rate * factor] for *shape, rate in table.rows])
        for table in hardware.attention
    ]
    grouped = [
        msgspec.structs.replace(table, rows=[[*shape, rate * factor] for *shape, rate in table.rows])
        for table in hardware.grouped_gemm
    ]
    given = source or Source(kind="assumed", text="given on the command line")
    said = f"{power_w:g} W: products and attention run at {factor:.3f} of their rate at {own.value:g} W"
    return msgspec.structs.replace(
        hardware,
        gemm=gemm,
        attention=attention,
        grouped_gemm=grouped,
        power_w=Quantity(value=float(power_w), source=OPTION_SOURCE),
        sources={**hardware.sources, OPTION_SOURCE: given},
        provenance={**hardware.provenance, POWER: said},
    )


def with_board(hardware: Hardware, name: str) -> Hardware:
    """Return the profile of another board with the same chip.

    Raises:
        KeyError: when the profile has no board of this name.
    """
    board, bus = hardware.boards[name], hardware.memory_bytes_per_s
    made = hardware
    if board.memory_bytes_per_s is not None and bus is not None:
        made = _with_memory_rate(made, bus.value, board.memory_bytes_per_s.value)
    if board.power_w is not None:
        made = with_power(made, board.power_w.value, source=hardware.sources[board.power_w.source])
    changes = {
        field: value
        for field in ("device_memory_bytes", "memory_bytes_per_s", "power_w")
        if (value := getattr(board, field)) is not None
    }
    return msgspec.structs.replace(
        made,
        **changes,
        boards={},
        name=f"{hardware.name} {name}",
        provenance={**made.provenance, BOARD: board.text},
    )


def _with_memory_rate(hardware: Hardware, bus: float, other: float) -> Hardware:
    """Return the profile with device memory of another rate, in bytes/s of its bus."""
    efficiency = hardware.memory_bound_bytes_per_s.y[-1] / bus  # before the end, the cache may be faster
    added = (1.0 / other - 1.0 / bus) / efficiency

    def slower(curve: Curve) -> Curve:
        return msgspec.structs.replace(curve, y=[1.0 / (1.0 / rate + added) for rate in curve.y])

    return msgspec.structs.replace(
        hardware,
        memory_bound_bytes_per_s=slower(hardware.memory_bound_bytes_per_s),
        rowwise_bytes_per_s={kind: slower(curve) for kind, curve in hardware.rowwise_bytes_per_s.items()},
        fused_rowwise_bytes_per_s={
            kernel: {kind: slower(curve) for kind, curve in curves.items()}
            for kernel, curves in hardware.fused_rowwise_bytes_per_s.items()
        },
        framework_rowwise_bytes_per_s={
            library: {pattern: slower(curve) for pattern, curve in curves.items()}
            for library, curves in hardware.framework_rowwise_bytes_per_s.items()
        },
    )


def _at(curve: Curve, x: float) -> float:
    """Return the curve's value between its ends, interpolated in log x."""
    if x >= curve.x[-1]:
        return curve.y[-1]
    after = bisect_right(curve.x, x)
    (x0, x1), (y0, y1) = curve.x[after - 1 : after + 1], curve.y[after - 1 : after + 1]
    return y0 + (y1 - y0) * log(x / x0) / log(x1 / x0)
