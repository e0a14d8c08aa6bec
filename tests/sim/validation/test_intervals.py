"""Error intervals: from published rows of the same class and other sources, wider where nothing was measured."""

from __future__ import annotations

from collections import Counter
from math import exp, log
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memo_sim.contract.accuracy import Framework, Setting
from memo_sim.contract.catalog import list_hardware, load_hardware
from memo_sim.contract.plan import Decisions
from memo_sim.contract.validation import CaseError, CasePrediction, CaseReport, Expectation, Validation
from memo_sim.planning.presets import SYSTEMS
from memo_sim.validation.accepted import accept, load_accepted
from memo_sim.validation.cases import list_case_files, load_cases
from memo_sim.validation.intervals import (
    LEVEL,
    PublishedError,
    band,
    bounds,
    classes_held_out,
    errors_document,
    errors_of,
    framework_of,
    held_out,
    load_errors,
    shipped_errors,
    step_interval,
    with_intervals,
    without_interval,
)
from memo_sim.views.accuracy import class_label, rank_correlation
from tests.sim.toy_machine import decide

KERNELS = {"attention": "flash2", "dtype": "bf16"}
SPREAD = (-0.04, -0.03, -0.02, -0.01, 0.0, 0.01, 0.02, 0.03, 0.04)


def setting(
    framework: Framework = "megatron",
    *,
    generation: str = "Ampere",
    tokens: int = 4096,
    devices: int = 8,
    **kernels: str,
) -> Setting:
    return Setting(
        generation=generation,
        framework=framework,
        seq_tokens=tokens,
        devices=devices,
        kernels=KERNELS | kernels,
    )


def errors(*ratios: float, source: str = "a", at: Setting | None = None) -> list[PublishedError]:
    return [PublishedError(f"{source}-{n}", source, at or setting(), ratio) for n, ratio in enumerate(ratios)]


def report(
    name: str, error: float | None, *, source: str = "s", fitted: bool = False, at: Setting | None = None
) -> CaseReport:
    """Return a case predicted at 100 ms and measured so that its error is ``error``."""
    measured = None if error is None else 100.0 / (1 + error)
    return CaseReport(
        case=name,
        source=source,
        system="megatron-lm",
        predicted=CasePrediction(status="ok", step_ms=100.0, setting=at or setting()),
        expected=Expectation(status="ok", step_ms=measured),
        error=CaseError(status=True, step_ms=error),
        fitted=fitted,
    )


def of(source: str, *errors: float, at: Setting | None = None) -> list[CaseReport]:
    return [report(f"{source}-{n}", error, source=source, at=at) for n, error in enumerate(errors)]


