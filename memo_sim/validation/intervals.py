"""Gives each prediction an interval, from the errors on published rows of the same class.

A class is a GPU generation, a class of frameworks, and whether the allocator retries allocations: where it does, the
retries decide the step, and errors are many times as large.

The errors are log(measured step time / predicted step time) of rows on which nothing was fitted; they ship with memo
(``data/errors.json``, written by ``memo-sim validate --all --accept``). An interval of level L is the shortest range
that holds the prediction and L of n + 1 errors, n of which are known:

    n = 9, L = 0.8    x[x x . x x x x x]        eight of nine: the one that is far off is left out
    n = 5            [x x x x x]                where n is small, all of them

This is split-conformal prediction: nothing is fitted to the rows but these two ends. A row's own interval comes from
the rows of other sources only, because rows of one source share their hardware, their software and their error.

The interval is wider where no row was measured. Every doubling of the sequence beyond the longest row, every doubling
of devices beyond the most, and every kernel that no row has counts as one step into the unknown, and adds the whole
interval once more: the errors of such steps may all have the same sign. ``held_out`` tests all of it: each source is
left out, and its rows are counted that lie in the interval from the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, exp, expm1, log, log2
from pathlib import Path

import msgspec

from memo_sim.contract import codec
from memo_sim.contract.accuracy import ErrorGroup, Framework, PublishedErrors, Setting
from memo_sim.contract.catalog import DATA
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions, Prediction, StepInterval
from memo_sim.contract.units import counted, format_tokens
from memo_sim.contract.validation import CaseReport, Interval, Measured, Validation
from memo_sim.planning.presets import SYSTEMS
from memo_sim.views.accuracy import JUDGED, HeldOut, class_label

LEVEL = 0.8
LEAST_CASES = 5
"""With fewer rows there is no interval: they say too little about the spread of errors."""

ROUNDING = 1e-9
"""Slack for a product that is a whole number but for rounding."""

ERRORS = DATA / "errors.json"


@dataclass(frozen=True, slots=True)
class PublishedError:
    """The error of one prediction: ``log_ratio`` is log(measured step time / predicted step time)."""

    case: str
    source: str
    setting: Setting
    log_ratio: float


@dataclass(frozen=True, slots=True)
class Band:
    """An interval as log ratios to the predicted step time, with the rows that it comes from."""

    low: float
    high: float
    rows: int
    sources: int
    beyond: tuple[str, ...]


def framework_of(system: str, decisions: Decisions) -> Framework:
    """Return the class of framework that runs a plan of ``system``; unknown systems count as plain PyTorch."""
    if decisions.memory_policy == "planned":
        return "planned"
    return SYSTEMS[system].framework if system in SYSTEMS else "torch"


def setting_of(system: str, decisions: Decisions, hardware: Hardware, prediction: Prediction) -> Setting:
    """Return what decides which published rows have errors like those of a plan's prediction."""
    kernels = {
        name: value for name, value in msgspec.structs.asdict(decisions.kernels).items() if isinstance(value, str)
    }
    return Setting(
        generation=hardware.generation,
        framework=framework_of(system, decisions),
        allocation_retries=prediction.allocation_retries > 0,
        seq_tokens=decisions.seq_tokens,
        devices=decisions.layout.devices,
        kernels={**kernels, "dtype": decisions.dtype},
    )


def load_errors(path: Path) -> tuple[PublishedError, ...]:
    """Return the errors in a ``memo.errors/1`` file.

    Raises:
        BadInput: when the file cannot be read.
    """
    return tuple(_flat(codec.read(path, PublishedErrors)))


@cache
def shipped_errors() -> tuple[PublishedError, ...]:
    """Return the errors that ship with memo, read once."""
    return load_errors(ERRORS)


def _flat(document: PublishedErrors) -> Iterable[PublishedError]:
    for group in document.groups:
        for case, (tokens, devices, ratio) in group.rows.items():
            setting = Setting(
                generation=group.generation,
                framework=group.framework,
                allocation_retries=group.allocation_retries,
                seq_tokens=int(tokens),
                devices=int(devices),
                kernels=group.kernels,
            )
            yield PublishedError(case, group.source, setting, ratio)


def errors_of(validation: Validation) -> list[PublishedError]:
    """Return the errors of a validation's rows that were predicted, measured and not fitted."""
    return [
        PublishedError(case.case, case.source, case.predicted.setting, ratio)
        for case in validation.cases
        if case.predicted.setting is not None and (ratio := log_ratio(case)) is not None
    ]


