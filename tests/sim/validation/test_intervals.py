"""Error intervals: from published rows of the same class and other sources, wider where nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memo_sim.contract.accuracy import Framework, Setting
from memo_sim.contract.catalog import list_hardware, load_hardware, load_model
from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.contract.validation import CaseError, CasePrediction, CaseReport, Expectation, Validation
from memo_sim.planning.presets import SYSTEMS
from memo_sim.validation.accepted import accept, load_accepted
from memo_sim.validation.cases import list_case_files, load_cases
from memo_sim.validation.intervals import (
    LEVEL,
    ErrorSpread,
    PublishedError,
    classes_held_out,
    errors_document,
    errors_of,
    framework_of,
    held_out,
    load_errors,
    setting_of,
    shipped_errors,
    shipped_spread,
    step_interval,
    with_intervals,
    without_interval,
)
from memo_sim.views.accuracy import class_label, rank_correlation
from tests.sim.toy_machine import decide

KERNELS = {"attention": "flash2", "dtype": "bf16"}
WIDEST = 3.5
"""The largest width of a class, by the 80 % error of its rows held out; 2 is a perfect interval round a prediction."""
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


def spread(*groups: Sequence[float], at: Setting | None = None) -> ErrorSpread:
    """Return the errors of sources a, b, c ... in one class."""
    named = zip("abcdefghijkl", groups, strict=False)
    return ErrorSpread(error for name, ratios in named for error in errors(*ratios, source=name, at=at))


def even(half: float = 0.04, sources: int = 5) -> ErrorSpread:
    """Return sources whose rows all err by ``half``, so that spread and interval are ``half`` too."""
    return spread(*[[half, -half]] * sources)


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
    def test_sources_that_err_alike_give_the_error_that_they_have(self) -> None:
        found = even().band(setting())
        assert found is not None
        assert (found.low, found.high) == (pytest.approx(-0.04), pytest.approx(0.04))
        assert (found.rows, found.sources, found.beyond) == (10, 5, ())

    def test_only_rows_of_the_same_generation_and_class_make_its_spread(self) -> None:
        known = even()
        others = [
            *errors(*[0.5] * 9, source="h", at=setting(generation="Hopper")),
            *errors(*[0.5] * 9, source="f", at=setting("torch")),
            *errors(*[0.5] * 9, source="r", at=msgspec.structs.replace(setting(), allocation_retries=True)),
        ]
        mixed = ErrorSpread([*known.errors, *others])
        found = mixed.band(setting())
        assert found is not None
        assert (found.rows, found.sources) == (10, 5)
        assert known.width(setting()) < mixed.width(setting()) < 1.6 * known.width(setting())
        assert mixed.width(setting("torch")) > 4 * known.width(setting())

    def test_a_class_of_one_source_borrows_from_the_others_and_a_class_of_many_does_not(self) -> None:
        far = [e for name in "vwxyz" for e in errors(*[0.4] * 9, source=name, at=setting("torch"))]
        few, many = (ErrorSpread([*spread(*[[0.01] * 9] * n).errors, *far]) for n in (1, 8))
        assert few.width(setting()) > 3 * 0.01
        assert many.width(setting()) < 1.5 * 0.01

    def test_a_source_of_many_rows_weighs_no_more_than_one_of_few(self) -> None:
        few = spread([0.1] * 9, *[[0.01] * 9] * 4)
        many = spread([0.1] * 900, *[[0.01] * 9] * 4)
        assert many.band(setting()).high == pytest.approx(few.band(setting()).high, rel=0.1)  # type: ignore[union-attr]

    def test_of_one_source_that_is_far_off_the_interval_knows(self) -> None:
        """Of five sources and a future one, four fifths need all five; of ten and a future one, nine."""
        wild = spread(*[[0.01, -0.01]] * 4, [0.5, 0.5]).band(setting())
        tame = spread(*[[0.01, -0.01]] * 9, [0.5, 0.5]).band(setting())
        assert wild is not None
        assert tame is not None
        assert wild.high > 0.3
        assert tame.high < 0.1

    def test_fewer_than_five_rows_say_why_there_is_none(self) -> None:
        few = ErrorSpread([*even().errors, *errors(0.1, 0.1, 0.1, 0.1, source="h", at=setting("torch"))])
        assert few.band(setting("torch")) is None
        assert without_interval(setting("torch"), few) == ("4 published rows of Ampere, torch class; 5 are needed")

    def test_fewer_than_four_sources_say_why_there_is_none(self) -> None:
        few = even(sources=3)
        assert few.band(setting()) is None
        assert without_interval(setting(), few) == "published rows of 3 sources; 4 are needed"
        assert even(sources=4).band(setting()) is not None

    def test_a_profile_without_a_generation_has_none(self) -> None:
        unnamed = setting(generation="")
        known = spread(*[SPREAD] * 5, at=unnamed)
        assert known.band(unnamed) is None
        assert "names no GPU generation" in without_interval(unnamed, known)

    @pytest.mark.parametrize(
        ("asked", "steps", "told"),
        [
            (setting(tokens=4096 * 4), 2, "16k tokens (the longest row has 4k)"),
            (setting(devices=64), 3, "64 devices (the largest row has 8)"),
            (setting(attention="flash3"), 1, "attention flash3 (the rows have flash2)"),
        ],
    )
    def test_it_is_wider_where_nothing_was_measured(self, asked: Setting, steps: int, told: str) -> None:
        found = even().band(asked)
        assert found is not None
        assert found.high == pytest.approx(0.04 * (1 + steps) ** 0.5)
        assert found.beyond == (told,)

    def test_shorter_sequences_fewer_devices_and_new_knobs_widen_nothing(self) -> None:
        found = even().band(setting(tokens=128, devices=1, compiled="yes"))
        assert found is not None
        assert (found.high, found.beyond) == (pytest.approx(0.04), ())

    @given(
        st.lists(st.lists(st.floats(-1, 1), min_size=2, max_size=8), min_size=4, max_size=6),
        st.integers(0, 12),
        st.integers(0, 12),
    )
    def test_more_tokens_or_devices_never_make_it_narrower(
        self, ratios: list[list[float]], tokens: int, devices: int
    ) -> None:
        known = spread(*ratios)
        near = known.band(setting(tokens=1024 << tokens, devices=1 << devices))
        for far in (
            setting(tokens=2048 << tokens, devices=1 << devices),
            setting(tokens=1024 << tokens, devices=2 << devices),
        ):
            wider = known.band(far)
            assert near is not None
            assert wider is not None
            assert wider.low <= near.low <= 0 <= near.high <= wider.high

    @pytest.mark.parametrize("sources", [6, 12, 24])
    @pytest.mark.parametrize("alike", [0.0, 1.0])
    def test_four_fifths_of_new_sources_rows_lie_inside(self, sources: int, alike: float) -> None:
        """Over many draws, whether sources have offsets of their own (``alike`` 0) or only spreads."""
        draw = Random(7)
        inside = rows = 0
        for _ in range(60):
            scales = [0.05 * exp(draw.gauss(0, 0.7)) for _ in range(sources + 1)]
            offsets = [draw.gauss(0, scale) * (1 - alike) for scale in scales]
            drawn = [
                [offset + draw.gauss(0, scale) for _ in range(draw.choice((3, 10, 40)))]
                for offset, scale in zip(offsets, scales, strict=True)
            ]
            known = ErrorSpread(
                error for n, ratios in enumerate(drawn[:-1]) for error in errors(*ratios, source=f"s{n}")
            )
            found = known.band(setting())
            assert found is not None
            inside += sum(abs(ratio) <= found.high for ratio in drawn[-1]) / len(drawn[-1])
            rows += 1
        # The future source counts as one more; sixty draws have a standard error of up to 5 %.
        assert 0.72 <= inside / rows <= 0.8 * (sources + 1) / sources + 0.08

    def test_a_step_gets_its_interval_in_seconds(self) -> None:
        found = step_interval(10.0, setting(tokens=8192), even())
        assert found is not None
        ends = [10 * exp(sign * 0.04 * 2**0.5) for sign in (-1, 1)]
        assert [found.low_s, found.high_s] == pytest.approx(ends)
        assert (found.rows, found.sources, found.framework, found.generation) == (10, 5, "megatron", "Ampere")
        assert step_interval(None, setting(), even()) is None
        assert step_interval(10.0, setting("deepspeed"), even()) is None


class TestMargin:
    """How far the ratio of two predictions may be off."""

    @staticmethod
    def pairs(*apart: float, offset: float = 0.2) -> ErrorSpread:
        """Return sources of five questions with two plans each, whose errors differ by ``apart``."""
        return ErrorSpread(
            PublishedError(f"{source}{question}{plan}", source, setting(), offset + plan * difference, str(question))
            for source, difference in zip("abcdefgh", apart, strict=False)
            for question in range(5)
            for plan in (0, 1)
        )

    def test_an_error_that_plans_share_does_not_count(self) -> None:
        known = self.pairs(*[0.01] * 5)
        margin = known.margin(setting(), setting())
        assert margin is not None
        assert margin.half == pytest.approx(0.01)
        assert (margin.pairs, margin.sources) == (25, 5)
        assert known.band(setting()).high > 0.2  # type: ignore[union-attr]

    def test_it_is_wider_outside_what_was_measured(self) -> None:
        margin = self.pairs(*[0.01] * 5).margin(setting(), setting(tokens=4096 * 8))
        assert margin is not None
        assert margin.half == pytest.approx(0.02)

    def test_plans_of_different_classes_share_no_error(self) -> None:
        known = even().errors
        known += tuple(e for n in "vwxyz" for e in errors(0.04, -0.04, source=n, at=setting("torch")))
        margin = ErrorSpread(known).margin(setting(), setting("torch"))
        assert margin is not None
        assert margin.half == pytest.approx(0.04 * 2**0.5)
        assert even().margin(setting(), setting("torch")) is None  # that class has no interval

    def test_rows_of_different_questions_or_of_none_are_no_pairs(self) -> None:
        assert even().differences == ()
        assert even().margin(setting(), setting()) is None


class TestPublishedRows:
    def test_an_interval_comes_from_other_sources_only(self) -> None:
        known = [case for name in "abcd" for case in of(name, *[0.04] * 3)]
        cases = with_intervals(Validation(cases=[*known, *of("w", 0.5)])).cases
        wild = cases[-1].interval
        assert wild is not None
        assert (wild.quantity, wild.cases, wild.level) == ("step_ms", 12, LEVEL)
        assert (wild.low, wild.high) == (pytest.approx(100 / 1.04), pytest.approx(104))
        tame = cases[0].interval
        assert tame is not None
        assert tame.cases == 10
        assert tame.high > 120  # one of four sources is far off

    def test_fitted_rows_make_no_interval_but_get_one(self) -> None:
        fitted = report("f", 3.0, source="b", fitted=True)
        known = [case for name in "acde" for case in of(name, *SPREAD)]
        cases = with_intervals(Validation(cases=[*known, fitted, report("open", None, source="b")])).cases
        assert errors_of(Validation(cases=[fitted])) == []
        assert [case.interval is not None for case in cases[-2:]] == [True, True]

    def test_shipped_errors_serve_sources_that_are_not_predicted_now(self) -> None:
        shipped = [*even().errors, *errors(*[9.0] * 9, source="w")]
        (case,) = with_intervals(Validation(cases=of("w", 0.0)), shipped).cases
        assert case.interval is not None
        assert case.interval.high == pytest.approx(100 * exp(0.04))

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
        (case,) = with_intervals(Validation(cases=[asked]), even().errors).cases
        assert case.interval is not None
        assert (case.interval.low, case.interval.high) == (
            pytest.approx(0.5 * exp(-0.04)),
            pytest.approx(0.5 * exp(0.04)),
        )


class TestHeldOut:
    def test_sources_that_err_alike_cover_each_other_and_others_do_not(self) -> None:
        (alike,) = held_out(Validation(cases=[case for name in "abcde" for case in of(name, *[0.04, 0.02] * 5)]))
        assert (alike.name, alike.sources, alike.known) == ("Ampere, megatron class", 5, 50)
        assert (alike.held_out, alike.rows, alike.inside) == (5, 50, 50)
        assert alike.median_width == pytest.approx(1.04 - 1 / 1.04)
        assert alike.error == pytest.approx(1 - 1 / 1.04)
        known = [case for name in "abcd" for case in of(name, *[0.04, 0.02] * 5)]
        (apart,) = held_out(Validation(cases=[*known, *of("w", 0.5)]))
        assert (apart.rows, apart.inside) == (41, 40)

    def test_a_class_without_enough_other_sources_is_not_tested(self) -> None:
        (alone,) = held_out(Validation(cases=of("a", *SPREAD)))
        assert (alone.sources, alone.known, alone.rows) == (1, 9, 0)
        assert held_out(Validation(cases=of("a", *SPREAD, at=setting(generation="")))) == []

    def test_only_sources_of_the_validation_are_held_out(self) -> None:
        (one,) = held_out(Validation(cases=of("w", *SPREAD)), even().errors)
        assert (one.held_out, one.rows) == (1, 9)

    def test_all_classes_and_pairs_of_plans_are_tested_too(self) -> None:
        known = [*TestMargin.pairs(*[0.01] * 5).errors]
        known += [e for n in "vwxyz" for e in errors(0.04, -0.04, source=n, at=setting("torch"))]
        megatron, torch, every, pairs = classes_held_out(known)
        assert (every.name, every.rows, every.inside) == (
            "all classes",
            megatron.rows + torch.rows,
            megatron.inside + torch.inside,
        )
        assert (pairs.name, pairs.sources, pairs.known, pairs.inside) == ("two plans of one question", 5, 25, 25)


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
            assert error.question == case.question.subject

    def test_held_out_they_hold_what_they_promise_and_are_no_wider_than_need_be(self) -> None:
        tested = {test.name: test for test in classes_held_out(shipped_errors()) if test.rows}
        every, pairs = tested.pop("all classes"), tested.pop("two plans of one question")
        for test in (every, pairs):
            # The promise is about a new source. With 15 sources, one more inside or out is a share of 0.07. Rows in
            # FP8, a kind of product that no other source has, get wider intervals, and lie inside.
            assert 0.75 <= test.by_source <= 0.9, test
        # The asked width: at most twice the error that 80 % of the rows stay below.
        assert every.median_width <= 2 * every.error
        # One class, or two plans of one question, cannot be held to that. Errors of a class's sources differ by a
        # factor of two or more, and those of a new source are unknown; a class of few sources borrows from the others.
        # On 2026-11-22 the widths were 1.3 to 3.4 times that error: 3.4 in Hopper's torch class and in Ampere's
        # planned one, whose three tables are MEMO's own and were predicted better than any other source.
        assert pairs.median_width <= WIDEST * pairs.error
        for test in (test for test in tested.values() if test.rows >= 30):  # of fewer rows, a share says little
            assert test.by_source >= 0.7, test
            assert test.median_width <= WIDEST * test.error, test

    def test_every_shipped_gpu_names_its_generation(self) -> None:
        measured = [profile for name in list_hardware() if not (profile := load_hardware(name)).rough]
        assert {profile.generation for profile in measured} == {"Ampere", "Hopper", "Blackwell"}

    def test_a_rough_profile_has_no_published_row_alike(self) -> None:
        """An RTX A6000 is an Ampere chip, but its rates are a data sheet's, whose errors are not known."""
        rough = load_hardware("rtxa6000-pcie-48gb")
        assert rough.generation == "Ampere"
        model, prediction = load_model("gpt-7b"), Prediction(status="ok")
        about = setting_of("memo", Decisions(model=model, seq_tokens=65_536), rough, prediction)
        assert step_interval(1.0, about, shipped_spread()) is None
        assert "rough" in without_interval(about, shipped_spread())

    def test_they_are_written_as_they_are_read(self, tmp_path: Path) -> None:
        again = errors_document(shipped_errors())
        assert sorted(row for group in again.groups for row in group.rows) == sorted(e.case for e in shipped_errors())
        path = tmp_path / "accuracy.json"
        accept(Validation(cases=of("a", *SPREAD)), path)
        accept(Validation(cases=of("b", *SPREAD)), path)
        read = load_errors(tmp_path / "errors.json")
        assert {error.source for error in read} == {"a", "b"}
        assert read[0].log_ratio == round(-log(1 + SPREAD[0]), 4)


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
