"""Fits the one constant that MEMO's tables may fit: the rate a device copies at while its whole node copies.

Everything else in a profile stays as sourced. The rate is chosen so that the mean absolute relative MFU error of the
named cases is least; beside it stand the errors with an unfitted rate, and with the rate fitted again while one
length's cases are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from memo_sim.cases import Case
from memo_sim.contract.errors import UsageError
from memo_sim.contract.hardware import CopyRates, Hardware
from memo_sim.contract.validation import Validation
from memo_sim.validate import validate

Progress = Callable[[int, int], None]
GOLDEN = 0.6180339887498949
ITERATIONS = 12


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted rate (bytes/s) and the reports that judge it."""

    rate: float
    fitted: Validation
    unfitted_rate: float
    unfitted: Validation
    left_out: dict[int, tuple[float, Validation]]
    """By length (tokens): the rate fitted without that length's cases, and the report of just those."""


def with_copy_rate(hardware: Hardware, rate: float) -> Hardware:
    """Return the profile with another all-devices copy rate, both directions (bytes/s)."""

    def changed(rates: CopyRates) -> CopyRates:
        return msgspec.structs.replace(rates, all_devices=msgspec.structs.replace(rates.all_devices, value=rate))

    return msgspec.structs.replace(hardware, d2h=changed(hardware.d2h), h2d=changed(hardware.h2d))


def fit_copy_rate(
    cases: list[Case],
    chosen: tuple[str, ...],
    low: float,
    high: float,
    unfitted: float,
    *,
    progress: Progress | None = None,
) -> Fit:
    """Return the rate in [low, high] (bytes/s) that suits the ``chosen`` cases best.

    Raises:
        UsageError: when a chosen case is not in the file, or the range is empty.
    """
    missing = sorted(set(chosen) - {c.case for c in cases})
    if missing:
        raise UsageError("no such case", got=", ".join(missing), wanted="cases of the file")
    if not 0 < low < high:
        raise UsageError("not a range of rates", got=f"{low / 1e9} to {high / 1e9} GB/s")
    used = [c for c in cases if c.case in chosen]
    lengths = sorted({c.question.seq_tokens for c in used})
    total = 1 + (len(lengths) if len(lengths) > 1 else 0)
    rate = _best_rate(used, low, high)
    if progress:
        progress(1, total)
    left_out = {}
    for i, length in enumerate(lengths if len(lengths) > 1 else []):
        others = [c for c in used if c.question.seq_tokens != length]
        again = _best_rate(others, low, high)
        held = [c for c in cases if c.question.seq_tokens == length]
        left_out[length] = (again, _report(held, again))
        if progress:
            progress(i + 2, total)
    return Fit(
        rate=rate,
        fitted=_report(cases, rate),
        unfitted_rate=unfitted,
        unfitted=_report(cases, unfitted),
        left_out=left_out,
    )


def _report(cases: list[Case], rate: float) -> Validation:
    return validate(cases, change=lambda hardware: with_copy_rate(hardware, rate))


def _best_rate(cases: list[Case], low: float, high: float) -> float:
    """Golden-section search: the error falls towards the right rate from both sides."""

    def error(rate: float) -> float:
        misses = [abs(c.error.mfu) for c in _report(cases, rate).cases if c.error.mfu is not None]
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
