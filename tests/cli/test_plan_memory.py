"""``memo-sim plan-memory`` as scripts use it: documents, files, exit codes, and nothing half written."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from memo_sim.contract import codec
from memo_sim.contract.catalog import load_model
from memo_sim.contract.memory_report import MemoryReport
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Decisions, Plan
from memo_sim.memory.read_requests import read_requests
from memo_sim.program.arena.check_placement import check_placement
from memo_sim.program.lower import lower, program_sha256
from tests.cli.commands import Done, Named, check_refused, memo_sim

TABLE = "note,id,lower,upper,size\n,b,2,4,300\nfirst,a,0,3,700\n,c,4,6,900\n"
WITHOUT = "import sys; sys.modules[{name!r}] = None; sys.argv[0] = 'memo-sim'; from memo_sim.cli import main; main()"


def plan_memory(*arguments: str, cwd: Path) -> Done:
    return memo_sim("plan-memory", *arguments, cwd=cwd)


def report_of(done: Done) -> MemoryReport:
    assert done.returncode == 0, done.stderr
    return codec.decode(done.stdout.encode(), MemoryReport, where="standard output")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "t.csv").write_text(TABLE)
    return tmp_path


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    decisions = Decisions(model=load_model("gpt-tiny"), seq_tokens=1024, recompute="full")
    folder = tmp_path_factory.mktemp("plan")
    codec.write(folder / "plan.json", Plan(decisions=decisions, program_sha256=program_sha256(lower(decisions))))
    return folder


def test_json_is_one_document_with_every_figure(plan: Path) -> None:
    report = report_of(plan_memory("plan.json", "--json", cwd=plan))
    requests = read_requests(str(plan / "plan.json")).requests
    assert report.input_kind == "plan"
    assert report.buffers == len(requests.ids)
    assert report.peak_bytes == report.lower_bound_bytes
    assert (report.gap, report.optimal) == (0.0, True)
    assert sum(report.live_by_class.values()) == report.live_bytes <= report.lower_bound_bytes
    assert report.bilevel_peak_bytes is not None
    assert report.bilevel_peak_bytes >= report.lower_bound_bytes
    assert report.reserved_caching_bytes is not None
    assert report.reserved_caching_bytes >= report.lower_bound_bytes
    assert report.allocation_retries == 0
    assert report.worst_phase in {p.name for p in requests.phases}
    rows = zip(requests.lower, requests.upper, requests.size_bytes, strict=True)
    assert sum(s for low, up, s in rows if low <= report.worst_instant < up) == report.live_bytes


def test_text_shows_the_three_numbers_and_the_worst_instant(plan: Path) -> None:
    done = plan_memory("plan.json", cwd=plan)
    assert done.returncode == 0, done.stderr
    for word in ("live", "caching", "planned", "bi-level", "Most", "state"):
        assert word in done.stdout
    assert done.stderr == ""


def test_a_csv_gets_its_own_columns_back_with_offsets(table: Path) -> None:
    done = plan_memory("t.csv", "-o", "out.csv", "--json", cwd=table)
    report = report_of(done)
    assert (report.bilevel_peak_bytes, report.bilevel_proven, report.others) == (None, None, [])  # no phases
    assert report.peak_bytes == report.lower_bound_bytes == 1000
    with (table / "out.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["note", "id", "lower", "upper", "size", "offset"]
    assert [row[:5] for row in rows[1:]] == [line.split(",") for line in TABLE.splitlines()[1:]]
    offsets = {row[1]: int(row[5]) for row in rows[1:]}
    assert sorted([offsets["a"], offsets["b"]]) in ([0, 300], [0, 700])
    again = plan_memory("out.csv", "-o", "out.csv", cwd=table)
    assert again.returncode == 0
    assert "'offset' is kept in the output" in again.stdout
    assert (table / "out.csv").read_text().splitlines()[0] == "note,id,lower,upper,size,offset"


def test_a_written_placement_passes_the_checker(plan: Path, tmp_path: Path) -> None:
    target, picture = tmp_path / "p.json", tmp_path / "m.png"
    done = plan_memory("plan.json", "-o", str(target), "--plot", str(picture), cwd=plan)
    assert done.returncode == 0, done.stderr
    placement = codec.read(target, Placement)
    assert check_placement(placement, read_requests(str(plan / "plan.json")).requests) == []
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_picture_names_live_planned_and_reserved_bytes(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("id,lower,upper,size\na,0,1,3145728\n")  # lives all the time: 20 MiB for 3
    (tmp_path / "few").write_text("malloc a 12582912\nmalloc b 12582912\nfree a 12582912\nmalloc c 12582912\n")
    for name, says in (("t.csv", "reserves 20.00 MiB"), ("few", "reserves 24.00 MiB")):
        done = plan_memory(name, "--plot", "m.svg", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        picture = (tmp_path / "m.svg").read_text()
        assert says in picture
        assert ">live<" in picture
        assert ">arena<" in picture


def test_a_snapshot_is_written_and_planned_again(plan: Path, tmp_path: Path) -> None:
    assert plan_memory("plan.json", "-o", str(tmp_path / "s.pickle"), cwd=plan).returncode == 0
    first, second = (
        report_of(plan_memory(str(path), "--json", cwd=tmp_path))
        for path in (plan / "plan.json", tmp_path / "s.pickle")
    )
    assert second.input_kind == "snapshot"
    assert (second.live_bytes, second.peak_bytes) == (first.live_bytes, first.peak_bytes)
    assert (second.worst_instant, second.live_by_class) == (first.worst_instant, first.live_by_class)


def test_the_bilevel_mip_and_the_portfolio_stand_beside_each_other(plan: Path) -> None:
    flat = report_of(plan_memory("plan.json", "--json", cwd=plan))
    bilevel = report_of(plan_memory("plan.json", "--solver", "bilevel-mip", "--json", cwd=plan))
    assert bilevel.solver == "bilevel-mip"
    (beside,) = flat.others
    assert (beside.solver, beside.peak_bytes, beside.proven) == ("bilevel-mip", bilevel.peak_bytes, True)
    (beside,) = bilevel.others
    assert (beside.solver, beside.peak_bytes, beside.proven) == (flat.solver, flat.peak_bytes, True)
    for report in (flat, bilevel):
        assert (report.bilevel_peak_bytes, report.bilevel_proven) == (bilevel.peak_bytes, True)
        assert all(other.elapsed_s > 0 for other in report.others)
    text = plan_memory("plan.json", "--solver", "bilevel-mip", cwd=plan).stdout
    assert {line.split()[0] for line in text.splitlines()[:5]} == {"memory", "live", "caching", "flat", "planned"}


def test_phases_that_overlap_cost_only_the_bilevel_figure(tmp_path: Path) -> None:
    phases = [{"name": name, "kind": name, "lower": low, "upper": low + 2} for low, name in enumerate("xy")]
    columns = {"ids": ["a"], "lower": [0], "upper": [3], "size_bytes": [5]}
    (tmp_path / "r.json").write_text(json.dumps({"schema": "memo.requests/1", "phases": phases, **columns}))
    report = report_of(plan_memory("r.json", "--json", cwd=tmp_path))
    assert (report.peak_bytes, report.bilevel_peak_bytes) == (5, None)
    assert any("phases overlap" in note and "x [0, 2) and y [1, 3)" in note for note in report.notes)
    refused = plan_memory("r.json", "--solver", "bilevel-mip", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (3, "")


def test_a_snapshot_that_would_end_the_standard_reader_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.pickle").write_bytes(b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.")
    (tmp_path / "out.csv").write_text("old")
    done = plan_memory("s.pickle", "-o", "out.csv", cwd=tmp_path)
    check_refused(done, 3, {"where": "s.pickle", "got": "tuple", "wanted": "torch.cuda.memory._dump_snapshot"})
    assert (tmp_path / "out.csv").read_text() == "old"


def test_a_log_is_planned(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("malloc a 600\nmalloc b 400\nfree a 600\nmalloc c 600\n")
    report = report_of(plan_memory("log", "--solver", "greedy", "--json", cwd=tmp_path))
    assert (report.input_kind, report.peak_bytes, report.solver) == ("log", 1000, "greedy")


def test_a_caching_allocator_without_room_is_said(plan: Path) -> None:
    done = plan_memory("plan.json", "--device-memory-gib", "0.001", "--json", cwd=plan)
    report = report_of(done)
    assert report.reserved_caching_bytes is None
    assert report.allocation_retries is None
    assert report.capacity_bytes == int(0.001 * 2**30)
    assert any("runs out of memory" in note for note in report.notes)


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["missing.csv"], 3, {"where": "missing.csv", "wanted": None}),
        (["."], 3, {"where": ".", "wanted": "file"}),
        (["t.csv", "--solver", "best"], 2, "--solver"),
        (["t.csv", "--time-limit", "0"], 2, "--time-limit"),
        (["t.csv", "--time-limit", "nan"], 2, "--time-limit"),
        (["t.csv", "--device", "0"], 2, {"where": "t.csv", "got": ("--device 0", "csv")}),
        (["t.csv", "-o", "x.txt"], 2, {"got": "x.txt", "wanted": ".json, .csv, .pickle, .pkl"}),
        (["t.csv", "-o", "no/such/x.json"], 2, {"where": "no/such/x.json"}),
        (["t.csv", "--plot", "x.jpg"], 2, {"got": "x.jpg", "wanted": ".png, .svg, .pdf"}),
        (["t.csv", "--solver", "bilevel-mip"], 3, {"what": "phases"}),
        ([], 2, "path"),
    ],
)
def test_wrong_usage_is_one_clear_message(table: Path, arguments: list[str], code: int, named: Named) -> None:
    check_refused(plan_memory(*arguments, cwd=table), code, named)
    assert [p.name for p in table.iterdir()] == ["t.csv"]


def test_a_plan_is_not_replaced_by_its_placement(plan: Path) -> None:
    before = (plan / "plan.json").read_bytes()
    done = plan_memory("plan.json", "-o", "./plan.json", cwd=plan)
    check_refused(done, 2, {"where": "plan.json", "hint": "another file"})
    assert (plan / "plan.json").read_bytes() == before


def test_bad_input_leaves_what_was_there(table: Path) -> None:
    (table / "bad.csv").write_text("id,lower,upper,size\na,3,1,5\n")
    (table / "out.json").write_text("old")
    done = plan_memory("bad.csv", "-o", "out.json", cwd=table)
    check_refused(done, 3, {"where": "bad.csv: line 2", "got": "[3, 1)", "wanted": "lower < upper"})
    assert (table / "out.json").read_text() == "old"


def dissection() -> list[tuple[int, int, int]]:
    """Return (lower, upper, size) of a rectangle cut without waste: no greedy order fits it together again."""
    draw = random.Random(7)
    pieces = [(0, 1000, 1000)]
    while len(pieces) < 60:
        lower, upper, size = pieces.pop(
            max(range(len(pieces)), key=lambda i: (pieces[i][1] - pieces[i][0]) * pieces[i][2])
        )
        share = draw.uniform(0.3, 0.7)
        if draw.random() < 0.5:
            middle = lower + int((upper - lower) * share)
            pieces += [(lower, middle, size), (middle, upper, size)]
        else:
            pieces += [(lower, upper, int(size * share)), (lower, upper, size - int(size * share))]
    return pieces


@pytest.mark.parametrize(("solver", "package", "extra"), [("mip", "mip", "sim"), ("cp-sat", "ortools", "cp-sat")])
def test_a_missing_solver_is_named_with_its_extra(tmp_path: Path, solver: str, package: str, extra: str) -> None:
    rows = [f"{i},{lower},{upper},{size}" for i, (lower, upper, size) in enumerate(dissection())]
    (tmp_path / "t.csv").write_text("\n".join(["id,lower,upper,size", *rows]))
    command = [sys.executable, "-c", WITHOUT.format(name=package), "plan-memory", "t.csv", "--solver", solver]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 6, (done.stdout, done.stderr)
    assert f"pip install '.[{extra}]'" in done.stderr


def test_the_document_is_described() -> None:
    done = memo_sim("schema", "memory")
    assert "reserved_caching_bytes" in json.dumps(json.loads(done.stdout))


def test_an_eager_plan_names_what_its_framework_reserves(tmp_path: Path) -> None:
    question = ("what-if", "gpt-tiny", "--cluster", "a800-1x1", "--seq-len", "2k", "--memory-policy", "eager")
    assert memo_sim(*question, "-o", "plan.json", cwd=tmp_path).returncode == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    shown = memo_sim("plan-memory", "plan.json", "--json", cwd=tmp_path)
    reserved = plan["prediction"]["reserved_bytes"]
    assert json.loads(shown.stdout)["reserved_eager_bytes"] == reserved > 0
    assert "\neager  " in memo_sim("plan-memory", "plan.json", cwd=tmp_path).stdout
    (tmp_path / "bare.json").write_text(json.dumps({**plan, "prediction": None}))
    assert "note: an eager framework asks for more" in memo_sim("plan-memory", "bare.json", cwd=tmp_path).stdout
    named = {"got": "eager", "hint": "--memory-policy eager -o plan.json"}
    check_refused(memo_sim("plan-memory", "eager", cwd=tmp_path), 2, named)