def errors_document(errors: Iterable[PublishedError]) -> PublishedErrors:
    """Return the errors as the document that ships, in a fixed order."""
    groups: dict[tuple[str, ...], ErrorGroup] = {}
    for error in sorted(errors, key=lambda e: (e.source, e.case)):
        setting = error.setting
        kernels = sorted(setting.kernels.items())
        key = (error.source, *map(str, _class_of(setting)), *(word for pair in kernels for word in pair))
        group = groups.setdefault(
            key,
            ErrorGroup(
                source=error.source,
                generation=setting.generation,
                framework=setting.framework,
                allocation_retries=setting.allocation_retries,
                kernels=dict(kernels),
                rows={},
            ),
        )
        group.rows[error.case] = [setting.seq_tokens, setting.devices, round(error.log_ratio, 4)]
    return PublishedErrors(groups=[groups[key] for key in sorted(groups)])


def judged(report: CaseReport) -> Measured | None:
    """Return the speed quantity that is both predicted and measured; None where there is none."""
    return next((q for q in JUDGED if getattr(report.error, q) is not None), None)


def log_ratio(report: CaseReport) -> float | None:
    """Return log(measured / predicted) of the step time; None for a fitted case or one without a measured speed."""
    quantity = judged(report)
    if quantity is None or report.fitted:
        return None
    ratio = log(1 + getattr(report.error, quantity))
    return -ratio if quantity == "step_ms" else ratio


