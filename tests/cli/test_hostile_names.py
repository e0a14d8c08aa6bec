"""A name from a file that would move a terminal's cursor, run in a page or end a drawing, through every command."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest

from memo_sim.contract import codec
from memo_sim.contract.catalog import DATA, load_cluster, load_model
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Plan
from memo_sim.contract.result import Result
from memo_sim.contract.trace import MemoryCurve, Spans, Trace, Wait
from tests.cli.commands import Done, memo_exec, memo_sim

NAME = "_\x1b]0;x\x07\x9b31m\u202egnp\u2066\n  no plan fits\r$\\frac{$|<img src=x>`é"
QUESTION = ("--seq-len", "256", "--system", "memo", "--tp", "1")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a profile, a plan of them with all it can have beside it, and a trace."""
    folder = tmp_path_factory.mktemp("hostile")
    codec.write(folder / "model.json", msgspec.structs.replace(load_model("gpt-tiny"), name=NAME))
    _, hardware = load_cluster("a800-1x1")
    codec.write(folder / "gpu.json", msgspec.structs.replace(hardware, name=NAME, devices=1))
    outputs = ("-o", "plan.json", "--plot", "step.svg", "--trace", "perfetto.json", "--report", "page.html")
    done = memo_sim("what-if", "model.json", "--cluster", "gpu.json", *QUESTION, *outputs, cwd=folder)
    check_shown(done)
    spans = Spans(
        ids=[NAME, f"m0/{NAME}/fwd/x"], ops=[NAME, "b"], lanes=[NAME, "compute"], start_s=[0, 1], end_s=[1, 2]
    )
    curve = MemoryCurve(time_s=[0.0, 1.0], bytes_by_class={NAME: [1, 2]})
    waits = [Wait(instruction=f"m0/{NAME}/fwd/x", waits_for=NAME, start_s=0.0, seconds=1.0)]
    trace = Trace(
        origin="measured",
        program_sha256="0",
        step_s=2.0,
        spans=spans,
        device_memory=curve,
        host_memory=curve,
        waits=waits,
    )
    codec.write(folder / "trace.json", trace)
    return folder


def check_shown(done: Done, code: int = 0) -> None:
    """Assert that what was printed holds the name, and nothing that a terminal obeys or a line of its own."""
    assert done.returncode == code, done
    for text in (done.stdout, done.stderr):
        assert text.replace("\n", "").isprintable(), text
        assert not any(line.startswith("  no plan fits") for line in text.splitlines())
    assert r"\x1b]0;x" in done.stdout + done.stderr or r"\u001b]0;x" in done.stdout


def texts(picture: Path) -> str:
    """Return the text of an SVG, which a reader of XML accepts."""
    return "\n".join(element.text or "" for element in ET.parse(picture).iter())


def test_a_plan_is_searched_written_and_drawn(hostile: Path) -> None:
    assert codec.read(hostile / "plan.json", Plan).decisions.model.name == NAME
    assert r"\x1b]0;x" in texts(hostile / "step.svg")
    assert "$\\frac{$" in texts(hostile / "step.svg")
    assert json.loads((hostile / "perfetto.json").read_text())["traceEvents"]
    page = (hostile / "page.html").read_text()
    assert r"\x1b]0;x" in page
    assert "<img" not in page
    assert page.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "line",
    [
        "what-if model.json --cluster gpu.json --seq-len 256 --system memo --json",
        "what-if --cluster gpu.json --plan plan.json",
        "what-if --cluster gpu.json --plan plan.json --device-memory-gib 0.001",
        "longest model.json --cluster gpu.json --step 512m --system memo",
        "longest model.json --cluster gpu.json --step 512m --system memo --json",
    ],
)
def test_a_name_is_printed_as_text(hostile: Path, line: str) -> None:
    done = memo_sim(*line.split(), cwd=hostile)
    check_shown(done, 4 if "0.001" in line or "512m" in line else 0)
    if "what-if" in line and "--json" in line:
        assert codec.decode(done.stdout.encode(), Result, where="stdout").model == NAME


