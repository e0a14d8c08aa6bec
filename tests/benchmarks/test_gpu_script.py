"""The GPU benchmark: a complete run on tiny shapes, and tests of the code that handles failures."""

import json
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import launcher as launching
from benchmarks.gpu import plans, side_by_side
from benchmarks.gpu.agreement import reference_of, with_agreement
from benchmarks.gpu.case import Case
from benchmarks.gpu.checks import _status
from benchmarks.gpu.child import SPOILED, play
from benchmarks.gpu.launcher import Budget, Launcher
from benchmarks.gpu.longest import Bracket
from benchmarks.gpu.plans import Plans, Refused, model_of
from benchmarks.gpu.report import write_report
from benchmarks.gpu.results import Results
from benchmarks.gpu.rivals import HUGGING_FACE, RIVALS
from benchmarks.gpu.row import Row, mfu_of, row_of, timed
from benchmarks.gpu.scale import FULL, QUICK
from benchmarks.gpu.session import Session
from memo_exec.machine.machine import Machine
from memo_exec.machine.memory_budget import check_memory, needs_of
from memo_exec.machine.placement_file import checked_placement
from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput, CannotRun
from memo_sim.contract.plan import Plan
from memo_sim.program.lower import lower
from tests.benchmarks.uninstalled import uninstall

