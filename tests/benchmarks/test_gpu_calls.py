"""The calls of ten minutes: their stages, what they pack, and when a run counts as a success."""

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import checks
from benchmarks.gpu.calls import CALL_S, CALLS, Stage, play_call
from benchmarks.gpu.row import Row
from benchmarks.gpu.scale import QUICK_CUDA
from benchmarks.gpu.verdict import compared
from memo_exec.memory import pinned
from tests.benchmarks.test_gpu_script import Here, launcher, session

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", CALLS)
def test_the_stages_of_a_call_fit_into_it(number: int) -> None:
    stages = CALLS[number]
    assert sum(stage.limit_s for stage in stages) <= CALL_S < 600
    for stage in stages:
        for argument in stage.command:
            assert not argument.endswith(".py") or (ROOT / argument).is_file()
        if "pytest" in stage.command:
            assert stage.command[stage.command.index("-W") + 1] == "default"
        if "--budget-s" in stage.command:
            assert float(stage.command[-1]) < stage.limit_s


def test_the_first_call_has_the_order_in_which_results_rely_on_each_other() -> None:
    names = [stage.name for stage in CALLS[1]]
    assert names == ["machine", "conformance", "kernels", "checks", "rivals", "full swap, debug"]
    rivals = CALLS[1][4].command
    assert rivals[4:8] == ("--profile", "h200-1x1", "--lengths", "128k")
    assert [stage.name for stage in CALLS[2]] == ["calibrate", "suite", "rivals"]


def stage(name: str, code: str, limit_s: float = 20.0) -> Stage:
    return Stage(name=name, limit_s=limit_s, command=("-c", code), quick=("-c", f"print('quick {name}')"))


def played(folder: Path, *stages: Stage, **options: Any) -> tuple[int, list[dict[str, Any]], set[str]]:
    """Play stages as a call; return its exit status, the summary, and the names in the packed file."""
    told: list[str] = []
    status = play_call(7, folder, told.append, calls={7: stages}, **({"quick": False} | options))
    with tarfile.open(folder / "call-7.tar.gz") as archive:
        names = {member.name for member in archive.getmembers() if member.isfile()}
        found = archive.extractfile("call-7/call-7.json")
        assert found is not None
        return status, json.loads(found.read()), names


def test_each_stage_has_a_status_and_a_log_and_the_results_are_one_file(tmp_path: Path) -> None:
    write = "import os; open(os.environ['MEMO_RESULTS'] + '/rows.json', 'w').write('[]'); print('done')"
    stages = [
        stage("fine", write),
        stage("bad one", "print('the reason'); raise SystemExit(3)"),
        stage("hangs", "import time; print('begun', flush=True); time.sleep(60)", limit_s=1.0),
        stage("late", "print('still played')"),
    ]
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "large.json").write_text("{}")
    status, summary, names = played(tmp_path, *stages)
    assert status == 1
    assert [(each["name"], each["status"], each["returned"]) for each in summary] == [
        ("fine", "ok", 0),
        ("bad one", "failed", 3),
        ("hangs", "cut off", None),
        ("late", "ok", 0),
    ]
    assert summary[1]["last_lines"] == ["the reason"]
    assert summary[2]["last_lines"] == ["begun"]
    logs = {f"call-7/logs/{name}.log" for name in ("fine", "bad-one", "hangs", "late")}
    assert names == {"call-7/call-7.json", "call-7/rows.json", *logs}


def test_a_call_succeeds_when_all_its_stages_do(tmp_path: Path) -> None:
    status, summary, _ = played(tmp_path, stage("a", "raise SystemExit(1)"), stage("b", "1/0"), quick=True)
    assert status == 0
    assert [each["last_lines"] for each in summary] == [["quick a"], ["quick b"]]


