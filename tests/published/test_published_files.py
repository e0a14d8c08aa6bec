"""Unmodified published jobs are imported as reading them by hand gives, and public traces add up.

The files are not part of this repository: ``python tests/published/fetch_jobs.py DIR`` fetches them, and
``MEMO_PUBLISHED_JOBS=DIR`` names them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from memo_sim.answers.doctor import diagnose
from memo_sim.answers.import_job import import_job, read_files
from memo_sim.contract.catalog import load_cluster
from memo_sim.interchange.framework import Read
from tests.published.fetch_jobs import Published, files_of, read_manifest

JOBS, TRACES = read_manifest("jobs.toml"), read_manifest("traces.toml")
EACH = pytest.mark.parametrize("name", JOBS)


@pytest.fixture(scope="module")
def folder() -> Path:
    """The folder with the published files."""
    found = os.environ.get("MEMO_PUBLISHED_JOBS")
    if not found:
        pytest.skip("run tests/published/fetch_jobs.py DIR, then set MEMO_PUBLISHED_JOBS=DIR")
    return Path(found)


def paths_of(entry: dict[str, Any], folder: Path) -> list[str]:
    """Return the paths of an entry's files, which have to be those that the manifest names."""
    files: list[Published] = files_of(entry)
    assert not [file.at for file in files if not file.is_in(folder)], "run tests/published/fetch_jobs.py"
    return [str(folder / file.at) for file in files]


def asked(entry: dict[str, Any]) -> str | None:
    """Return the framework where the files do not show it."""
    return entry["framework"] if entry.get("named") else None


def test_ten_jobs_are_listed_of_every_framework() -> None:
    assert len(JOBS) >= 10
    assert len({entry["framework"] for entry in JOBS.values()}) == 6


@EACH
def test_a_job_is_what_reading_it_by_hand_gives(name: str, folder: Path) -> None:
    entry = JOBS[name]
    paths, given = paths_of(entry, folder), entry.get("given", {})
    of, read = read_files(paths, given, framework=asked(entry))
    assert of.name == entry["framework"]
    check(entry["model"], read.job.model)
    check({key: value for key, value in entry["job"].items() if key != "devices"}, read.job)
    check(entry["pins"], read.job.pins)
    check_options(entry, read, import_job(paths, given, framework=asked(entry)).devices)


def check(wanted: dict[str, Any], found: object) -> None:
    """Compare the fields that the manifest names."""
    assert {key: getattr(found, key) for key in wanted} == wanted


def check_options(entry: dict[str, Any], read: Read, devices: int) -> None:
    """Every option is read, or ignored with a reason, and never both."""
    assert devices == entry["job"]["devices"]
    assert [option.key for option in read.ignored] == entry["ignored"]["keys"]
    assert all(option.why for option in read.ignored)
    assert not {option.key for option in read.ignored} & {option.key for option in read.read}


@pytest.mark.slow
@EACH
def test_a_job_is_priced(name: str, folder: Path) -> None:
    entry = JOBS[name]
    document = import_job(
        paths_of(entry, folder),
        entry.get("given", {}),
        framework=asked(entry),
        machine=load_cluster(entry["cluster"]),
        search=False,
    )
    assert document.job is not None
    assert document.job.status in ("ok", "gpu_oom")
    if document.job.status == "ok":
        assert 0.05 < (document.job.mfu or 0) < 0.7


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_adds_up(name: str, folder: Path) -> None:
    entry = TRACES[name]
    (path,) = paths_of(entry, folder)
    found = diagnose(trace=path).job
    assert found is not None
    assert (found.device, found.steps) == (entry["device"], entry["steps"])
    assert found.step_s * 1e3 == pytest.approx(entry["step_ms"], rel=1e-3)
    kinds = {kind.kind: kind.measured_s * 1e3 for kind in found.kinds}
    collective_ms = sum(ms for kind, ms in kinds.items() if kind.startswith("collective"))
    assert collective_ms == pytest.approx(entry["collective_ms"], rel=1e-3)
    assert kinds.get("copy.h2d", 0.0) == pytest.approx(entry["h2d_ms"], rel=1e-3)
