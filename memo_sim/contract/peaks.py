"""What a chip can do at most, and which numbers of a profile are above it.

A measurement above its chip's peak is a mistake: in the timing, in what was counted, or in the chip's name. Every
prediction that uses it is too fast, so commands print a warning before the figures.

The peaks are the profile's own (``peak_flops``, ``memory_bytes_per_s``), and those of the fastest chip of its
generation, from NVIDIA's data sheets (A100, H100, H200, GH200, B200, B300; dense, without sparsity).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memo_sim.contract.hardware import ASSUMED, ROUGH, AttentionTable, CopyRates, Curve, Hardware
from memo_sim.contract.units import format_percent

TOLERANCE = 0.01
"""What a rate may be above a peak: data sheets round."""

BEYOND_CACHES_BYTES = 1e9
"""Kernels that move less may reach the rate of a cache (126 MB in B200), not that of the memory."""

MOST_TOLD = 3
"""Parts of a profile that a warning names."""

PASSES = 1.5
"""Bytes that an operator counts over those that its kernel moves: one that passes over rows twice may keep them on the
chip in between (measured on an H100: the fused backward of RMSNorm counts 1.2 times what its memory can move)."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most that any chip of a generation does, in FLOP/s and bytes/s."""

    flops: dict[str, float]
    memory_bytes_per_s: float | None
    link_bytes_per_s: float | None
    """Of one device to the others of its node, in one direction."""
    host_bytes_per_s: float | None
    """Between a device and its host, in one direction: PCIe, or NVLink-C2C of a superchip."""


def _peaks(tensor: float, tf32: float, memory: float, link: float, host: float) -> Peaks:
    return Peaks({"bf16": tensor, "fp16": tensor, "fp32": tf32}, memory, link, host)


GENERATIONS = {
    "Ampere": _peaks(312e12, 156e12, 2.039e12, 300e9, 32e9),
    "Hopper": _peaks(989.5e12, 494.7e12, 4.9e12, 450e9, 450e9),
    "Blackwell": _peaks(2.5e15, 1.25e15, 8e12, 900e9, 450e9),
}
"""By ``Hardware.generation``; fp32 products may run on TF32 tensor cores."""

UNKNOWN = Peaks({}, None, None, None)
"""Of chips whose generation is not listed."""

REDUCED_IN_SWITCHES = ("all_reduce", "reduce_scatter", "reduce")
"""Collectives whose sums NVLink's switches may do (SHARP), so that they go beyond the links' own rate."""


def flops_peak(hardware: Hardware, dtype: str) -> float | None:
    """Return the most FLOP/s of a dtype: the lower of the profile's own peak and its generation's; None: not known."""
    own: dict[str, float] = {name: quantity.value for name, quantity in hardware.peak_flops.items()}
    return _lower(own.get(dtype), _of_generation(hardware).flops.get(dtype))


def memory_peak(hardware: Hardware) -> float | None:
    """Return the most bytes/s of the device's memory; None: not known."""
    own = hardware.memory_bytes_per_s
    return _lower(own.value if own else None, _of_generation(hardware).memory_bytes_per_s)


def _lower(one: float | None, other: float | None) -> float | None:
    return min((peak for peak in (one, other) if peak is not None), default=None)


def _of_generation(hardware: Hardware) -> Peaks:
    return GENERATIONS.get(hardware.generation, UNKNOWN)


def exceeds(rate: float, peak: float | None) -> bool:
    """Return whether a rate is above a peak by more than data sheets round."""
    return peak is not None and rate > peak * (1 + TOLERANCE)


def above_peak(hardware: Hardware) -> list[str]:
    """Return one text for each part of a profile with a higher rate than the chip can have."""
    chip = "a CPU" if hardware.device == "cpu" else f"a {hardware.generation or 'GPU'} chip"
    return [
        f"{name} has {_rate(rate, unit)}, and {_rate(peak, unit)} is the most that {chip} with these peaks can have"
        for name, rate, peak, unit in _rates(hardware)
        if peak is not None and exceeds(rate, peak)
    ]


