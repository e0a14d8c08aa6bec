"""``memo-exec`` as scripts use it: documents, exit codes, messages, signals, and what starting up loads."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
import pytest
import torch
from click.testing import CliRunner
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from memo_exec.cli import _fail, cli
from memo_exec.commands import run
from memo_sim.contract import codec
from memo_sim.contract.catalog import load_model
from memo_sim.contract.comparison import Comparison
from memo_sim.contract.errors import CannotRun, OutOfTolerance, RankLost
from memo_sim.contract.expert_load import MeasuredLoad
from memo_sim.contract.plan import Decisions, Kernels, Layout, Plan
from memo_sim.contract.requests import Requests
from memo_sim.contract.trace import Trace
from memo_sim.contract.units import format_bytes
from memo_sim.views.command_line import with_progress
from tests.cli.commands import check_refused, memo_exec, shell
from tests.exec_cpu.plans import byte_decisions, placed, plan_of, predicted, write_plan
from tests.refusals import Expected, check_fields

OPTIONS = {
    "calibrate": {"--output", "--name", "--budget-s", "--dtype"},
    "compare": {"--tolerance", "--trace", "--plot", "--report", "--json"},
    "doctor": set(),
    "profile": {"--steps", "--trace", "--output", "--requests"},
    "run": {
        *("--data", "--weights", "--steps", "--seed", "--lr", "--warmup-steps", "--decay-steps", "--final-fraction"),
        *("--weight-decay", "--clip", "--beta1", "--beta2", "--eps", "--save", "--save-every", "--resume"),
        *(
            "--tolerance",
            "--trace",
            "--measured",
            "--report",
            "--debug",
            "--replay-allocator",
            "--json",
            "--expert-load",
        ),
        *("--adapters", "--tokenizer", "--clip-ratio", "--clip-ratio-high", "--kl-weight"),
    },
    "verify": {"--device", "--seed", "--steps", "--layers", "--json"},
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plan(tmp_path_factory.mktemp("plan") / "plan.json", prediction=predicted())


def test_no_option_comes_or_goes_unnoticed() -> None:
    found = {
        name: {o for p in command.params for o in p.opts if o[:2] == "--"} for name, command in cli.commands.items()
    }
    assert found == OPTIONS


def test_help_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['memo-exec', 'run', '--help']\n"
        "try:\n    from memo_exec.cli import main; main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'safetensors', 'rich', 'simpy', 'matplotlib'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path, check=True
    )
    assert "Train as PLAN says" in done.stdout
    assert done.stderr.strip() == "[]"


def test_run_prints_one_document_and_nothing_else(plan: Path, tmp_path: Path) -> None:
    names = {"--trace": "perfetto.json", "--measured": "measured.json", "--report": "run.html"}
    files = {option: tmp_path / name for option, name in names.items()}
    written = [part for pair in files.items() for part in pair]
    done = shell("memo_exec", "run", plan, "--steps", 3, "--json", *written)
    assert done.returncode == 0, done.stderr
    comparison = codec.decode(done.stdout.encode(), Comparison, where="stdout")
    assert len(comparison.losses) == len(comparison.grad_norms) == 3
    assert comparison.ratio is not None
    assert done.stderr.count("step ") == 3
    events = json.loads(files["--trace"].read_text())["traceEvents"]
    assert any(event["ph"] == "X" for event in events)
    measured = codec.read(files["--measured"], Trace)
    assert measured.origin == "measured"
    assert measured.step_s == comparison.measured.step_s
    page = files["--report"].read_text()
    assert "The measured step takes" in page
    assert "Gradient norm" in page


def test_run_prints_a_table_for_people(plan: Path) -> None:
    done = memo_exec("run", plan, "--steps", 1)
    assert done.returncode == 0
    assert "predicted" in done.stdout
    assert "compute" in done.stdout
    assert not done.stdout.lstrip().startswith("{")


def test_tolerance_sets_the_exit_code_after_the_document(plan: Path) -> None:
    done = memo_exec("run", plan, "--steps", 1, "--json", "--tolerance", "0.000001")
    assert done.returncode == 5
    check_fields(done.error, OutOfTolerance, got="%", wanted="0.0 %")
    codec.decode(done.stdout.encode(), Comparison, where="stdout")


def test_profile_then_compare(plan: Path, tmp_path: Path) -> None:
    measured, perfetto = tmp_path / "measured.json", tmp_path / "both.json"
    done = memo_exec("profile", plan, "--steps", 2, "-o", measured, "--trace", tmp_path / "one.json")
    assert done.returncode == 0, done.stderr
    done = memo_exec("compare", plan, measured, "--json", "--trace", perfetto)
    assert done.returncode == 0, done.stderr
    comparison = codec.decode(done.stdout.encode(), Comparison, where="stdout")
    assert comparison.measured.ops["linear"] > 0
    assert perfetto.is_file()
    done = memo_exec("compare", plan, measured, "--tolerance", "0.000001")
    assert done.returncode == 5
    check_fields(done.error, OutOfTolerance, got="%", wanted="0.0 %")


def test_compare_draws_both_timelines(plan: Path, tmp_path: Path) -> None:
    """A trace beside the plan is the predicted one; without any there is nothing to draw."""
    measured, picture = tmp_path / "measured.json", tmp_path / "both.svg"
    done = memo_exec("profile", plan, "--steps", 1, "-o", measured, "--trace", tmp_path / "one.json")
    assert done.returncode == 0, done.stderr
    done = memo_exec("compare", plan, measured, "--plot", picture)
    check_refused(done, 2, {"where": "both.svg", "hint": ("memo-sim what-if -o", "--plot")})
    assert not picture.exists()
    done = memo_exec("compare", measured, measured, "--plot", picture)
    assert done.returncode == 0, done.stderr
    assert "predicted / measured 1.000" in picture.read_text()
    done = memo_exec("compare", plan, measured, "--plot", tmp_path / "both.doc")
    check_refused(done, 2, {"where": "both.doc", "wanted": ".png, .svg, .pdf"})
    done = memo_exec("compare", plan, shutil.copy(measured, picture), "--plot", picture)
    check_refused(done, 2, {"where": "both.svg", "hint": "another file"})


def test_doctor_says_what_is_here() -> None:
    done = CliRunner().invoke(cli, ["doctor"])
    assert done.exit_code == 0
    assert "attention torch-flash-cpu" in done.output
    assert "host memory" in done.output


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory, plan: Path) -> Path:
    """A folder of plans that cannot be used."""
    folder = tmp_path_factory.mktemp("wrong")
    raw = plan.read_text()
    (folder / "truncated.json").write_text(raw[:200])
    (folder / "unknown.json").write_text(raw.replace('"dtype"', '"dtpye"'))
    (folder / "negative.json").write_text(raw.replace('"seq_tokens": 256', '"seq_tokens": -256'))
    (folder / "edited.json").write_text(raw.replace('"seq_tokens": 256', '"seq_tokens": 512'))
    write_plan(folder / "fp16.json", byte_decisions(dtype="fp16"))
    read = codec.read(plan, Plan)
    metp = msgspec.structs.replace(read.decisions, layout=Layout(metp=2, tp=2))
    codec.write(folder / "metp.json", msgspec.structs.replace(read, decisions=metp))
    tp3 = msgspec.structs.replace(read.decisions, layout=Layout(tp=3))
    codec.write(folder / "tp3.json", msgspec.structs.replace(read, decisions=tp3))
    write_plan(folder / "tp2.json", byte_decisions(layout=Layout(tp=2)))
    return folder


@pytest.mark.parametrize(
    ("file", "code", "fields"),
    [
        ("none.json", 3, {"where": "none.json", "got": None}),
        ("truncated.json", 3, {"where": "truncated.json", "got": "early"}),
        ("unknown.json", 3, {"where": "$.decisions.dtpye", "hint": "'dtype'"}),
        ("negative.json", 3, {"where": "$.decisions.seq_tokens", "got": "-256"}),
        ("edited.json", 3, {"where": "$.program_sha256", "hint": "memo-sim what-if"}),
        ("metp.json", 3, {"where": "layout.tp", "got": "metp 2"}),
        ("tp3.json", 3, {"where": "tp3.json", "got": "4", "wanted": "a multiple of 3", "hint": "memo-sim what-if"}),
        ("tp2.json", 6, {"where": "layout", "wanted": "2", "hint": "torchrun --nproc_per_node 2 -m memo_exec run"}),
        ("fp16.json", 6, {"where": "$.decisions.dtype", "got": "fp16", "wanted": "fp32"}),
    ],
)
def test_a_plan_that_cannot_be_used(wrong: Path, file: str, code: int, fields: dict[str, Expected]) -> None:
    check_refused(memo_exec("run", wrong / file, "--json"), code, fields)


def test_a_shell_gets_the_message_and_the_exit_code(wrong: Path) -> None:
    done = shell("memo_exec", "run", wrong / "truncated.json", "--json")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == memo_exec("run", wrong / "truncated.json", "--json").stderr
    assert "truncated.json" in done.stderr


def test_wrong_usage(plan: Path, tmp_path: Path) -> None:
    check_refused(memo_exec("run", plan, "--steps", "0"), 2, "--steps")
    check_refused(memo_exec("run", plan, "--resume"), 2, {"what": "--resume", "hint": "--save DIR"})
    nowhere = tmp_path / "none" / "here.json"
    check_refused(memo_exec("calibrate", "-o", nowhere), 2, {"where": str(nowhere)})
    check_refused(memo_exec("run", plan, "--measured", nowhere), 2, {"where": str(nowhere)})
    check_refused(memo_exec("run", plan, "--save", plan / "run"), 2, {"where": str(plan / "run")})
    unknown = memo_exec("clibrate")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "clibrate" in unknown.stderr


@pytest.mark.parametrize(
    "arguments",
    [("profile", ""), ("profile", "", "--requests"), ("run", ""), ("calibrate", "-o", ""), ("compare", "", "x.json")],
    ids=" ".join,
)
def test_an_empty_name_is_no_file(arguments: tuple[str, ...]) -> None:
    done = memo_exec(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert isinstance(done.error, click.BadParameter)


def test_a_bug_is_one_line_and_says_how_to_see_more(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("boom")

    monkeypatch.setattr(run, "run", broken)
    done = memo_exec("run", plan)
    assert (done.returncode, done.stdout) == (1, "")
    assert "MEMO_TRACEBACK=1" in done.stderr
    assert "Traceback" not in done.stderr
    monkeypatch.setenv("MEMO_TRACEBACK", "1")
    assert "Traceback" in memo_exec("run", plan).stderr


def test_under_torchrun_the_message_is_left_for_it_to_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Read by torch's own reader; the rank that only lost another one is not the first in time."""
    own, lost = tmp_path / "own.json", tmp_path / "lost.json"
    monkeypatch.setattr(time, "time", lambda: 1000.7)
    for path, error in ((own, CannotRun("broken")), (lost, RankLost("broken"))):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        with pytest.raises(SystemExit) as left:
            _fail("broken\n  next: mend it", 6, error)
        assert left.value.code == 6
    assert capsys.readouterr().err == ""
    failures = {rank: ProcessFailure(rank, 1, 6, str(path)) for rank, path in ((0, lost), (1, own))}
    said = ChildFailedError("memo_exec", failures).format_msg()
    cause = said[said.index("Root Cause") :]
    assert "rank      : 1" in cause
    assert "exitcode  : 6" in cause
    assert "memo-exec: broken\n    next: mend it" in cause


