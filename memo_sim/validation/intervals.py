"""Gives each prediction an interval, from the errors on published rows of the same class and of other sources.

A class is a GPU generation, a class of frameworks, and whether the allocator retries allocations: where it does, the
retries decide the step, and errors are many times as large.

The errors are log(measured step time / predicted step time) of rows on which nothing was fitted; they ship with memo
(``data/errors.json``, written by ``memo-sim validate --all --accept``). Rows of one source share their hardware, their
software and their error, so sources count, not rows. An interval is the prediction times exp(-half) to exp(+half):

    half = factor x spread x sqrt(1 + steps)

``spread`` is the class's: the typical error that 80 % of a source's rows stay below. It is the geometric mean over the
class's sources and one more that has the mean of all classes. So a class of one or two sources borrows from the others,
and a class of many does not. A source of n rows weighs n / (n + 1).

``steps`` is how far the plan lies outside what was measured: a step is a doubling of the sequence beyond the longest
row of the class, a doubling of devices beyond the most, or a kernel that no row has. The errors of steps are taken as
independent and as large as the spread, so their variances add.

``factor`` is what makes 80 % of new sources' rows lie inside. Each source is left out in turn, spread and steps are
taken from the others, and its rows are scored by |error| / (spread x sqrt(1 + steps)). The factor is the 80 % quantile
of all scores, where every source has the same weight. A future source counts as one more, with an infinite score. This
needs four sources.

This is conformal prediction for data in groups (R. F. Barber et al., "Conformal prediction beyond exchangeability",
2023, section 3: weighted quantiles; R. Dunn, L. Wasserman, A. Ramdas, "Distribution-free prediction sets for two-layer
hierarchical models", 2023, and Y. Lee, R. F. Barber, R. Willett, "Distribution-free inference with hierarchical data",
2023: each group weighs the same, and the new group's weight lies at infinity), with scores divided by a local spread
(J. Lei et al., "Distribution-free predictive inference for regression", 2018, section 5.2). Like a jackknife, it
scores a source by the spread of one source less than an interval has. The spread is the posterior mean of a normal
model of the sources' log spreads, where the prior is worth one source: the variance between classes is taken to be that
between sources of a class. n / (n + 1) says that one row's log error varies as much again.

``held_out`` tests all of it: each source is left out, and its rows are counted that lie in the interval from the
others. The share that is promised is the mean over sources, each of the same weight; that of all rows together is the
share of the sources with the most rows.

``ErrorSpread.margin`` says how far the ratio of two plans' predictions may be off. It has the same spread and steps;
its factor comes from the differences of errors of two rows of one source that ask the same question.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import combinations
from math import ceil, exp, expm1, hypot, inf, log, log2, sqrt
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
"""With fewer rows of its class a prediction has no interval: they say too little about the spread of errors."""
LEAST_SOURCES = 4
"""With fewer sources, the future source has more than a fifth of the weight."""
PRIOR_SOURCES = 1.0
"""How many sources of a class the mean of all classes is worth."""
PRIOR_ROWS = 1.0
"""How many rows of a source vary as much as sources of a class do."""
LEAST_SPREAD = 1e-3
"""Published figures have three digits; a smaller error says nothing."""

ROUNDING = 1e-9
"""Slack for a product that is a whole number but for rounding."""

ALL = "all classes"
DIFFERENCES = "two plans of one question"
"""Names of the tests over all classes, of the intervals and of the margins."""

ERRORS = DATA / "errors.json"


@dataclass(frozen=True, slots=True)
class PublishedError:
    """The error of one prediction: ``log_ratio`` is log(measured step time / predicted step time)."""

    case: str
    source: str
    setting: Setting
    log_ratio: float
    question: str = ""
    """What rows share that differ in their plan alone; empty where it is not known."""


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
    if decisions.documents is not None:
        kernels["attention"] += " over packed documents"
    return Setting(
        generation="" if hardware.rough else hardware.generation,  # no published row ran on rates of a data sheet
        framework=framework_of(system, decisions),
        allocation_retries=prediction.allocation_retries > 0,
        seq_tokens=decisions.seq_tokens,
        devices=decisions.layout.devices,
        kernels={
            **kernels,
            "dtype": decisions.dtype + (f" with FP8 ({decisions.fp8})" * (decisions.fp8 != "none")),
            **({"training": "adapters"} if decisions.lora else {}),
        },
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
            yield PublishedError(case, group.source, setting, ratio, group.questions.get(case, ""))


def errors_of(validation: Validation) -> list[PublishedError]:
    """Return the errors of a validation's rows that were predicted, measured and not fitted."""
    return [
        PublishedError(case.case, case.source, case.predicted.setting, ratio, case.question)
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
        if error.question:
            group.questions[error.case] = error.question
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


Class = tuple[str, Framework, bool]
"""GPU generation, class of frameworks, allocation retries."""


def _class_of(setting: Setting) -> Class:
    return setting.generation, setting.framework, setting.allocation_retries


ALL_WEIGHTS = "all weights"
"""What every published row trains."""


class _Reach:
    """What the rows of one class cover: the longest sequence, the most devices, the kernels."""

    def __init__(self, settings: Iterable[Setting]) -> None:
        known = list(settings)
        self.longest = max(s.seq_tokens for s in known)
        self.most = max(s.devices for s in known)
        self.kernels: dict[str, set[str]] = {"training": {ALL_WEIGHTS}}
        for setting in known:
            for name, kernel in setting.kernels.items():
                self.kernels.setdefault(name, set()).add(kernel)

    def beyond(self, setting: Setting) -> tuple[float, tuple[str, ...]]:
        """Return how many steps lie between a setting and the rows, and what they are."""
        steps, told = 0.0, []
        if setting.seq_tokens > self.longest:
            steps += log2(setting.seq_tokens / self.longest)
            shown = format_tokens(self.longest)
            told.append(f"{format_tokens(setting.seq_tokens)} tokens (the longest row has {shown})")
        if setting.devices > self.most:
            steps += log2(setting.devices / self.most)
            told.append(f"{setting.devices} devices (the largest row has {self.most})")
        for name, kernel in sorted(setting.kernels.items()):
            measured = self.kernels.get(name)
            if measured and kernel not in measured:
                steps += 1
                told.append(f"{name} {kernel} (the rows have {', '.join(sorted(measured))})")
        return steps, tuple(told)


class _Spreads:
    """The typical error of a source, by class, drawn towards the mean of all classes (log errors)."""

    def __init__(self, errors: Iterable[PublishedError]) -> None:
        rows: dict[tuple[str, Class], list[float]] = {}
        for error in errors:
            rows.setdefault((error.source, _class_of(error.setting)), []).append(abs(error.log_ratio))
        weighed = {
            key: (len(known) / (len(known) + PRIOR_ROWS), log(max(LEAST_SPREAD, _quantile(known, LEVEL))))
            for key, known in rows.items()
        }
        self._all = _mean(weighed.values())
        classes = {name for _, name in weighed}
        prior = (PRIOR_SOURCES, self._all)
        self._by_class = {
            name: _mean([prior, *(each for (_, own), each in weighed.items() if own == name)]) for name in classes
        }

    def of(self, name: Class) -> float:
        """Return the spread of a class; that of all classes for one without rows."""
        return exp(self._by_class.get(name, self._all))


def _mean(weighed: Iterable[tuple[float, float]]) -> float:
    """Return the mean of (weight, value) pairs; 0 where there is none."""
    pairs = list(weighed)
    total = sum(weight for weight, _ in pairs)
    return sum(weight * value for weight, value in pairs) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Margin:
    """How far the ratio of two predictions may be off, as a log ratio, with the pairs of rows that it comes from."""

    half: float
    pairs: int
    sources: int


class ErrorSpread:
    """The errors on published rows, and the intervals and margins that follow from them (see the module)."""

    def __init__(self, errors: Iterable[PublishedError]) -> None:
        self.errors = tuple(error for error in errors if error.setting.generation)
        self.sources = sorted({error.source for error in self.errors})
        self.differences = tuple(_differences(self.errors))
        self._without: dict[str, ErrorSpread] = {}
        by_class: dict[Class, list[PublishedError]] = {}
        for error in self.errors:
            by_class.setdefault(_class_of(error.setting), []).append(error)
        self._by_class = by_class
        self._reach = {name: _Reach(e.setting for e in rows) for name, rows in by_class.items()}
        self._spreads = _Spreads(self.errors)

    def without(self, source: str) -> ErrorSpread:
        """Return the same with one source left out."""
        if source not in self.sources:
            return self
        if source not in self._without:
            self._without[source] = ErrorSpread(error for error in self.errors if error.source != source)
        return self._without[source]

    def alike(self, setting: Setting) -> list[PublishedError]:
        """Return the rows of a setting's class; none where its generation is not known."""
        return self._by_class.get(_class_of(setting), [])

    @cached_property
    def factor(self) -> float:
        """80 % of a new source's errors are expected below this multiple of ``width``; infinite for few sources."""
        return self._factor(self.errors)

    @cached_property
    def difference_factor(self) -> float:
        """The same for the differences of two plans' errors."""
        return self._factor(self.differences)

    def width(self, setting: Setting) -> float:
        """Return the spread of a setting's class, wider where nothing was measured."""
        return self._spreads.of(_class_of(setting)) * sqrt(1 + self._beyond(setting)[0])

    def _beyond(self, setting: Setting) -> tuple[float, tuple[str, ...]]:
        reach = self._reach.get(_class_of(setting))
        return reach.beyond(setting) if reach else (0.0, ())

    def _factor(self, known: Sequence[PublishedError]) -> float:
        """Return the quantile of the scores: each source has weight 1, one more source lies at infinity."""
        by_source: dict[str, list[PublishedError]] = {}
        for error in known:
            by_source.setdefault(error.source, []).append(error)
        scores = []
        for source, rows in by_source.items():
            others = self.without(source)
            scores += [(abs(e.log_ratio) / others.width(e.setting), 1 / len(rows)) for e in rows]
        left = LEVEL * (len(by_source) + 1) - ROUNDING
        for score, weight in sorted(scores):
            left -= weight
            if left <= 0:
                return score
        return inf

    def band(self, setting: Setting) -> Band | None:
        """Return the interval of a prediction; None where rows of its class, or sources, are too few."""
        alike = self.alike(setting)
        if len(alike) < LEAST_CASES or self.factor == inf:
            return None
        half = self.factor * self.width(setting)
        return Band(
            low=-half,
            high=half,
            rows=len(alike),
            sources=len({error.source for error in alike}),
            beyond=self._beyond(setting)[1],
        )

    def margin(self, mine: Setting, theirs: Setting) -> Margin | None:
        """Return how far the ratio of two plans' predictions may be off; None where that is not known.

        Plans of different classes share no error: their intervals are taken as independent.
        """
        if _class_of(mine) != _class_of(theirs):
            one, other = self.band(mine), self.band(theirs)
            return Margin(hypot(one.high, other.high), 0, 0) if one and other else None
        if self.difference_factor == inf:
            return None
        half = self.difference_factor * max(self.width(mine), self.width(theirs))
        return Margin(half, len(self.differences), len({pair.source for pair in self.differences}))


def _differences(errors: Iterable[PublishedError]) -> Iterable[PublishedError]:
    """Yield the difference of the errors of two rows of one source and class that ask the same question."""
    asked: dict[tuple[str, str, Class], list[PublishedError]] = {}
    for error in errors:
        if error.question:
            asked.setdefault((error.source, error.question, _class_of(error.setting)), []).append(error)
    for rows in asked.values():
        for one, other in combinations(rows, 2):
            apart = one.log_ratio - other.log_ratio
            yield PublishedError(f"{one.case}, {other.case}", one.source, one.setting, apart, one.question)


@cache
def shipped_spread() -> ErrorSpread:
    """Return the spread of the errors that ship with memo."""
    return ErrorSpread(shipped_errors())


def step_interval(step_s: float | None, setting: Setting, spread: ErrorSpread) -> StepInterval | None:
    """Return the interval of a predicted step; None where there is no step, or too few published rows of its class."""
    found = spread.band(setting)
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


def without_interval(setting: Setting, spread: ErrorSpread) -> str:
    """Return why a prediction has no interval, without a full stop."""
    if not setting.generation:
        return "the hardware profile names no GPU generation or is rough, so no published row is known to be alike"
    known = len(spread.alike(setting))
    if known >= LEAST_CASES:
        sources = counted(len(spread.sources), "source")
        return f"published rows of {sources}; {LEAST_SOURCES} are needed"
    rows = counted(known, "published row")
    name = class_label(setting.generation, setting.framework, retries=setting.allocation_retries)
    return f"{rows} of {name}; {LEAST_CASES} are needed"


def with_intervals(validation: Validation, shipped: Sequence[PublishedError] = ()) -> Validation:
    """Return the validation with an interval for each prediction of speed.

    It comes from the rows of other sources: the validation's own, and ``shipped`` for sources that it lacks.
    """
    spread = ErrorSpread(_known(validation, shipped))
    return Validation(cases=[_with_interval(case, spread.without(case.source)) for case in validation.cases])


def _known(validation: Validation, shipped: Sequence[PublishedError]) -> list[PublishedError]:
    """Return the errors of a validation, and the shipped ones of sources that it has no row of."""
    mine = {case.source for case in validation.cases}
    return [*errors_of(validation), *(error for error in shipped if error.source not in mine)]


def _with_interval(case: CaseReport, spread: ErrorSpread) -> CaseReport:
    quantity = judged(case) or next((q for q in JUDGED if getattr(case.predicted, q) is not None), None)
    setting = case.predicted.setting
    found = None if setting is None else spread.band(setting)
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
    where the others are too few for an interval.
    """
    return classes_held_out(_known(validation, shipped), {case.source for case in validation.cases})


def classes_held_out(errors: Iterable[PublishedError], sources: Collection[str] | None = None) -> list[HeldOut]:
    """Return the test of each class's intervals, of all classes together, and of the margins between two plans.

    Only ``sources`` are held out (None: all).
    """
    spread = ErrorSpread(errors)
    mine = set(spread.sources if sources is None else sources)
    tested: dict[Class, _Tested] = {}
    for error in spread.errors:
        # Every source of a class is listed, whether its rows can be tested or not.
        tested.setdefault(_class_of(error.setting), _Tested()).known.append(error)
    for error in (e for e in spread.errors if e.source in mine):
        if found := spread.without(error.source).band(error.setting):
            tested[_class_of(error.setting)].rows.append((error, found.high))
    tested = {name: test for name, test in sorted(tested.items()) if any(e.source in mine for e in test.known)}
    results = [test.result(class_label(name[0], name[1], retries=name[2])) for name, test in tested.items()]
    if sum(bool(test.rows) for test in tested.values()) > 1:
        both = _Tested()
        for test in tested.values():
            both.known += test.known
            both.rows += test.rows
        results.append(both.result(ALL))
    pairs = _Tested(known=list(spread.differences))
    for pair in (p for p in spread.differences if p.source in mine):
        if margin := spread.without(pair.source).margin(pair.setting, pair.setting):
            pairs.rows.append((pair, margin.half))
    return [*results, pairs.result(DIFFERENCES)] if pairs.rows else results


@dataclass
class _Tested:
    """Rows of one class, and those of them that were held out with half the width of their interval."""

    known: list[PublishedError] = field(default_factory=list)
    rows: list[tuple[PublishedError, float]] = field(default_factory=list)

    def result(self, name: str) -> HeldOut:
        inside: dict[str, list[bool]] = {}
        for error, half in self.rows:
            inside.setdefault(error.source, []).append(abs(error.log_ratio) <= half)
        shares = [sum(each) / len(each) for each in inside.values()]
        return HeldOut(
            name=name,
            sources=len({e.source for e in self.known}),
            known=len(self.known),
            held_out=len(inside),
            rows=len(self.rows),
            inside=sum(map(sum, inside.values())),
            by_source=sum(shares) / len(shares) if shares else 0.0,
            median_width=_quantile([exp(half) - exp(-half) for _, half in self.rows], 0.5),
            error=_quantile([abs(expm1(e.log_ratio)) for e, _ in self.rows], LEVEL),
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
