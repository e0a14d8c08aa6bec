"""The validation page: the contents of each table, and every case is present."""

from __future__ import annotations

import pytest

from memo_sim.contract.accuracy import Setting
from memo_sim.contract.plan import Layout
from memo_sim.contract.validation import CaseError, CasePrediction, CaseReport, Expectation, Validation
from memo_sim.validation.accepted import accuracy_of
from memo_sim.validation.intervals import PublishedError, errors_of, held_out, with_intervals
from memo_sim.views.validation_report import HOW_INTERVALS_DO, markdown_table, validation_report

ERRORS = {32: 0.0, 64: 0.02, 128: -0.04, 192: 0.01, 256: 0.03, 320: 0.30, 384: None, 448: None}


def report(kilotokens: int, error: float | None, *, fitted: bool = False, source: str = "table") -> CaseReport:
    """Return a case predicted at 50 % MFU with this error; None: measured out of memory (448k was predicted to run)."""
    status = "ok" if error is not None or kilotokens == 448 else "gpu_oom"
    measured = "ok" if error is not None else "gpu_oom"
    return CaseReport(
        case=f"memo-{kilotokens}k",
        source=source,
        system="memo",
        predicted=CasePrediction(
            status=status,  # type: ignore[arg-type]
            reason="" if status == "ok" else "device memory runs out",
            mfu=0.5 if status == "ok" else None,
            layout=Layout(tp=4),
            lanes={"compute": 0.93, "d2h": 0.4},
            waits={"all_gather": 0.05, "launch": 0.001},
            allocation_retries=2.0,
            setting=Setting(
                generation="Ampere", framework="planned", seq_tokens=512 * 1024, devices=8, kernels={"dtype": "bf16"}
            ),
        ),
        expected=Expectation(status=measured, mfu=None if error is None else 0.5 / (1 + error)),  # type: ignore[arg-type]
        error=CaseError(status=status == measured, mfu=error),
        fitted=fitted,
        model="gpt-7b",
        seq_tokens=kilotokens * 1024,
    )


def other_sources() -> list[PublishedError]:
    """Return the errors of five other sources, from -4 to 4 %."""
    cases = [report(n, n / 100 - 0.04, source=f"other-{n % 5}") for n in range(9)]
    return errors_of(Validation(cases=cases))


@pytest.fixture(scope="module")
def page() -> str:
    cases = [report(k, e) for k, e in ERRORS.items()] + [report(512, 0.5, fitted=True)]
    errors = other_sources()
    validation = with_intervals(Validation(cases=cases), errors)
    return validation_report(
        validation,
        accuracy_of(validation).groups,
        held_out(validation, errors),
        [("memo-32?k", "A known gap."), ("other-*", "Not here.")],
        command="memo-sim validate --all",
        created="2026-11-21",
        version="9",
    )


def table(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, header first."""
    lines = page.split(f"{heading}\n", 1)[1].strip().split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in [lines[0], *lines[2:]]]


def test_it_names_the_command_that_made_it(page: str) -> None:
    assert page.startswith("# Validation: every published case\n")
    assert "`memo-sim validate --all`, 2026-11-21, memo 9" in page


def test_fitted_rows_are_separate_in_the_summary(page: str) -> None:
    header, predicted, fitted = table(page, "## By source and system")
    cells = dict(zip(header, predicted, strict=True))
    assert cells["rows"] == "8"
    assert cells["status right"] == "7/8"
    assert (cells["n"], cells["bias"], cells["mean error"]) == ("6", "+5.3 %", "6.7 %")
    assert cells["largest"] == "30.0 % (memo-320k)"
    assert cells["80 % of errors"] == "-4.0 % to +30.0 %"
    assert fitted[2] == "fitted"
    assert "+50.0 %" in fitted


def test_rows_inside_the_interval_of_other_sources_are_counted(page: str) -> None:
    header, row = table(page, "## Intervals\n\n" + HOW_INTERVALS_DO + "\n")
    assert dict(zip(header, row, strict=True)) == {
        "class": "Ampere, planned class",
        "sources": "6",
        "rows": "15",
        "held out": "1 source",
        "inside": "5/6 (83 %)",
        "by source": "83 %",
        "median width": "9.9 %",
        "80 % error": "4.0 %",
    }


def test_a_class_that_cannot_be_tested_is_named() -> None:
    cases = Validation(cases=[report(k, 0.0) for k in ERRORS])
    text = validation_report(cases, {}, held_out(cases), [], command="", created="", version="")
    assert "| Ampere, planned class | 1 | 8 | too few other rows |" in text


def test_the_longest_sequence_is_compared_in_steps() -> None:
    cases = [report(k, e) for k, e in ERRORS.items()]
    text = validation_report(Validation(cases=cases), {}, [], [], command="", created="", version="")
    (row,) = table(text, "## Longest sequence that fits")[1:]
    assert row == ["table", "memo", "gpt-7b", "448k", "320k", "+2"]


def test_models_and_lengths_have_their_own_tables(page: str) -> None:
    assert table(page, "## By model")[1][2] == "gpt-7b"
    lengths = [row[2] for row in table(page, "## By length")[1:]]
    assert lengths == ["32k", "64k", "128k", "192k", "256k", "320k", "384k", "448k", "512k"]


def test_the_worst_cases_come_first_with_their_step_and_their_note(page: str) -> None:
    rows = table(page, "## The largest errors of speed, and where their predicted steps go")[1:]
    assert [row[0] for row in rows] == ["memo-320k", "memo-128k", "memo-256k", "memo-64k", "memo-192k", "memo-32k"]
    assert rows[0][2] == (
        "busy: compute 93 %, d2h 40 %; compute waits for all_gather 5 %; 2 allocation retries per micro-batch"
    )
    assert [row[3] for row in rows] == ["A known gap.", "", "", "", "", ""]


def test_wrong_statuses_are_listed(page: str) -> None:
    assert table(page, "## Wrong statuses")[1:] == [["memo-448k", "ok", "device memory", ""]]


def test_every_case_is_listed_with_its_interval(page: str) -> None:
    rows = table(page, "### table")[1:]
    assert [row[0] for row in rows] == [f"memo-{k}k" for k in (*ERRORS, 512)]
    assert rows[5][-1].endswith("(outside)")
    assert "to" in rows[0][-1]
    assert "outside" not in rows[0][-1]
    assert rows[6][3:5] == ["device memory", "device memory"]


def test_a_markdown_table_has_an_alignment_row_and_blank_cells() -> None:
    assert markdown_table(["a", "b"], [["x", None]], "lr") == "| a | b |\n|---|---:|\n| x |  |"