def warnings_about(hardware: Hardware, shares: dict[str, float]) -> list[str]:
    """Return what to tell before any figure of a prediction.

    ``shares``: what a step computes or moves over what the chip can in its time, by name.
    """
    found = above_peak(hardware)
    rough = [f"The profile {hardware.name} is rough: {text}." for text in [hardware.provenance.get(ROUGH)] if text]
    rough += [f"It assumes: {text}." for text in [hardware.provenance.get(ASSUMED)] if text]
    told = [f"The profile {hardware.name} says more than its chip can do: {text}." for text in found[:MOST_TOLD]]
    if len(found) > MOST_TOLD:
        told.append(f"So do {len(found) - MOST_TOLD} more parts of the profile.")
    if told:
        told.append("Predictions that use these rates are too fast. Measure it again, or correct its peaks.")
    return (
        rough
        + told
        + [
            f"The predicted step has {format_percent(share, 0)} of the {name} that the chip can do:"
            " it cannot be that fast."
            for name, share in shares.items()
            if exceeds(share, 1.0)
        ]
    )


Rate = tuple[str, float, float | None, str]
"""Where it stands in the profile, the largest rate there, its peak and the unit."""


def _rates(hardware: Hardware) -> Iterator[Rate]:
    known = _of_generation(hardware)
    for dtype, stated in hardware.peak_flops.items():
        yield f"peak_flops.{dtype}", stated.value, known.flops.get(dtype), "FLOP/s"
    for number, products in enumerate(hardware.gemm):
        name = f"gemm[{number}] ({products.dtype} {products.gemm_pass})"
        yield name, max(row[3] for row in products.rows), flops_peak(hardware, products.dtype), "FLOP/s"
    for number, several in enumerate(hardware.grouped_gemm):
        name = f"grouped_gemm[{number}] ({several.dtype} {several.gemm_pass})"
        yield name, max(row[4] for row in several.rows), flops_peak(hardware, several.dtype), "FLOP/s"
    for number, calls in enumerate(hardware.attention):
        name = f"attention[{number}] ({calls.kernel} {calls.dtype} {calls.attention_pass})"
        yield name, _fastest_call(calls), flops_peak(hardware, calls.dtype), "FLOP/s"
    if hardware.memory_bytes_per_s is not None:
        yield "memory_bytes_per_s", hardware.memory_bytes_per_s.value, known.memory_bytes_per_s, "bytes/s"
    memory = memory_peak(hardware)
    yield "memory_bound_bytes_per_s", _from_memory(hardware.memory_bound_bytes_per_s), memory, "bytes/s"
    for name, curve in _operators(hardware):
        yield name, _from_memory(curve), memory and memory * PASSES, "bytes/s"
    for name, copies in (("d2h", hardware.d2h), ("h2d", hardware.h2d)):
        yield name, _fastest(copies), known.host_bytes_per_s, "bytes/s"
    for number, table in enumerate(hardware.collectives):
        if table.kind not in REDUCED_IN_SWITCHES:
            name = f"collectives[{number}] ({table.kind} of {table.ranks})"
            yield name, max(table.bus_bytes_per_s.y), known.link_bytes_per_s, "bytes/s"


def _from_memory(curve: Curve) -> float:
    """Return the largest rate of a kernel that no cache holds the data of; 0 when there is none."""
    return max((y for x, y in zip(curve.x, curve.y, strict=True) if x >= BEYOND_CACHES_BYTES), default=0.0)


def _operators(hardware: Hardware) -> Iterator[tuple[str, Curve]]:
    for name, curve in hardware.rowwise_bytes_per_s.items():
        yield f"rowwise_bytes_per_s.{name}", curve
    for kernel, fused in hardware.fused_rowwise_bytes_per_s.items():
        for name, curve in fused.items():
            yield f"fused_rowwise_bytes_per_s.{kernel}.{name}", curve
    for library, patterns in hardware.framework_rowwise_bytes_per_s.items():
        for pattern, curve in patterns.items():
            yield f"framework_rowwise_bytes_per_s.{library}.{pattern}", curve


def _fastest_call(calls: AttentionTable) -> float:
    """Return the largest rate of a table, with the causal mask or without it."""
    gains = dict.fromkeys((row[0] for row in calls.rows), calls.full_mask_gain)
    if calls.full_mask_gains:
        gains = {tokens: gain for tokens, gain in calls.full_mask_gains if tokens in gains}
    return max(rate * max(1.0, gains.get(tokens, 1.0)) for tokens, _, rate in calls.rows)


def _fastest(copies: CopyRates) -> float:
    return max(*copies.alone.y, copies.duplex.value, copies.all_devices.value)


def _rate(value: float, unit: str) -> str:
    scaled, shown = (value / 1e12, "TFLOP/s") if unit == "FLOP/s" else (value / 1e9, "GB/s")
    return f"{scaled:,.0f} {shown}" if scaled >= 1000 else f"{scaled:.4g} {shown}"