ROOT = Path(__file__).parents[2]
KERNELS = ["torch-flash", "torch-cudnn"]
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def script(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **WITHOUT_GPU, "MEMO_RESULTS": str(folder)}
    command = [sys.executable, "-m", "benchmarks.gpu", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def rows_of(folder: Path, part: str) -> list[dict[str, Any]]:
    return [row for row in json.loads((folder / "rows.json").read_bytes()) if row["part"] == part]


class Here(Launcher):
    """Plays cases in this process instead of one process after the other, each of which would load torch."""

    def _run_once(self, cases: list[Case]) -> list[Row]:
        rows: list[Row] = []
        for case in msgspec.json.decode(msgspec.json.encode(cases), type=list[Case]):
            rows.append(msgspec.json.decode(msgspec.json.encode(play(case)), type=Row))
            if rows[-1].status in ("oom", "error"):
                break
        return rows


def run_here(folder: Path, *options: str) -> int:
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("default")  # rivals warn
        patched.setattr("torch.cuda.is_available", lambda: False)
        patched.setattr("memo_exec.probes.memory.cache_bytes", lambda device: 2**20)
        patched.setattr("gc.collect", lambda: 0)  # nothing here is large enough to be worth 0.2 s a case
        patched.setattr(gpu, "Launcher", Here)
        patched.setattr(sys, "argv", ["benchmarks.gpu", *options])
        patched.setenv("MEMO_RESULTS", str(folder))
        return gpu.main()


@pytest.mark.timeout(600)  # the run itself ends after 540 s
@pytest.mark.slow
def test_a_quick_run_plays_every_part(tmp_path: Path) -> None:
    """One test for the whole run, which takes long: workers beside each other would each play it."""
    done = script(tmp_path, "--quick")
    assert done.returncode == 0, done.stderr
    parts = {row["part"] for row in json.loads((tmp_path / "rows.json").read_bytes())}
    assert parts == {"checks", "calibrate", "suite", "rivals", "longest"}
    assert (tmp_path / "profile.json").is_file()
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    report = (tmp_path / "report.md").read_text()
    assert "Tiny shapes" in report
    assert all(row["rival"] in report for row in rows_of(tmp_path, "rivals"))
    every_policy_agrees_with_autograd(rows_of(tmp_path, "checks"))
    every_point_has_both_sides(rows_of(tmp_path, "suite"))
    every_system_has_a_row_and_those_that_ran_agree(rows_of(tmp_path, "rivals"))
    assert [(row["sequence"], row["complete"]) for row in rows_of(tmp_path, "longest")] == [(256, True)] * 2


Rows = list[dict[str, Any]]


def every_policy_agrees_with_autograd(rows: Rows) -> None:
    assert rows[0]["rival"] == "pytest -m gpu"
    assert rows[0]["status"] == "not run"
    compared = [row for row in rows[1:] if row["rival"] != "autograd keep-all"]
    assert len(compared) == 8
    assert all(row["agrees"] for row in compared)


def every_point_has_both_sides(rows: Rows) -> None:
    assert {(row["model"], row["policy"]) for row in rows} == {
        (model, policy)
        for model in ("llama-tiny-3l", "gpt-tiny-3l")
        for policy in ("token-wise", "full recompute", "full swap", "alpha 0", "keep", "alpha 0.5")
    }
    for row in rows:
        ratio = row["comparison"]["ratio"]
        assert row["status"] == "ok"
        assert ratio["step_s"] > 0
        assert ratio["peak_device_bytes"] == pytest.approx(1, abs=0.02)
        assert {"linear", "attention", "attention.bwd"} <= ratio["ops"].keys()
        if row["policy"] in ("full swap", "alpha 0"):
            assert {"d2h", "h2d"} <= ratio["lanes"].keys()
            assert row["host_bytes"] == row["predicted_host_bytes"] > 0


def every_system_has_a_row_and_those_that_ran_agree(found: Rows) -> None:
    rows = {row["rival"]: row for row in found}
    assert rows.keys() == {*RIVALS, HUGGING_FACE, *side_by_side.MEMO, side_by_side.IDEAL}
    assert all(row["message"] for row in rows.values() if row["status"] != "ok")
    ran = {name: row for name, row in rows.items() if row["status"] == "ok"}
    assert {"autograd keep-all", "checkpoint, input offloaded", "memo, planned alpha", "save_on_cpu"} <= ran.keys()
    for row in ran.values():
        assert row["agrees"]
        assert len(row["step_s"]) == 5
        assert row["tokens_per_s"] == pytest.approx(512 / row["median_step_s"])
        assert row["device"]
        assert row["versions"]["torch"]


def test_without_a_gpu_it_says_that_it_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(tmp_path) == 6
    said = capsys.readouterr().err
    assert "a GPU is needed" in said
    assert "--quick" in said


def case(rival: str = "any", **fields: Any) -> Case:
    return Case(rival=rival, kind="plain", part="rivals", model=model_of("llama-tiny", 2), **fields)


def launcher(folder: Path, code: str, seconds: float = 60.0) -> Launcher:
    """Return a launcher whose processes run ``code``, which can use ``cases``, ``told`` and ``say``."""
    script = folder / "child.py"
    lines = [
        "import json, os, signal, sys, time",
        "cases, told = json.load(open(sys.argv[1])), open(sys.argv[2], 'a')",
        "def say(case, status):",
        "    told.write(json.dumps(dict(rival=case['rival'], part='rivals', status=status)) + '\\n'); told.flush()",
    ]
    script.write_text("\n".join([*lines, code]))
    return Launcher(folder, Budget(seconds), [sys.executable, str(script)])


def statuses(rows: list[Row]) -> list[tuple[str, str]]:
    return [(row.rival, row.status) for row in rows]


THREE = [case("one"), case("two"), case("three")]


def test_cases_after_an_oom_continue_in_a_new_process(tmp_path: Path) -> None:
    code = (
        "for c in cases:\n"
        "    say(c, 'oom' if c['rival'] == 'two' else 'ok')\n"
        f"    c['rival'] == 'two' and sys.exit({SPOILED})"
    )
    found = launcher(tmp_path, code)
    assert statuses(found.run(THREE)) == [("one", "ok"), ("two", "oom"), ("three", "ok")]
    assert (tmp_path / "002.json").is_file()
    assert not (tmp_path / "003.json").exists()


def test_a_process_that_dies_costs_one_case(tmp_path: Path) -> None:
    code = "say(cases[0], 'ok')\nsys.stderr.write('the reason')\nos._exit(9)"
    rows = launcher(tmp_path, code).run(THREE)
    assert statuses(rows) == [("one", "ok"), ("two", "error"), ("three", "ok")]
    assert "the reason" in rows[1].message


def test_a_killed_process_counts_as_out_of_memory(tmp_path: Path) -> None:
    rows = launcher(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)").run(THREE[:1])
    assert statuses(rows) == [("one", "oom")]
    assert "killed" in rows[0].message


def test_an_incomplete_line_is_no_row(tmp_path: Path) -> None:
    code = "say(cases[0], 'ok')\ntold.write('{\"rival\": \"tw'); told.flush()\nos._exit(9)"
    assert statuses(launcher(tmp_path, code).run(THREE[:2])) == [("one", "ok"), ("two", "error")]


def test_the_budget_ends_a_process(tmp_path: Path) -> None:
    rows = launcher(tmp_path, "time.sleep(3600)", seconds=0.2).run(THREE[:1])
    assert statuses(rows) == [("one", "not run")]


def test_a_host_that_fills_up_ends_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "host_available_bytes", lambda: 2**20)
    rows = launcher(tmp_path, "time.sleep(3600)", seconds=3600.0).run(THREE[:1])
    assert statuses(rows) == [("one", "oom")]
    assert "host" in rows[0].message


@pytest.mark.parametrize("granule", [1, 8])
def test_the_longest_is_found(granule: int) -> None:
    draw = random.Random(granule)
    for limit in [0, 8, 15, 16, *(draw.randrange(2000) for _ in range(50))]:
        bracket = Bracket(granule=granule, first=16, most=1024)
        tries = 0
        while (tokens := bracket.next) is not None:
            tries += 1
            if tokens <= limit:
                bracket.ran = tokens
            else:
                bracket.failed = tokens
        assert bracket.ran == min(limit, 1024) // granule * granule
        assert tries <= 18


