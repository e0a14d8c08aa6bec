"""The checks of the GPU benchmark: incomplete test runs still count, and peaks are compared with measured ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import checks
from benchmarks.gpu.report import _peak_ratio
from benchmarks.gpu.row import Row
from tests.benchmarks.test_gpu_script import launcher, session

GIB = 2**30


@pytest.mark.parametrize(
    ("lines", "status", "says"),
    [
        (["a PASSED [ 10%]", "b PASSED [ 20%]"], "not run", "2 passed, 0 failed, 0 error"),
        (["a PASSED [ 10%]", "b FAILED [ 20%]"], "error", "1 passed, 1 failed, 0 error"),
        ([], "not run", "0 passed, 0 failed, 0 error"),
    ],
)
def test_tests_that_ended_before_the_time_limit_count(
    lines: list[str], status: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("\n".join(["#!/bin/sh", *(f"echo 'tests/gpu/x.py::test_{line}'" for line in lines), "sleep 60"]))
    program.chmod(0o755)
    monkeypatch.setattr(checks.sys, "executable", str(program))
    here = session(tmp_path, launcher(tmp_path, "", seconds=1.0), cluster=None)
    checks._tests(here)
    (row,) = here.results.rows
    assert row.status == status
    assert row.message.startswith("cut off after ")
    assert row.message.endswith(says)


def test_a_complete_test_run_is_summarised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$@"\necho "== 3 passed, 1 skipped in 1.0s =="\n')
    program.chmod(0o755)
    monkeypatch.setattr(checks.sys, "executable", str(program))
    here = session(tmp_path, launcher(tmp_path, ""), cluster=None)
    checks._tests(here)
    (row,) = here.results.rows
    assert (row.status, row.message) == ("ok", "== 3 passed, 1 skipped in 1.0s ==")
    assert "-m gpu and not slow" in (tmp_path / "pytest.log").read_text()


def test_a_peak_is_compared_with_bytes_allocated_by_torch() -> None:
    row = Row(rival="memo", part="suite", status="ok", peak_device_bytes=50 * GIB, predicted_device_bytes=49 * GIB)
    assert _peak_ratio(row) == "0.980"
    assert _peak_ratio(Row(rival="memo", part="suite", status="oom", predicted_device_bytes=49 * GIB)) == "-"