class TestBand:
    def test_it_is_the_shortest_range_around_the_prediction_that_holds_four_fifths(self) -> None:
        assert bounds([-0.9, -0.02, -0.01, 0.0, 0.01, 0.02, 0.03, 0.04, 0.05]) == (-0.02, 0.05)
        assert bounds([-0.02, -0.01, 0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.9]) == (-0.02, 0.05)
        assert bounds([n / 100 for n in range(-10, 10)]) == (-0.1, 0.06)  # of several, the lowest
        assert bounds([-0.5, 0.1, 0.1, 0.1, 0.2]) == (-0.5, 0.2)
        assert bounds([1.0, 2.0, 3.0, 4.0]) is None

    @given(st.lists(st.floats(-1, 1), min_size=5, max_size=60))
    def test_it_holds_the_prediction_and_four_fifths_of_all_rows_and_one(self, ratios: list[float]) -> None:
        found = bounds(ratios)
        assert found is not None
        low, high = found
        assert low <= 0 <= high
        inside = sum(low <= ratio <= high for ratio in ratios)
        assert inside >= min(len(ratios), LEVEL * (len(ratios) + 1) - 1e-9)

    def test_only_rows_of_the_same_generation_and_class_count(self) -> None:
        others = [
            *errors(*[0.5] * 9, source="h", at=setting(generation="Hopper")),
            *errors(*[0.5] * 9, source="f", at=setting("torch")),
            *errors(*[0.5] * 9, source="r", at=msgspec.structs.replace(setting(), allocation_retries=True)),
        ]
        found = band(setting(), [*errors(*SPREAD), *others])
        assert found is not None
        assert (found.low, found.high, found.rows, found.sources) == (-0.04, 0.03, 9, 1)
        assert found.beyond == ()

    def test_it_holds_the_prediction_even_when_every_row_was_slower(self) -> None:
        found = band(setting(), errors(*[0.1] * 9))
        assert found is not None
        assert (found.low, found.high) == (0.0, 0.1)

    def test_fewer_than_five_rows_say_why_there_is_none(self) -> None:
        four = errors(*SPREAD[:4])
        assert band(setting(), four) is None
        assert without_interval(setting(), four) == (
            "No interval: 4 published rows of Ampere, megatron class; 5 are needed."
        )

    def test_a_profile_without_a_generation_has_none(self) -> None:
        unnamed = setting(generation="")
        assert band(unnamed, errors(*SPREAD, at=unnamed)) is None
        assert "names no GPU generation" in without_interval(unnamed, [])

    @pytest.mark.parametrize(
        ("asked", "steps", "told"),
        [
            (setting(tokens=4096 * 4), 2, "16k tokens (the longest row has 4k)"),
            (setting(devices=64), 3, "64 devices (the largest row has 8)"),
            (setting(attention="flash3"), 1, "attention flash3 (the rows have flash2)"),
        ],
    )
    def test_it_is_wider_where_nothing_was_measured(self, asked: Setting, steps: int, told: str) -> None:
        found = band(asked, errors(*SPREAD))
        assert found is not None
        assert found.high == pytest.approx(0.03 * (1 + steps))
        assert found.beyond == (told,)

    def test_shorter_sequences_fewer_devices_and_new_knobs_widen_nothing(self) -> None:
        found = band(setting(tokens=128, devices=1, compiled="yes"), errors(*SPREAD))
        assert found is not None
        assert (found.high, found.beyond) == (0.03, ())

    @given(st.lists(st.floats(-1, 1), min_size=5, max_size=40), st.integers(0, 12), st.integers(0, 12))
    def test_more_tokens_or_devices_never_make_it_narrower(
        self, ratios: list[float], tokens: int, devices: int
    ) -> None:
        known = errors(*ratios)
        near = band(setting(tokens=1024 << tokens, devices=1 << devices), known)
        for far in (
            setting(tokens=2048 << tokens, devices=1 << devices),
            setting(tokens=1024 << tokens, devices=2 << devices),
        ):
            wider = band(far, known)
            assert near is not None
            assert wider is not None
            assert wider.low <= near.low <= 0 <= near.high <= wider.high

    def test_a_step_gets_its_interval_in_seconds(self) -> None:
        found = step_interval(10.0, setting(tokens=8192), errors(*SPREAD))
        assert found is not None
        assert (found.low_s, found.high_s) == (
            pytest.approx(10 * exp(-0.08)),
            pytest.approx(10 * exp(0.06)),
        )
        assert (found.rows, found.sources, found.framework, found.generation) == (9, 1, "megatron", "Ampere")
        assert step_interval(None, setting(), errors(*SPREAD)) is None
        assert step_interval(10.0, setting("deepspeed"), errors(*SPREAD)) is None


class TestPublishedRows:
    def test_an_interval_comes_from_other_sources_only(self) -> None:
        cases = with_intervals(Validation(cases=[*of("a", *SPREAD), *of("b", 0.5)])).cases
        wild = cases[-1].interval
        assert wild is not None
        assert (wild.quantity, wild.cases, wild.level) == ("step_ms", 9, LEVEL)
        assert (wild.low, wild.high) == (pytest.approx(100 / 1.04), pytest.approx(100 / 0.97))
        assert cases[0].interval is None  # the other source has one row

    def test_fitted_rows_make_no_interval_but_get_one(self) -> None:
        fitted = report("f", 3.0, source="b", fitted=True)
        cases = with_intervals(Validation(cases=[*of("a", *SPREAD), fitted, report("open", None, source="b")])).cases
        assert errors_of(Validation(cases=[fitted])) == []
        assert [case.interval is not None for case in cases[-2:]] == [True, True]

    def test_shipped_errors_serve_sources_that_are_not_predicted_now(self) -> None:
        shipped = [*errors(*SPREAD, source="old"), *errors(*[9.0] * 9, source="a")]
        (case,) = with_intervals(Validation(cases=of("a", 0.0)), shipped).cases
        assert case.interval is not None
        assert case.interval.high == pytest.approx(100 * exp(0.03))

    @pytest.mark.parametrize("quantity", ["mfu", "tgs"])
    def test_a_longer_step_is_a_lower_mfu(self, quantity: str) -> None:
        predicted = CasePrediction(status="ok", setting=setting(), **{quantity: 0.5})
        asked = CaseReport(
            case="c",
            source="s",
            system="memo",
            predicted=predicted,
            expected=Expectation(**{quantity: 0.4}),
            error=CaseError(**{quantity: 0.25}),
            fitted=False,
        )
        (error,) = errors_of(Validation(cases=[asked]))
        assert error.log_ratio == pytest.approx(log(1.25))  # the step took longer than predicted
        slower = errors(*[0.1 * n for n in range(9)])
        (case,) = with_intervals(Validation(cases=[asked]), slower).cases
        assert case.interval is not None
        assert (case.interval.low, case.interval.high) == (pytest.approx(0.5 * exp(-0.7)), 0.5)


