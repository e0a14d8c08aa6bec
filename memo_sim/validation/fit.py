"""Fits one constant of a hardware profile to published measurements.

All other numbers of the profile keep their source. The fitted value minimises the mean absolute relative error of the
named cases: of MFU or, where a source has none, of step time. The result also holds the errors with an unfitted value,
and the errors of each length's cases with a value fitted without them.

    copy-rate           the copy rate of a device while its whole node copies
    attention-factor    attention time under DeepSpeed-Ulysses, over the profile's attention time
    device-memory       time of cudaMalloc and cudaFree of one GiB together (half of it each)
    host-launch         time that an eager framework's host needs to launch a kernel
    host-pass           time that it needs in addition for one micro-batch's forward or backward through a stage
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.errors import UsageError, did_you_mean
from memo_sim.contract.hardware import CopyRates, Hardware, Quantity, Source
from memo_sim.contract.progress import Progress
from memo_sim.contract.validation import Validation
from memo_sim.validation.cases import Case
from memo_sim.validation.validate import validate

GOLDEN = 0.6180339887498949
ITERATIONS = 12

ASSUMED = "fit"
"""Name of the source that a fit gives to the value it tries."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A number of a profile that can be fitted; one ``unit``, in which it is given and shown, is ``scale`` SI units."""

    name: str
    unit: str
    scale: float
    change: Callable[[Hardware, float], Hardware]
    """Takes a profile and a value in SI units; returns the profile with that value."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted value (in the constant's unit) and the validations with and without it."""

    constant: Constant
    value: float
    fitted: Validation
    unfitted_value: float
    unfitted: Validation
    left_out: dict[int, tuple[float, Validation]]
    """By length (tokens): the value fitted without that length's cases, and the validation of only those cases."""


def with_copy_rate(hardware: Hardware, rate: float) -> Hardware:
    """Return the profile with another all-devices copy rate, both directions (bytes/s)."""

    def changed(rates: CopyRates) -> CopyRates:
        return msgspec.structs.replace(rates, all_devices=msgspec.structs.replace(rates.all_devices, value=rate))

    return msgspec.structs.replace(hardware, d2h=changed(hardware.d2h), h2d=changed(hardware.h2d))


def with_attention_factor(hardware: Hardware, factor: float) -> Hardware:
    """Return the profile with another factor on attention time under DeepSpeed-Ulysses."""
    known = hardware.system_attention | {"deepspeed-ulysses": Quantity(value=factor, source=ASSUMED)}
    return msgspec.structs.replace(hardware, system_attention=known, sources=_with_source(hardware))


def with_device_memory(hardware: Hardware, seconds: float) -> Hardware:
    """Return the profile with other times of cudaMalloc and cudaFree: ``seconds`` per GiB for both together."""
    half = Quantity(value=seconds / 2, source=ASSUMED)
    return msgspec.structs.replace(
        hardware, device_malloc_s_per_gib=half, device_free_s_per_gib=half, sources=_with_source(hardware)
    )


def with_host_launch(hardware: Hardware, seconds: float) -> Hardware:
    """Return the profile with another launch time (seconds)."""
    launch = Quantity(value=seconds, source=ASSUMED)
    return msgspec.structs.replace(hardware, host_launch_s=launch, sources=_with_source(hardware))


def with_host_pass(hardware: Hardware, seconds: float) -> Hardware:
    """Return the profile with another host time per pass (seconds)."""
    quantity = Quantity(value=seconds, source=ASSUMED)
    return msgspec.structs.replace(hardware, host_pass_s=quantity, sources=_with_source(hardware))


def _with_source(hardware: Hardware) -> dict[str, Source]:
    return hardware.sources | {ASSUMED: Source(kind="fitted", text="a value that a fit tries")}


CONSTANTS = {
    c.name: c
    for c in (
        Constant("copy-rate", "GB/s", 1e9, with_copy_rate),
        Constant("attention-factor", "x", 1.0, with_attention_factor),
        Constant("device-memory", "ms/GiB", 1e-3, with_device_memory),
        Constant("host-launch", "us", 1e-6, with_host_launch),
        Constant("host-pass", "ms", 1e-3, with_host_pass),
    )
}


def find_constant(name: str) -> Constant:
    """Return the constant called ``name``.

    Raises:
        UsageError: when there is none.
    """
    if name not in CONSTANTS:
        wanted = ", ".join(CONSTANTS)
        raise UsageError("no such constant", got=repr(name), wanted=wanted, hint=did_you_mean(name, CONSTANTS))
    return CONSTANTS[name]


def fit(
    constant: Constant,
    cases: list[Case],
    chosen: tuple[str, ...],
    *,
    low: float,
    high: float,
    unfitted: float,
    progress: Progress | None = None,
) -> Fit:
    """Return the value in [low, high] (in the constant's unit) with the least error over the ``chosen`` cases.

    Raises:
        UsageError: when a chosen case is not in the file, the range is empty, or ``unfitted`` is not a valid value.
    """
    missing = sorted(set(chosen) - {c.case for c in cases})
    if missing:
        raise UsageError("no such case", got=", ".join(missing), wanted="cases of the file")
    if not 0 < low < high:
        raise UsageError("not a range of values", got=f"{low:g} to {high:g} {constant.unit}")
    used = [c for c in cases if c.case in chosen]
    for cluster in sorted({c.question.cluster for c in used}):
        try:
            constant.change(load_cluster(cluster)[1], unfitted * constant.scale)
        except ValueError as error:
            raise UsageError("not a value to compare with", got=f"{unfitted:g} {constant.unit}", wanted=error) from None
    lengths = sorted({c.question.seq_tokens for c in used})
    total = 1 + (len(lengths) if len(lengths) > 1 else 0)
    value = _best(constant, used, low, high)
    if progress:
        progress(1, total)
    left_out = {}
    for i, length in enumerate(lengths if len(lengths) > 1 else []):
        others = [c for c in used if c.question.seq_tokens != length]
        again = _best(constant, others, low, high)
        held = [c for c in cases if c.question.seq_tokens == length]
        left_out[length] = (again, _report(constant, held, again))
        if progress:
            progress(i + 2, total)
    return Fit(
        constant=constant,
        value=value,
        fitted=_report(constant, cases, value),
        unfitted_value=unfitted,
        unfitted=_report(constant, cases, unfitted),
        left_out=left_out,
    )


def _report(constant: Constant, cases: list[Case], value: float) -> Validation:
    return validate(cases, change=lambda hardware: constant.change(hardware, value * constant.scale))


def _best(constant: Constant, cases: list[Case], low: float, high: float) -> float:
    """Find the value by golden-section search, which assumes that the error has one minimum in the range."""

    def error(value: float) -> float:
        errors = [c.error for c in _report(constant, cases, value).cases]
        both = [e.step_ms if e.mfu is None else e.mfu for e in errors]
        misses = [abs(e) for e in both if e is not None]
        return sum(misses) / len(misses) if misses else float("inf")

    a, b = low, high
    c, d = b - GOLDEN * (b - a), a + GOLDEN * (b - a)
    error_c, error_d = error(c), error(d)
    for _ in range(ITERATIONS):
        if error_c < error_d:
            b, d, error_d = d, c, error_c
            c = b - GOLDEN * (b - a)
            error_c = error(c)
        else:
            a, c, error_c = c, d, error_d
            d = a + GOLDEN * (b - a)
            error_d = error(d)
    return (a + b) / 2