@pytest.mark.parametrize(
    ("last", "status"), [("= 3 passed, 1 skipped in 1 s =", "ok"), ("= 4 skipped in 1 s =", "failed")]
)
def test_tests_of_which_none_ran_fail(tmp_path: Path, last: str, status: str) -> None:
    tests = Stage(name="tests", limit_s=20.0, command=("-c", f"print({last!r})", "pytest"), quick=())
    _, summary, _ = played(tmp_path, tests)
    assert [each["status"] for each in summary] == [status]


def test_no_stage_starts_when_the_time_is_over(tmp_path: Path) -> None:
    status, summary, _ = played(tmp_path, stage("a", "pass"), budget_s=0.0)
    assert status == 1
    assert [each["status"] for each in summary] == ["not run"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dry_run_plays_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert play_call(1, tmp_path, print, quick=True) == 0
    assert json.loads((tmp_path / "machine.json").read_bytes())["pinning"]["bytes"] > 0


def row(rival: str = "memo, keep", part: Any = "rivals", status: Any = "ok", **fields: Any) -> Row:
    return Row(rival=rival, part=part, status=status, **fields)


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([], False),
        ([row(part="checks"), row("autograd keep-all", "checks")], False),
        ([row(part="checks", agrees=True)], True),
        ([row(part="checks", status="not run"), row("pytest -m gpu", "checks")], False),
        ([row(part="suite")], False),
        ([row(part="suite", comparison=object())], True),
        ([row(sequence=8), row("checkpoint", sequence=16)], False),
        ([row(sequence=8), row("memo offload_activations", sequence=8)], True),
        ([row(sequence=8), row("checkpoint", status="oom", sequence=8)], False),
        ([row("calibration", "calibrate")], True),
        ([row("calibration", "calibrate", "not run")], False),
    ],
)
def test_what_counts_as_compared(rows: list[Row], wanted: bool) -> None:
    assert compared(rows) is wanted


def test_a_run_that_compares_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(gpu, "Launcher", Here)
    monkeypatch.setattr(gpu, "LEAST_S", {"cpu": dict.fromkeys(gpu.PARTS, 0.0)})
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--quick", "--only", "checks", "--budget-s", "0"])
    monkeypatch.setenv("MEMO_RESULTS", str(tmp_path))
    assert gpu.main() == 1
    assert "checks: nothing was compared" in capsys.readouterr().err


def test_a_short_quick_run_on_a_gpu_has_time_for_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 85 s, the checks get a minute, and all of their cases fit into what the GPU tests leave."""
    here = session(tmp_path, launcher(tmp_path, "", seconds=85.0), cluster=None)
    here.scale = QUICK_CUDA
    asked: list[tuple[int, float]] = []
    tests: list[float] = []
    monkeypatch.setattr(
        type(here), "measure", lambda self, cases: asked.append((len(cases), self.scale.seconds(cases))) or []
    )
    monkeypatch.setattr(checks, "_tests", lambda session, spare_s: tests.append(session.budget.left_s - spare_s))
    gpu._part(here, "checks", None, last=False)
    ((count, seconds),) = asked
    assert count == 2 * (1 + 4 * 2)  # autograd, and four policies with each of two attention kernels, of two models
    assert seconds < 30.0
    assert tests[0] > 25.0


def test_the_strongest_rivals_run_first() -> None:
    from benchmarks.gpu.side_by_side import STRONGEST, systems

    assert list(systems())[:STRONGEST] == [
        "memo, planned alpha",
        "checkpoint, input offloaded, compiled",
        "checkpoint, compiled",
    ]


def test_the_machine_stage_pins_what_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import facts

    sizes: list[int] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.setattr(facts, "pin", lambda memory: sizes.append(memory.numel()))
    monkeypatch.setattr(facts, "unpin", lambda memory: sizes.append(-memory.numel()))
    found = facts._pinning(3 * 2**20)
    assert sizes == [3 * 2**20, -3 * 2**20]
    assert found["pin_bytes_per_s"] > 0
    assert pinned.PIECE_BYTES > 32 * 2**30  # one piece