class TestHeldOut:
    def test_sources_that_err_alike_cover_each_other_and_others_do_not(self) -> None:
        (alike,) = held_out(Validation(cases=[*of("a", *SPREAD), *of("b", *SPREAD)]))
        assert (alike.name, alike.sources, alike.known) == ("Ampere, megatron class", 2, 18)
        assert (alike.held_out, alike.rows, alike.inside) == (2, 18, 16)
        assert alike.median_width == pytest.approx(1 / 0.97 - 1 / 1.04)
        assert alike.error == pytest.approx(1 - 1 / 1.04)  # the fifteenth smallest of eighteen
        (apart,) = held_out(Validation(cases=[*of("a", *SPREAD), *of("b", *(e + 0.5 for e in SPREAD))]))
        assert (apart.rows, apart.inside) == (18, 5)  # the rows between the sources' own predictions

    def test_a_class_of_one_source_is_not_tested(self) -> None:
        (alone,) = held_out(Validation(cases=of("a", *SPREAD)))
        assert (alone.sources, alone.known, alone.rows) == (1, 9, 0)
        assert held_out(Validation(cases=of("a", *SPREAD, at=setting(generation="")))) == []

    def test_only_sources_of_the_validation_are_held_out(self) -> None:
        (one,) = held_out(Validation(cases=of("a", *SPREAD)), errors(*SPREAD, source="old"))
        assert (one.held_out, one.rows) == (1, 9)


class TestShipped:
    """The errors that ship with memo; ``memo-sim validate --all --accept`` writes them."""

    def test_they_are_those_of_the_accepted_accuracy(self) -> None:
        cases = {case.case: case for name in list_case_files() for case in load_cases(name)}
        known = {case: error for group in load_accepted().groups.values() for case, error in group.errors.items()}
        found = {error.case: error for error in shipped_errors()}
        assert found.keys() == known.keys()
        for name, error in found.items():
            case = cases[name]
            ratio = log(1 + known[name])
            assert error.log_ratio == pytest.approx(-ratio if case.expected.step_ms else ratio, abs=2e-4)
            assert (error.source, error.setting.seq_tokens) == (case.source, case.question.seq_tokens)

    def test_held_out_they_hold_what_they_promise_and_are_no_wider_than_need_be(self) -> None:
        tested = [test for test in classes_held_out(shipped_errors()) if test.rows]
        assert sum(test.inside for test in tested) / sum(test.rows for test in tested) >= 0.75
        # Of fewer than 30 rows, a share says little.
        for test in (test for test in tested if test.rows >= 30):
            assert test.inside / test.rows >= 0.7, test
            if _fewest_others(test.name) >= 30:
                # Twice, and a tenth for order statistics of few rows. Hopper's torch class has nine rows of shorter
                # sequences and fewer GPUs besides MPT's, so MPT's intervals are wide: 3.2 times on 2026-11-22.
                assert test.median_width <= 2.2 * test.error, test

    def test_every_shipped_gpu_names_its_generation(self) -> None:
        assert {load_hardware(name).generation for name in list_hardware()} == {"Ampere", "Hopper", "Blackwell"}

    def test_they_are_written_as_they_are_read(self, tmp_path: Path) -> None:
        again = errors_document(shipped_errors())
        assert sorted(row for group in again.groups for row in group.rows) == sorted(e.case for e in shipped_errors())
        path = tmp_path / "accuracy.json"
        accept(Validation(cases=of("a", *SPREAD)), path)
        accept(Validation(cases=of("b", *SPREAD)), path)
        read = load_errors(tmp_path / "errors.json")
        assert {error.source for error in read} == {"a", "b"}
        assert read[0].log_ratio == round(-log(1 + SPREAD[0]), 4)


def _fewest_others(name: str) -> int:
    """Return how many rows of a class are left when its largest source is held out."""
    sources = Counter(error.source for error in shipped_errors() if _label(error) == name)
    return sources.total() - max(sources.values())


def _label(error: PublishedError) -> str:
    setting = error.setting
    return class_label(setting.generation, setting.framework, retries=setting.allocation_retries)


def test_planned_memory_is_a_class_of_its_own() -> None:
    decisions = decide(("none", 0.0))
    eager = msgspec.structs.replace(decisions, memory_policy="eager")
    assert isinstance(eager, Decisions)
    assert {framework_of(name, decisions) for name in SYSTEMS} == {"planned"}
    assert framework_of("memo", eager) == framework_of("megatron-lm", eager) == "megatron"
    assert framework_of("deepspeed-ulysses", eager) == "deepspeed"
    assert framework_of("fsdp", eager) == framework_of("any", eager) == "torch"


def test_rank_correlation_depends_on_order_only() -> None:
    assert rank_correlation([(1.0, 1.0), (2.0, 4.0), (3.0, 900.0)]) == pytest.approx(1.0)
    assert rank_correlation([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]) == pytest.approx(-1.0)
    assert rank_correlation([(1.0, 1.0), (1.0, 1.0), (2.0, 2.0), (None, 5.0)]) == pytest.approx(1.0)
    assert rank_correlation([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]) is None
    assert rank_correlation([(1.0, 1.0), (2.0, None)]) is None