def test_mfu_is_of_the_datasheets_peak_of_this_device() -> None:
    model = model_of("llama3-8b", 2)
    asked = Case(rival="any", kind="plain", part="rivals", model=model, seq_tokens=1024)
    flops = 6 * 1024 * (model.mfu_params + 2 * 4096 * 1024)
    assert mfu_of(asked, 0.5, "NVIDIA H100 80GB HBM3") == pytest.approx(flops / 0.5 / 989.4e12)
    assert mfu_of(asked, 0.5, "NVIDIA H100 PCIe") == pytest.approx(flops / 0.5 / 756e12)
    assert mfu_of(asked, 0.5, "a GPU of tomorrow") is None
    row = timed(row_of(asked, "ok"), asked, [0.4, 0.5, 0.7], "NVIDIA H200")
    assert (row.median_step_s, row.tokens_per_s) == (0.5, 2048)
    assert row.spread == pytest.approx(0.6)


def test_rows_of_other_parts_and_lengths_stay(tmp_path: Path) -> None:
    results = Results(tmp_path)
    for part, tokens in (("rivals", 512), ("rivals", 1024), ("suite", 512)):
        results.add(Row(rival="x", part=part, status="ok", sequence=tokens))  # type: ignore[arg-type]
    again = Results(tmp_path)
    again.forget(["rivals"], (512,))
    assert [(row.part, row.sequence) for row in again.rows] == [("rivals", 1024), ("suite", 512)]
    again.forget(["rivals"], None)
    assert [row.part for row in again.rows] == ["suite"]


def test_rows_that_cannot_be_read_are_not_overwritten(tmp_path: Path) -> None:
    Results(tmp_path)
    (tmp_path / "rows.json").write_text("[{]")
    with pytest.raises(BadInput, match="cannot be read"):
        Results(tmp_path)


def test_an_exception_becomes_a_row(tmp_path: Path) -> None:
    row = play(case("no such rival", seq_tokens=128, data=str(tmp_path)))
    assert row.status == "error"
    assert "no such rival" in row.message
    assert row.device


def test_the_tests_on_the_gpu_count_only_when_some_ran() -> None:
    assert _status(0, "3 passed, 2 skipped in 1.0s") == "ok"
    assert _status(0, "12 skipped in 1.0s") == "not run"
    assert _status(5, "no tests ran") == "not run"
    assert _status(1, "1 failed, 3 passed") == "error"


def session(folder: Path, launch: Launcher, cluster: str | None = "h100-1x1") -> Session:
    results = Results(folder)
    return Session(
        results,
        launch,
        launch.budget,
        FULL,
        device="cuda",
        kernels=KERNELS,
        tell=lambda text: None,
        plans=Plans(results.plans, cluster, KERNELS) if cluster else None,
        without_plans="" if cluster else "no profile of this device",
    )


def test_cases_beyond_the_budget_are_listed(tmp_path: Path) -> None:
    launch = launcher(tmp_path, "for c in cases: say(c, 'ok')", seconds=FULL.start_s + 20)
    asked = [case(str(i), seq_tokens=4096, steps=1, warm_ups=0) for i in range(3)]
    slow = msgspec.structs.replace(asked[2], model=model_of("llama3-8b", 8), seq_tokens=2**20)
    rows = session(tmp_path, launch).measure([*asked[:2], slow])
    assert statuses(rows) == [("0", "ok"), ("1", "ok"), ("2", "not run")]
    assert "budget" in rows[2].message


def test_plans_are_made_once_and_refusals_say_why(tmp_path: Path) -> None:
    made = Plans(tmp_path, "h100-1x1", KERNELS)
    model = model_of("llama3-8b", 2)
    assert (model.layers, model.vocab) == (2, plans.VOCAB)
    path = made.get(model, 16384, "planned")
    assert isinstance(path, Path)
    before = path.stat().st_mtime_ns
    assert Plans(tmp_path, "h100-1x1", KERNELS).get(model, 16384, "planned") == path
    assert path.stat().st_mtime_ns == before
    refused = made.get(model, 2**20, "keep")
    assert isinstance(refused, Refused)
    assert "device memory" in refused.reason
    assert codec.read(path, Plan).decisions.kernels.attention in KERNELS
    assert isinstance(Plans(tmp_path / "none", "h100-1x1", []).get(model, 16384, "planned"), Refused)
    assert 0 < made.most_layers("llama3-8b", 2**17, "keep", 8) < 8


