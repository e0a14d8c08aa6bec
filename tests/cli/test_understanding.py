"""``memo-sim explain``, ``compare`` and ``oom`` as scripts use them: documents, exit codes, messages, files."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from memo_sim.contract import codec
from memo_sim.contract.difference import Difference
from memo_sim.contract.explanation import Explanation
from memo_sim.contract.plan import Plan
from memo_sim.contract.result import Result
from memo_sim.contract.shortage import Shortage
from tests.cli.commands import check_refused, memo_sim

MODEL = ("gpt-7b", "--cluster", "a800-1x8", "--seq-len", "64k")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan and its trace, the same plan alone, and a result."""
    found = tmp_path_factory.mktemp("understanding")
    done = memo_sim("what-if", *MODEL, "--tp", 8, "--recompute", "full", "-o", "full.json", "--json", cwd=found)
    assert done.returncode == 0, done.stderr
    (found / "result.json").write_text(done.stdout)
    (found / "alone.json").write_bytes((found / "full.json").read_bytes())
    return found


@pytest.mark.slow
def test_a_way_out_costs_what_what_if_prints_for_its_options() -> None:
    pins = ("--tp", "8", "--recompute", "none", "--alpha", "0")
    asked = ("gpt-7b", "--cluster", "a800-1x8", "--seq-len", "256k")
    done = memo_sim("oom", *asked, *pins, "--json")
    assert done.returncode == 0, done.stderr
    found = codec.decode(done.stdout.encode(), Shortage, where="")
    assert not found.fits
    way = found.ways[0]
    kept = [
        word
        for option, value in zip(pins[::2], pins[1::2], strict=True)
        if option not in (*way.leave_out, *shlex.split(way.options))
        for word in (option, value)
    ]
    fresh = memo_sim("what-if", *asked, *kept, *shlex.split(way.options), "--json")
    result = codec.decode(fresh.stdout.encode(), Result, where="")
    assert result.best is not None
    assert result.best.step_s == way.step_s
    text = memo_sim("oom", *asked, *pins, "--top", 1).stdout
    assert "gpt-7b on a800-1x8, 256k tokens, global batch 1: the run does not fit" in text
    assert way.options in text


def test_oom_of_a_plan_file(folder: Path) -> None:
    done = memo_sim("oom", "--plan", "full.json", "--cluster", "a800-1x8", "--device-memory-gib", 15, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "the run does not fit (full recompute" in done.stdout
    fits = memo_sim("oom", "--plan", "full.json", "--cluster", "a800-1x8", cwd=folder)
    assert "the run fits" in fits.stdout


def test_a_comparison_names_its_sources_and_draws_a_picture(folder: Path) -> None:
    done = memo_sim("compare", "full.json", "alone.json", "result.json", "--plot", "p.svg", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "its own prediction, for a800-1x8" in done.stdout
    assert done.stdout.count("simulated anew on a800-1x8") == 2
    assert "B is as fast as A" in done.stdout
    assert "where the step goes" in (folder / "p.svg").read_text()
    document = memo_sim("compare", "full.json", "result.json", "--json", cwd=folder)
    assert len(codec.decode(document.stdout.encode(), Difference, where="").sides) == 2


@pytest.mark.slow
def test_a_result_is_explained(folder: Path) -> None:
    document = memo_sim("explain", "result.json", "--json", cwd=folder)
    assert document.returncode == 0, document.stderr
    found = codec.decode(document.stdout.encode(), Explanation, where="")
    assert found.rivals_are == "ranked plans"
    assert found.decisions == codec.read(folder / "full.json", Plan).decisions


def test_wrong_arguments_are_refused(folder: Path) -> None:
    check_refused(memo_sim("compare", "full.json", cwd=folder), 2, {"what": "nothing to compare"})
    check_refused(memo_sim("compare", "full.json", "none.json", cwd=folder), 3, {"what": "no such file"})
    clash = memo_sim("compare", "full.json", "alone.json", "--plot", "full.json", cwd=folder)
    check_refused(clash, 2, {"what": "unknown picture format"})
    no_page = memo_sim("compare", "full.json", "alone.json", "--report", "page.md", cwd=folder)
    check_refused(no_page, 2, {"what": "a report is an HTML page"})
    check_refused(memo_sim("explain", "full.trace.json", cwd=folder), 3, {"wanted": "memo.plan/3"})
    unknown = memo_sim("explain", "full.json", "--cluster", "mine", cwd=folder)
    check_refused(unknown, 2, {"what": "the cluster to simulate on is not known", "hint": "--cluster"})
    check_refused(
        memo_sim("oom", "--cluster", "a800-1x8"),
        2,
        {"what": "a question needs MODEL and --seq-len", "hint": "memo-sim oom --help"},
    )
    two = memo_sim("oom", "--plan", "full.json", "--cluster", "a800-1x8", "--tp", 4, cwd=folder)
    check_refused(two, 2, {"what": "--plan brings its own knobs"})