def test_a_message_that_cannot_be_left_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere/error.json"))
    with pytest.raises(SystemExit):
        _fail("broken", 6, CannotRun("broken"))
    assert capsys.readouterr().err == "memo-exec: broken\n"


@pytest.mark.parametrize(
    ("kind", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_run_cleanly_after_the_step(plan: Path, tmp_path: Path, kind: int, code: int) -> None:
    command = [
        sys.executable,
        "-m",
        "memo_exec",
        "run",
        str(plan),
        "--steps",
        "1000000",
        "--save",
        str(tmp_path / "run"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while not process.stderr.readline().startswith("step     2"):
        assert process.poll() is None
    process.send_signal(kind)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert out == ""
    assert "Traceback" not in err
    last = int(err.split("interrupted after step ")[1])
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", f"step-{last:08d}"]


def test_profile_records_requests_of_a_step_that_fits_no_machine_here(tmp_path: Path) -> None:
    long = Decisions(model=load_model("gpt-7b"), seq_tokens=16_384, recompute="full", kernels=Kernels())
    codec.write(tmp_path / "long.json", plan_of(long))
    done = memo_exec("profile", tmp_path / "long.json", "--requests")
    assert done.returncode == 0, done.stderr
    assert "recorded with   fake tensors" in done.stdout
    assert "1.0000 of the program's" in done.stdout
    assert "unexplained     no tensors" in done.stdout
    found = codec.read(tmp_path / "long.requests.json", Requests)
    assert max(found.size_bytes) > 2**30
    assert {"state", "transient", "not observed"} <= set(found.classes)
    done = memo_exec("profile", tmp_path / "long.json", "--requests", "-o", tmp_path / "no" / "x.json")
    check_refused(done, 2, {"where": str(tmp_path / "no" / "x.json")})


def test_a_run_says_what_lies_outside_its_arena(plan: Path) -> None:
    done = memo_exec("run", plan, "--steps", 1)
    arena = format_bytes(placed(byte_decisions()).arena_bytes)
    (line,) = [line for line in done.stderr.splitlines() if "device: " in line]
    assert arena in line
    assert "library calls" in line


def test_a_wrong_placement_is_refused(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json")
    plan, right = codec.read(path, Plan), placed(byte_decisions())
    wrong = msgspec.structs.replace(right, offset_bytes=[0] * len(right.ids))
    codec.write(tmp_path / "plan.placement.json", wrong)
    check_refused(
        memo_exec("run", path, "--steps", 1),
        3,
        {"where": "plan.placement.json", "got": codec.sha256_of(wrong)[:16], "wanted": plan.placement_sha256[:16]},
    )
    codec.write(path, msgspec.structs.replace(plan, placement_sha256=codec.sha256_of(wrong)))
    done = memo_exec("run", path, "--steps", 1, "--json")
    check_refused(done, 3, {"where": "plan.placement.json", "got": "input.ids[0] and "})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_the_replaying_allocator_is_for_cuda(plan: Path) -> None:
    done = memo_exec("run", plan, "--replay-allocator", "--json")
    check_refused(done, 6, {"got": "CPU", "wanted": "CUDA", "hint": "--replay-allocator"})


def test_a_planned_plan_without_its_placement_cannot_run(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json")
    (tmp_path / "plan.placement.json").unlink()
    check_refused(memo_exec("run", path, "--steps", 1), 3, {"hint": "memo-sim plan-memory"})


def test_progress_is_told_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line at the most every few seconds, on standard error."""
    times = iter([0.0, 4.0, 11.0, 15.0, 22.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))

    def work(tell: Callable[[int, int], None]) -> str:
        for done in (1, 2, 3, 4):
            tell(done, 4)
        return "found"

    assert with_progress("calibrating", work, told="measurements") == "found"
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == ["calibrating: 2 of 4 measurements, 11 s", "calibrating: 4 of 4 measurements, 22 s"]


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("profile PLAN --requests --trace t.json --steps 9", {"got": "--steps, --trace"}),
        ("profile PLAN --requests --steps 5", {"got": "--steps"}),
        ("run PLAN --save-every 3", {"hint": "--save DIR"}),
        ("run PLAN --save run --weights run/weights", {"where": "run/weights"}),
        ("run PLAN --expert-load load.json", {"where": "--expert-load"}),
    ],
)
def test_options_that_would_change_nothing_are_refused(plan: Path, line: str, fields: dict[str, Expected]) -> None:
    done = memo_exec(*(str(plan) if part == "PLAN" else part for part in line.split()))
    check_refused(done, 2, fields)


def test_a_run_writes_the_load_of_its_experts(tmp_path: Path) -> None:
    decisions = msgspec.structs.replace(byte_decisions(), model=load_model("mixtral-tiny"))
    path, load = write_plan(tmp_path / "plan.json", decisions, prediction=predicted()), tmp_path / "load.json"
    done = memo_exec("run", str(path), "--steps", "1", "--expert-load", str(load))
    assert done.returncode == 0, done.stderr
    assert "memo-sim what-if ... --expert-load" in done.stderr
    found = codec.read(load, MeasuredLoad)
    rows = decisions.global_batch * decisions.seq_tokens * decisions.model.mixture.per_token
    assert [sum(each.rows) for each in found.layers] == [rows] * decisions.model.layers


def test_an_option_with_one_value_is_given_once() -> None:
    check_refused(memo_exec("run", "plan.json", "--steps", "2", "--steps", "3"), 2, "--steps")
