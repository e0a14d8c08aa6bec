"""What a chip cannot do is told before any figure: by what-if, longest, validate and its report."""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec
import pytest

from memo_sim.contract import codec
from memo_sim.contract.catalog import DATA, load_cluster
from memo_sim.contract.longest import Longest
from memo_sim.contract.result import Result
from memo_sim.contract.validation import Validation
from tests.cli.commands import memo_sim

FACTOR = 4.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an A800 whose products and attention are four times too fast."""
    made = tmp_path_factory.mktemp("fast")
    _, hardware = load_cluster("a800-1x8")
    gemm = [msgspec.structs.replace(t, rows=[[*row[:-1], row[-1] * FACTOR] for row in t.rows]) for t in hardware.gemm]
    attention = [
        msgspec.structs.replace(t, rows=[[*row[:-1], row[-1] * FACTOR] for row in t.rows]) for t in hardware.attention
    ]
    codec.write(made / "fast.json", msgspec.structs.replace(hardware, gemm=gemm, attention=attention))
    return made


QUESTION = ("gpt-7b", "--cluster", "fast.json", "--seq-len", "64k", "--tp", "8", "--recompute", "full")


def test_what_if_warns_first(folder: Path) -> None:
    done = memo_sim("what-if", *QUESTION, "-o", "plan.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    first, *_ = done.stdout.splitlines()
    assert first.startswith("WARNING: The profile a800-sxm4-80gb says more than its chip can do: gemm[0]")
    assert "% of the FLOPs in bf16 that the chip can do" in done.stdout.split("\n\n")[0]
    again = memo_sim("what-if", "--plan", "plan.json", "--cluster", "fast.json", "--json", cwd=folder)
    result = codec.decode(again.stdout.encode(), Result, where="stdout")
    assert [f"WARNING: {text}" for text in result.warnings] == done.stdout.split("\n\n")[0].splitlines()


def test_a_shipped_profile_gives_no_warning(folder: Path) -> None:
    done = memo_sim("what-if", "--plan", "plan.json", "--cluster", "a800-1x8", "--json", cwd=folder)
    assert codec.decode(done.stdout.encode(), Result, where="stdout").warnings == []


def test_longest_warns_first(folder: Path) -> None:
    line = ("longest", "gpt-tiny", "--cluster", "fast.json", "--step", "8k", "--tp", "4", "--dp", "2")
    line = (*line, "--global-batch", "2", "--recompute", "full")
    done = memo_sim(*line, cwd=folder)
    assert done.stdout.startswith("WARNING: The profile")
    document = codec.decode(memo_sim(*line, "--json", cwd=folder).stdout.encode(), Longest, where="stdout")
    assert document.warnings


def test_validate_warns_first_and_in_its_report(folder: Path) -> None:
    with (DATA / "cases" / "memo-table5.csv").open(newline="") as file:
        header, *rows = list(csv.reader(file))
    row = next(row for row in rows if row[0] == "memo-t5-192k-a0500")
    with (folder / "cases.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, [*("fast.json" if cell == "a800-1x8" else cell for cell in row)]])
    done = memo_sim("validate", "cases.csv", "--report", "page.md", cwd=folder)
    assert done.stdout.startswith("WARNING: memo-t5-192k-a0500: The profile")
    page = (folder / "page.md").read_text()
    assert page.index("## Above what the chip can do") < page.index("## By source and system")
    found = memo_sim("validate", "cases.csv", "--json", cwd=folder).stdout
    assert codec.decode(found.encode(), Validation, where="stdout").cases[0].predicted.warnings