def bounds(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return the shortest range around 0 that holds ``LEVEL`` of n + 1 cases; None for fewer than ``LEAST_CASES``.

    Of equally short ranges it is the lowest.
    """
    if len(ratios) < LEAST_CASES:
        return None
    ordered = sorted(ratios)
    held = min(len(ordered), ceil(LEVEL * (len(ordered) + 1) - ROUNDING))
    ends = [(min(0.0, low), max(0.0, high)) for low, high in zip(ordered, ordered[held - 1 :], strict=False)]
    return min(ends, key=lambda end: (end[1] - end[0], end[0]))


def band(setting: Setting, errors: Iterable[PublishedError]) -> Band | None:
    """Return the interval of a prediction from those ``errors`` that have its class; None where they are too few."""
    alike = _of_class(setting, errors)
    between = bounds([error.log_ratio for error in alike])
    if between is None:
        return None
    steps, beyond = _beyond(setting, alike)
    return Band(
        low=between[0] * (1 + steps),
        high=between[1] * (1 + steps),
        rows=len(alike),
        sources=len({error.source for error in alike}),
        beyond=beyond,
    )


def _of_class(setting: Setting, errors: Iterable[PublishedError]) -> list[PublishedError]:
    """Return the errors of the same class; none where the generation is not known."""
    asked = _class_of(setting)
    return [e for e in errors if setting.generation and _class_of(e.setting) == asked]


def _class_of(setting: Setting) -> tuple[str, Framework, bool]:
    return setting.generation, setting.framework, setting.allocation_retries


def _beyond(setting: Setting, alike: Sequence[PublishedError]) -> tuple[float, tuple[str, ...]]:
    """Return how many steps lie between a setting and the measured ones, and what they are."""
    steps, told = 0.0, []
    longest = max(e.setting.seq_tokens for e in alike)
    if setting.seq_tokens > longest:
        steps += log2(setting.seq_tokens / longest)
        told.append(f"{format_tokens(setting.seq_tokens)} tokens (the longest row has {format_tokens(longest)})")
    most = max(e.setting.devices for e in alike)
    if setting.devices > most:
        steps += log2(setting.devices / most)
        told.append(f"{setting.devices} devices (the largest row has {most})")
    for name, kernel in sorted(setting.kernels.items()):
        measured = {e.setting.kernels[name] for e in alike if name in e.setting.kernels}
        if measured and kernel not in measured:
            steps += 1
            told.append(f"{name} {kernel} (the rows have {', '.join(sorted(measured))})")
    return steps, tuple(told)


def step_interval(step_s: float | None, setting: Setting, errors: Sequence[PublishedError]) -> StepInterval | None:
    """Return the interval of a predicted step; None where there is no step, or too few published rows of its class."""
    found = band(setting, errors)
    if found is None or step_s is None:
        return None
    return StepInterval(
        low_s=step_s * exp(found.low),
        high_s=step_s * exp(found.high),
        level=LEVEL,
        rows=found.rows,
        sources=found.sources,
        generation=setting.generation,
        framework=setting.framework,
        allocation_retries=setting.allocation_retries,
        beyond=list(found.beyond),
    )


def without_interval(setting: Setting, errors: Sequence[PublishedError]) -> str:
    """Say why a prediction has no interval."""
    if not setting.generation:
        return "No interval: the hardware profile names no GPU generation, so no published row is known to be alike."
    rows = counted(len(_of_class(setting, errors)), "published row")
    name = class_label(setting.generation, setting.framework, retries=setting.allocation_retries)
    return f"No interval: {rows} of {name}; {LEAST_CASES} are needed."


def with_intervals(validation: Validation, shipped: Sequence[PublishedError] = ()) -> Validation:
    """Return the validation with an interval for each prediction of speed.

    It comes from the rows of other sources: the validation's own, and ``shipped`` for sources that it lacks.
    """
    errors = _known(validation, shipped)
    return Validation(cases=[_with_interval(case, errors) for case in validation.cases])


def _known(validation: Validation, shipped: Sequence[PublishedError]) -> list[PublishedError]:
    """Return the errors of a validation, and the shipped ones of sources that it has no row of."""
    mine = {case.source for case in validation.cases}
    return [*errors_of(validation), *(error for error in shipped if error.source not in mine)]


def _with_interval(case: CaseReport, errors: Sequence[PublishedError]) -> CaseReport:
    quantity = judged(case) or next((q for q in JUDGED if getattr(case.predicted, q) is not None), None)
    setting = case.predicted.setting
    found = None if setting is None else band(setting, (e for e in errors if e.source != case.source))
    if found is None or quantity is None:
        return case
    predicted = getattr(case.predicted, quantity)
    # A longer step is a lower MFU.
    low, high = (found.low, found.high) if quantity == "step_ms" else (-found.high, -found.low)
    interval = Interval(
        quantity=quantity,
        low=predicted * exp(low),
        high=predicted * exp(high),
        level=LEVEL,
        cases=found.rows,
        beyond=list(found.beyond),
    )
    return msgspec.structs.replace(case, interval=interval)


def held_out(validation: Validation, shipped: Sequence[PublishedError] = ()) -> list[HeldOut]:
    """Return by class how many rows lie in the intervals that were made without their source.

    Only sources of the validation are held out; ``shipped`` are the errors of other sources. A source is not held out
    where the others have fewer than ``LEAST_CASES`` rows of the class.
    """
    return classes_held_out(_known(validation, shipped), {case.source for case in validation.cases})


def classes_held_out(errors: Sequence[PublishedError], sources: Collection[str] | None = None) -> list[HeldOut]:
    """Return the test of each class's intervals; only ``sources`` are held out (None: all)."""
    mine = {error.source for error in errors} if sources is None else set(sources)
    classes = sorted({_class_of(e.setting) for e in errors if e.source in mine})
    return [_held_out(name, errors, mine) for name in classes if name[0]]


def _held_out(name: tuple[str, Framework, bool], errors: Sequence[PublishedError], mine: set[str]) -> HeldOut:
    alike = [e for e in errors if _class_of(e.setting) == name]
    tested: list[tuple[PublishedError, Band]] = []
    for source in sorted({e.source for e in alike} & mine):
        others = [e for e in alike if e.source != source]
        bands = ((e, band(e.setting, others)) for e in alike if e.source == source)
        tested += [(e, found) for e, found in bands if found is not None]
    return HeldOut(
        name=class_label(name[0], name[1], retries=name[2]),
        sources=len({e.source for e in alike}),
        known=len(alike),
        held_out=len({e.source for e, _ in tested}),
        rows=len(tested),
        inside=sum(found.low <= e.log_ratio <= found.high for e, found in tested),
        median_width=_quantile([exp(found.high) - exp(found.low) for _, found in tested], 0.5),
        error=_quantile([abs(expm1(e.log_ratio)) for e, _ in tested], LEVEL),
    )


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that ``share`` of the values do not exceed; 0 where there is none."""
    ordered = sorted(values)
    return ordered[max(1, ceil(share * len(ordered) - ROUNDING)) - 1] if ordered else 0.0


def by_source_and_system(validation: Validation) -> dict[str, list[CaseReport]]:
    """Return the cases by ``<source>/<system>``."""
    groups: dict[str, list[CaseReport]] = {}
    for case in validation.cases:
        groups.setdefault(f"{case.source}/{case.system}", []).append(case)
    return groups