def test_buffers_are_placed_written_and_drawn(tmp_path: Path) -> None:
    with (tmp_path / "in.csv").open("w", newline="") as file:
        rows = [["=SUM(A1)", 0, 3, 100], [NAME, 0, 2, 200], ["-1", 1, 3, 50]]
        csv.writer(file).writerows([["id", "lower", "upper", "size"], *rows])
    done = memo_sim("plan-memory", "in.csv", "-o", "out.csv", "--plot", "map.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [row[0] for row in csv.reader(file)] == ["id", "'=SUM(A1)", NAME, "-1"]
    assert "$\\frac{$" in texts(tmp_path / "map.svg")
    requests = {
        "schema": "memo.requests/1",
        "ids": [NAME, NAME * 2],
        "lower": [0, 0],
        "upper": [1, 2],
        "size_bytes": [1, 2],
        "classes": [NAME, "x"],
        "phases": [{"name": NAME, "kind": NAME, "lower": 0, "upper": 2}],
    }
    (tmp_path / "in.json").write_text(json.dumps(requests))
    for end in (["-o", "out.csv"], ["-o", "out.pickle"], ["-o", "out.json", "--plot", "map.svg"], ["--json"]):
        check_shown(memo_sim("plan-memory", "in.json", *end, cwd=tmp_path))
    texts(tmp_path / "map.svg")
    (tmp_path / "twice.csv").write_text("id,lower,upper,size\na\x1b]0;x,0,1,5\na\x1b]0;x,0,1,5\n")
    check_shown(memo_sim("plan-memory", "twice.csv", cwd=tmp_path), 3)


def test_cases_are_listed_in_a_page(tmp_path: Path) -> None:
    with (DATA / "cases" / "memo-table5.csv").open(newline="") as file:
        header, *rows = list(csv.reader(file))
    row = next(row for row in rows if row[0] == "memo-t5-192k-a0500")
    named = dict(zip(header, row, strict=True)) | {"case": NAME, "source": f"a b|{NAME}"}
    with (tmp_path / "cases.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, [named[column] for column in header]])
    done = memo_sim("validate", "cases.csv", "--report", "page.md", cwd=tmp_path)
    check_shown(done)
    page = (tmp_path / "page.md").read_text()
    assert page.replace("\n", "").isprintable()
    assert "<img" not in page
    tables = [line for line in page.splitlines() if line.startswith("| ") and "&lt;img" in line]
    assert tables
    assert all(r"\|&lt;img src=x&gt;" in line for line in tables)


def test_timelines_are_compared_and_drawn(hostile: Path, tmp_path: Path) -> None:
    outputs = ("--plot", tmp_path / "both.svg", "--trace", tmp_path / "both.json", "--report", tmp_path / "both.html")
    check_shown(memo_exec("compare", "trace.json", "trace.json", *outputs, cwd=hostile))
    assert r"\x1b]0;x" in texts(tmp_path / "both.svg")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    assert NAME in {event.get("args", {}).get("name") for event in events}
    page = (tmp_path / "both.html").read_text()
    assert page.replace("\n", "").isprintable()
    assert "<img" not in page
    check_shown(memo_exec("compare", "trace.json", "trace.json", "--json", cwd=hostile))


def test_file_names_are_printed_as_text(tmp_path: Path) -> None:
    name = NAME.replace("/", "") + "\udcff.json"
    try:
        (tmp_path / name).write_text("{")
    except (OSError, UnicodeError):
        pytest.skip("this file system has no such names")
    for run, line in (
        (memo_sim, ("what-if", name, "--cluster", "a800-1x1", "--seq-len", "64")),
        (memo_sim, ("what-if", "gpt-tiny", "--cluster", name, "--seq-len", "64")),
        (memo_sim, ("plan-memory", name)),
        (memo_sim, ("validate", name)),
        (memo_exec, ("run", name)),
        (memo_exec, ("doctor", name)),
        (memo_exec, ("compare", name, name)),
    ):
        check_shown(run(*line, cwd=tmp_path), 3)
    (tmp_path / name).write_text("id,lower,upper,size\na,0,1,5\n")
    check_shown(memo_sim("plan-memory", name, "--json", cwd=tmp_path))
    folder = tmp_path / name.removesuffix(".json")
    folder.mkdir()
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 256, "n_positions": 256}
    (folder / "config.json").write_text(json.dumps(config))
    line = ("what-if", folder / "config.json", "--cluster", "a800-1x1", *QUESTION, "-o", tmp_path / "plan.json")
    check_shown(memo_sim(*line, cwd=tmp_path))
    assert isinstance(codec.read(tmp_path / "plan.json", Plan).decisions.model, Model)
