"""Tests saving and resuming: a resumed run has the same losses, and a kill at any moment loses no checkpoint."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from memo_exec.commands.run import run
from memo_exec.commands.run_options import RunOptions
from memo_exec.distributed.world import World
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.training import checkpoint
from memo_exec.training import checkpoint_shards as stored
from memo_exec.training.weights import Held
from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.program.lower import lower
from tests.exec_cpu.plans import byte_decisions, write_plan
from tests.exec_cpu.small import gpt, llama, states
from tests.refusals import refused

STEPS = 6
FLAT = "state.safetensors"
DIFFERING = llama(vocab=256).of_layers([LayerShape(ffn_hidden=width) for width in (160, 64, 96)])


def as_version_1(folder: Path) -> None:
    """Rewrite a checkpoint's run.json as version 1 had it, without sums and without the run's identifier."""
    path = folder / checkpoint.RUN_FILE
    fields = json.loads(path.read_bytes()) | {"schema": "memo.checkpoint/1"}
    path.write_text(json.dumps({name: fields[name] for name in fields if name not in ("run", "files", "identity")}))


def losses(plan: Path, **options: Any) -> tuple[list[float], list[float]]:
    outcome = run(plan, RunOptions(**options))
    assert outcome is not None
    return outcome.comparison.losses, outcome.comparison.grad_norms


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="fp32"),
        pytest.param({"states": "host"}, id="states on the host"),
        pytest.param({"dtype": "bf16", "states": "pure-bf16"}, id="pure bf16"),
        pytest.param({"model": DIFFERING}, id="layers that differ"),
        pytest.param({"dtype": "bf16"}, id="bf16", marks=pytest.mark.slow),
        pytest.param({"states": "bf16"}, id="bf16 moments", marks=pytest.mark.slow),
        pytest.param({"model": llama(vocab=256)}, id="llama", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_has_the_losses_of_one_that_was_not_interrupted(tmp_path: Path, changes: dict[str, Any]) -> None:
    plan = write_plan(tmp_path / "plan.json", byte_decisions(**changes))
    whole = losses(plan, steps=STEPS)
    losses(plan, steps=4, save=tmp_path / "run", save_every=2)
    assert losses(plan, steps=STEPS, save=tmp_path / "run", resume=True) == whole


def test_a_run_goes_on_under_another_activation_policy(tmp_path: Path) -> None:
    swapping, keeping = byte_decisions(), byte_decisions(recompute="none", swapped_tokens=0)
    losses(write_plan(tmp_path / "a.json", swapping), steps=3, save=tmp_path / "run")
    resumed = losses(write_plan(tmp_path / "b.json", keeping), steps=STEPS, save=tmp_path / "run", resume=True)
    assert resumed[0] == pytest.approx(losses(tmp_path / "a.json", steps=STEPS)[0], rel=1e-6)


def test_hyperparameters_and_seed_stay_unless_given(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.json")
    chosen = {"learning_rate": 2e-3, "warmup_steps": 3}
    whole = losses(plan, steps=STEPS, seed=5, hyperparameters=chosen)
    losses(plan, steps=3, seed=5, hyperparameters=chosen, save=tmp_path / "run")
    assert losses(plan, steps=STEPS, save=tmp_path / "run", resume=True) == whole


def test_only_the_newest_is_kept_and_what_a_kill_left_is_removed(tmp_path: Path) -> None:
    """The lock file names the run that a kill ended; only its unfinished checkpoint is removed."""
    folder, killed = tmp_path / "run", "0123456789abcdef"
    for name in (f".unfinished-{killed}-0", ".unfinished-fedcba9876543210-0"):
        (folder / name).mkdir(parents=True)
    (folder / ".lock").write_text(json.dumps({"run": killed, "host": "a", "process": 1}))
    losses(write_plan(tmp_path / "plan.json"), steps=5, save=folder, save_every=2)
    left = [".lock", ".unfinished-fedcba9876543210-0", "step-00000005", "weights"]
    assert sorted(p.name for p in folder.iterdir()) == left
    state = checkpoint.load_run(tmp_path / "run/step-00000005")
    assert state.step == len(state.losses) == len(state.grad_norms) == 5


def test_what_is_not_whole_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, folder = write_plan(tmp_path / "plan.json"), tmp_path / "run"
    losses(plan, steps=2, save=folder)

    def full_disk(path: Path, document: msgspec.Struct) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(codec, "write", full_disk)
    with refused(UsageError, where=str(folder), got="No space left on device"):
        losses(plan, steps=3, save=folder, resume=True)
    found = checkpoint.latest(folder)
    assert found is not None
    assert found.name == "step-00000002"
    assert not list(folder.glob(".unfinished-*"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    losses(write_plan(folder / "plan.json"), steps=2, save=folder / "run")
    return folder


def resumed(folder: Path, **options: Any) -> None:
    run(folder / "plan.json", RunOptions(**({"steps": 4, "save": folder / "run", "resume": True} | options)))


def test_a_directory_in_use_is_not_overwritten(saved: Path) -> None:
    with refused(UsageError, where="step-00000002", hint=("--resume", "--save")):
        resumed(saved, resume=False)


def test_resume_contradictions_are_refused(saved: Path) -> None:
    with refused(UsageError, what="--resume", hint="--save DIR"):
        resumed(saved, save=None)
    with refused(UsageError, got="--seed 3", wanted="0", hint="--seed"):
        resumed(saved, seed=3)
    with refused(UsageError, where="step-00000002", got="step 2", wanted="--steps of 2 or more"):
        resumed(saved, steps=1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": gpt(vocab=256, layers=2)}, "model"),
        ({"seq_tokens": 128}, "seq_tokens"),
        ({"states": "bf16"}, "states"),
        ({"global_batch": 4}, "global_batch"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    saved: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    plan = write_plan(tmp_path / "plan.json", byte_decisions(**changes))
    with refused(BadInput, where=f"run.json: $.{named}", hint="--save"):
        run(plan, RunOptions(steps=4, save=saved / "run", resume=True))


def test_other_data_is_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("another text " * 100)
    with refused(BadInput, where="run.json: $.data.sha256"):
        resumed(saved, data=tmp_path / "other.txt")


@pytest.mark.parametrize("file", [checkpoint.RUN_FILE, "state/.metadata", "state/__0_0.distcp"])
def test_a_truncated_checkpoint_is_refused(saved: Path, tmp_path: Path, file: str) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    broken = tmp_path / "copy/run/step-00000002" / file
    broken.write_bytes(broken.read_bytes()[:100])
    with refused(BadInput, where=str(broken)):
        resumed(tmp_path / "copy")


@pytest.mark.parametrize(
    ("whole", "name", "got"),
    [
        ((256, 64), "params/embed/nothing.weight", ()),
        ((128, 64), "params/embed/tokens.weight", ("(256, 64)", "(128, 64)")),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    saved: Path, whole: tuple[int, ...], name: str, got: tuple[str, ...]
) -> None:
    found = checkpoint.latest(saved / "run")
    assert found is not None
    with refused(BadInput, where=str(found / "state"), got=("rank 0", name, *got)):
        stored.read(found / "state", {name: [Held(name, whole, (0, 0), torch.zeros(whole))]}, World())


def test_a_checkpoint_of_flat_blocks_is_read(tmp_path: Path) -> None:
    """One process wrote such checkpoints in versions before layouts."""
    plan = write_plan(tmp_path / "plan.json")
    whole = losses(plan, steps=STEPS)
    losses(plan, steps=3, save=tmp_path / "run")
    found = checkpoint.latest(tmp_path / "run")
    assert found is not None
    decisions = byte_decisions()
    with Interpreter(decisions, lower(decisions)[0]) as interpreter:
        checkpoint.load_state(found, interpreter, World())
        save_file(states(interpreter), found / FLAT)
    shutil.rmtree(found / "state")
    as_version_1(found)
    assert losses(plan, steps=STEPS, save=tmp_path / "run", resume=True) == whole


def test_flat_blocks_of_another_model_are_refused(tmp_path: Path) -> None:
    decisions = byte_decisions()
    with Interpreter(decisions, lower(decisions)[0]) as interpreter:
        short = {name: value[:5].clone() for name, value in states(interpreter).items()}
        for tensors, fields in (
            ({"params.embed/0": torch.zeros(3)}, {"got": None, "wanted": "embed/0"}),
            (short, {"what": "embed/0", "got": ("5", "tokens.weight"), "wanted": ("16384", "torch.float32")}),
        ):
            save_file(tensors, tmp_path / FLAT)
            with refused(BadInput, where=FLAT, **fields):
                checkpoint.load_state(tmp_path, interpreter, World())


def test_resuming_where_nothing_was_saved_begins(tmp_path: Path) -> None:
    notes: list[str] = []
    plan = write_plan(tmp_path / "plan.json")
    outcome = run(plan, RunOptions(steps=1, save=tmp_path / "run", resume=True), note=notes.append)
    assert outcome is not None
    assert any("starting with step 1" in note for note in notes)


def command(plan: Path, folder: Path, steps: int) -> list[str]:
    options = ["--steps", str(steps), "--save", str(folder), "--save-every", "1", "--resume", "--json"]
    return [sys.executable, "-m", "memo_exec", "run", str(plan), *options]


@pytest.mark.slow
def test_killed_at_any_step_it_resumes_with_the_same_losses(tmp_path: Path) -> None:
    plan, folder = write_plan(tmp_path / "plan.json"), tmp_path / "run"
    whole = losses(plan, steps=5)
    process = subprocess.Popen(command(plan, folder, 10**6), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while not process.stderr.readline().startswith("step     3"):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)  # the process then saves step 3 or plays step 4
    process.communicate()
    found = checkpoint.latest(folder)
    assert found is not None
    assert checkpoint.load_run(found).step in (2, 3)
    assert losses(plan, steps=5, save=folder, save_every=1, resume=True) == whole