def test_plans_leave_room_for_library_results_outside_the_arena(tmp_path: Path) -> None:
    """Seven layers fit together with the results of head groups, eight do not; the plan passes a run's preflight."""
    made = Plans(tmp_path, "h100-1x1", KERNELS)
    layers = made.most_layers("llama3-8b", 131_072, "full swap", 8)
    assert layers == 7
    path = made.get(model_of("llama3-8b", layers), 131_072, "full swap")
    assert isinstance(path, Path)
    plan = codec.read(path, Plan)
    (program,) = lower(plan.decisions)
    device = int(made.hardware.device_memory_bytes.value)
    context = int(made.hardware.reserve_bytes["cuda_context"].value)
    machine = Machine("cuda", "H100", 1, 1, device, device - context, 2**40, 2**40)
    check_memory(needs_of(program, machine, checked_placement(plan, program, path)), machine)


def test_plans_swap_no_more_than_the_host_has_free(tmp_path: Path) -> None:
    found = Plans(tmp_path, "h100-1x1", KERNELS, 2**30).get(model_of("llama3-8b", 4), 131_072, "full swap")
    assert isinstance(found, Refused)
    assert "host memory" in found.reason


def test_plans_made_beforehand_need_no_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama3-8b", 2)
    made = Plans(tmp_path, "h100-1x1", KERNELS).get(model, 16384, "planned")
    uninstall("simpy", monkeypatch, users=("memo_sim.engine", "memo_sim.answers.what_if"))
    later = Plans(tmp_path, "h100-1x1", KERNELS)
    assert later.get(model, 16384, "planned") == made
    refused = later.get(model, 32768, "planned")
    assert isinstance(refused, Refused)
    assert refused.status == "error"
    assert "simpy" in refused.reason


def test_estimates_follow_the_plan(tmp_path: Path) -> None:
    launch = launcher(tmp_path, "")
    found = session(tmp_path, launch)
    model = model_of("llama3-8b", 4)
    asked = found.case(model, 2**17, rival="memo, full swap", kind="memo", part="suite", policy="full swap")
    planned = found.planned(asked)
    assert planned is not None
    prediction = codec.read(planned.plan, Plan).prediction
    assert prediction is not None
    assert FULL.step_s(planned) == prediction.step_s
    assert FULL.seconds([planned]) > FULL.seconds([asked]) > FULL.start_s
    assert found.planned(msgspec.structs.replace(asked, seq_tokens=2**20)) is None
    assert found.results.rows[-1].status == "oom"


def test_a_device_without_a_profile_gets_a_hint(tmp_path: Path) -> None:
    assert plans.cluster_for("NVIDIA H100 80GB HBM3", tmp_path / "profile.json") == "h100-1x1"
    with pytest.raises(CannotRun, match="no profile"):
        plans.cluster_for("a GPU of tomorrow", tmp_path / "profile.json")


def test_rivals_run_where_memo_cannot_be_planned(tmp_path: Path) -> None:
    launch = launcher(tmp_path, "for c in cases: say(c, 'ok')")
    found = session(tmp_path, launch, cluster=None)
    found.scale = QUICK
    side_by_side.run(found)
    status = {row.rival: row.status for row in found.results.rows}
    assert status["checkpoint"] == "ok"
    assert {status[name] for name in (*side_by_side.MEMO, side_by_side.IDEAL)} == {"error"}


def test_a_system_that_ran_out_of_memory_skips_longer_sequences(tmp_path: Path) -> None:
    launch = launcher(tmp_path, "for c in cases: say(c, 'ok')")
    found = session(tmp_path, launch, cluster=None)
    found.scale = QUICK
    found.results.add(Row(rival="checkpoint", part="rivals", status="oom", sequence=256, layers=3))
    side_by_side.run(found)
    row = next(row for row in found.results.rows if row.rival == "checkpoint" and row.sequence == 512)
    assert row.status == "oom"
    assert "256" in row.message


def test_systems_with_other_losses_are_reported() -> None:
    shared = {"part": "rivals", "status": "ok", "model": "m", "sequence": 8}
    one = Row(rival="one", losses=[2.0, 1.0], grad_norms=[1.0], **shared)  # type: ignore[arg-type]
    close = msgspec.structs.replace(one, rival="close", losses=[2.0, 1.0009])
    far = msgspec.structs.replace(one, rival="far", losses=[2.0, 1.01])
    assert reference_of([far, one], ("absent", "one")) is one
    assert with_agreement(close, one, "bf16").agrees
    assert with_agreement(close, one, "fp32").agrees is False
    told = with_agreement(far, one, "bf16")
    assert told.agrees is False
    assert "one" in told.message
    assert with_agreement(msgspec.structs.replace(far, sequence=16), one, "bf16").agrees is None


def test_a_report_without_matplotlib_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uninstall("matplotlib", monkeypatch)
    results = Results(tmp_path)
    results.add(Row(rival="x", part="checks", status="ok"))
    write_report(results, "a command", lambda text: None, quick=False)
    assert "matplotlib is not installed" in (tmp_path / "report.md").read_text()
