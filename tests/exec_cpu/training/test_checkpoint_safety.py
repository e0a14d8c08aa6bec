"""Tests that a checkpoint is never lost, never mixed up, and never runs what a file says."""

import fcntl
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from memo_exec.commands.run import run
from memo_exec.commands.run_options import RunOptions
from memo_exec.distributed.world import launched
from memo_exec.training import checkpoint, run_folder
from memo_exec.training.checkpoint_metadata import read_metadata
from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput, UsageError
from tests.cli.commands import memo_exec
from tests.exec_cpu.plans import write_plan
from tests.exec_cpu.training.test_checkpoint import as_version_1
from tests.refusals import refused

STEP = "step-00000002"


def play(folder: Path, **options: Any) -> list[float]:
    """Play the plan in ``folder`` to step 4 and return the losses."""
    chosen = {"steps": 4, "save": folder / "run", "resume": True} | options
    outcome = run(folder / "plan.json", RunOptions(**chosen))
    return outcome.comparison.losses if outcome is not None else []


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    write_plan(folder / "plan.json")
    play(folder, steps=2, resume=False)
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    """A copy of a run that ended after two steps."""
    return Path(shutil.copytree(original, tmp_path / "saved"))


def sealed(folder: Path) -> None:
    """Write run.json anew with the sums of the files as they are now, as somebody who means harm would."""
    path = folder / checkpoint.RUN_FILE
    state = checkpoint.load_run(folder)
    files = {name: checkpoint.sum_of(folder / "state" / name) for name in state.files}
    fields = json.loads(path.read_bytes()) | {"files": files, "identity": ""}
    path.write_text(json.dumps(fields))
    unsigned = codec.read(path, checkpoint.RunState)
    path.write_text(json.dumps(fields | {"identity": codec.sha256_of(unsigned)}))


class Planted:
    """An object whose pickle runs a command when Python's own reader loads it."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.made}",)


def test_a_planted_command_in_the_metadata_is_not_run(saved: Path, tmp_path: Path) -> None:
    (saved / "run" / STEP / "state/.metadata").write_bytes(pickle.dumps(Planted(tmp_path / "made")))
    sealed(saved / "run" / STEP)
    with refused(BadInput, where=".metadata", got="it imports posix.system"):
        play(saved)
    assert not (tmp_path / "made").exists()


def test_metadata_is_what_torch_itself_reads(saved: Path) -> None:
    folder = saved / "run" / STEP / "state"
    with (folder / ".metadata").open("rb") as file:
        theirs = pickle.load(file)
    ours = read_metadata(folder)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert {(key.fqn, key.offset): place for key, place in ours.storage_data.items()} == {
        (key.fqn, key.offset): place for key, place in theirs.storage_data.items()
    }


@pytest.mark.parametrize(
    ("path", "value", "got"),
    [
        ("relative_path", "../../../plan.json", "plan.json"),
        ("relative_path", "/etc/passwd", "/etc/passwd"),
        ("length", 2**40, "bytes"),
        ("offset", -1, "offset of -1"),
    ],
)
def test_tensors_are_read_only_from_the_shards_beside_the_metadata(
    saved: Path, path: str, value: object, got: str
) -> None:
    file = saved / "run" / STEP / "state/.metadata"
    found = pickle.loads(file.read_bytes())
    place = found.storage_data[MetadataIndex("params/embed/tokens.weight", (0, 0))]
    setattr(place, path, value)
    file.write_bytes(pickle.dumps(found))
    with refused(BadInput, got=got):
        read_metadata(file.parent)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("file", ["state/__0_0.distcp", "state/.metadata"])
def test_a_flipped_bit_is_refused(saved: Path, file: str) -> None:
    flip(saved / "run" / STEP / file)
    with refused(BadInput, what="not the one that was written", where=file):
        play(saved)


def test_another_runs_shard_is_refused(saved: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    write_plan(other / "plan.json")
    play(other, steps=2, resume=False, seed=1)
    shutil.copy(other / "run" / STEP / "state/__0_0.distcp", saved / "run" / STEP / "state")
    with refused(BadInput, what="not the one that was written", where="__0_0.distcp"):
        play(saved)


def test_an_edited_step_is_refused(saved: Path) -> None:
    path = saved / "run" / STEP / checkpoint.RUN_FILE
    path.write_text(path.read_text().replace('"step": 2', '"step": 1'))
    with refused(BadInput, what="not the one that was written", where="run.json"):
        play(saved)


def test_an_identifier_that_is_a_path_is_refused(saved: Path) -> None:
    path = saved / "run" / STEP / checkpoint.RUN_FILE
    fields = json.loads(path.read_bytes())
    path.write_text(json.dumps(fields | {"run": "../../elsewhere"}))
    with refused(BadInput, where="run.json: $.run"):
        play(saved)
    assert not [each for each in saved.rglob("*") if "elsewhere" in each.name]


def test_a_checkpoint_without_sums_stays_readable(saved: Path) -> None:
    """Version 1 had neither sums nor the run's identifier."""
    as_version_1(saved / "run" / STEP)
    assert len(play(saved)) == 4
    assert checkpoint.load_run(saved / "run/step-00000004").run


def test_what_other_programs_put_into_the_folder_stays(saved: Path) -> None:
    foreign = [saved / "run/step-00000001", saved / "run/step-9", saved / "run/.unfinished-mine"]
    for path in foreign:
        path.mkdir()
        (path / "notes.txt").write_text("keep me")
    kept = saved / "elsewhere"
    kept.mkdir()
    (saved / "run/step-00000000").symlink_to(kept)
    play(saved)
    assert all((path / "notes.txt").read_text() == "keep me" for path in foreign)
    assert (saved / "run/step-00000000").is_symlink()
    assert kept.is_dir()
    assert not (saved / "run" / STEP).exists()


def test_a_name_that_the_run_needs_is_refused_before_the_first_step(saved: Path) -> None:
    (saved / "run/step-00000003").mkdir()
    with refused(UsageError, where="step-00000003", hint="--save"):
        play(saved)


@pytest.mark.parametrize("file", [checkpoint.RUN_FILE, "state/.metadata", "state/__0_0.distcp"])
def test_links_are_not_followed(saved: Path, tmp_path: Path, file: str) -> None:
    path = saved / "run" / STEP / file
    shutil.move(path, tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with refused(BadInput, where=file, got="a link"):
        play(saved)


HOLDER = """
import sys, time
from pathlib import Path
from memo_exec.training.run_folder import locked
with locked(Path(sys.argv[1]), "0123456789abcdef"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_one_run_at_a_time_uses_a_folder_and_a_kill_frees_it(saved: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(saved / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with refused(UsageError, what="another run", where=str(saved / "run"), got=f"process {holder.pid}"):
            play(saved)
        holder.kill()
    assert len(play(saved)) == 4


def test_a_file_system_without_locks_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*args: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    with refused(UsageError, what="no locks", where=str(saved / "run"), got="not supported"):
        play(saved)


def test_a_run_that_wrote_in_between_is_noticed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is chosen before the lock is held; another run may end in between."""
    real = run_folder.locked

    def locked(directory: Path, name: str) -> object:
        shutil.copytree(directory / STEP, directory / "step-00000003")
        return real(directory, name)

    monkeypatch.setattr(run_folder, "locked", locked)
    with refused(UsageError, what="another run has just written", where=str(saved / "run")):
        play(saved)


def test_a_state_that_is_not_finite_never_replaces_a_good_one(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoint.state_of

    def poisoned(interpreter: Any) -> Any:
        state = real(interpreter)
        state["moment2/layer.1/qkv.weight"][0].view.view(-1)[-1] = float("inf")
        return state

    monkeypatch.setattr(checkpoint, "state_of", poisoned)
    (saved / "other").mkdir()
    plan = write_plan(saved / "other/plan.json")
    with refused(UsageError, where="step 1, rank 0", got="moment2/layer.1/qkv.weight", hint="--lr"):
        run(plan, RunOptions(steps=1, save=saved / "other/run"))
    assert checkpoint.latest(saved / "other/run") is None
    assert not list((saved / "other/run").glob(".unfinished*"))


def test_after_a_bad_step_the_last_good_checkpoint_is_named(saved: Path) -> None:
    with refused(UsageError, where="step ", hint=("last good checkpoint", "run/step-0000000", "--lr")):
        play(saved, steps=9, save_every=1, hyperparameters={"learning_rate": 1e38})
    left = checkpoint.latest(saved / "run")
    assert left is not None
    state = {name: parts[0].view for name, parts in _stored(left).items()}
    assert all(bool(value.isfinite().all()) for value in state.values())


def _stored(folder: Path) -> dict[str, list[Any]]:
    from memo_exec.distributed.world import World
    from memo_exec.training import checkpoint_shards as stored
    from memo_exec.training.weights import Held

    metadata = read_metadata(folder / "state").state_dict_metadata
    found = {
        name: [Held(name, tuple(entry.size), (0,) * len(entry.size), torch.empty(entry.size))]
        for name, entry in metadata.items()
    }
    stored.read(folder / "state", found, World())
    return found


def test_a_run_killed_before_its_weights_writes_them_on_resume(saved: Path) -> None:
    before = {path.name: path.read_bytes() for path in (saved / "run/weights").iterdir()}
    shutil.rmtree(saved / "run/weights")
    done = memo_exec("run", saved / "plan.json", "--steps", 2, "--resume", "--save", saved / "run")
    assert done.returncode == 0, done.stderr
    assert "all 2 steps had been played already" in done.stderr
    assert {path.name: path.read_bytes() for path in (saved / "run/weights").iterdir()} == before


@pytest.mark.parametrize(
    "changes", [{"RANK": "2"}, {"RANK": "9"}, {"LOCAL_RANK": "2"}, {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "1"}]
)
def test_a_rank_beyond_the_world_is_refused(changes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"} | changes).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False) if "LOCAL_WORLD_SIZE" not in changes else None
    with refused(UsageError, what=next(iter(reversed(changes)))):
        launched()


def test_a_thread_that_cannot_start_is_not_a_bug(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = memo_exec("run", saved / "plan.json", "--steps", 1)
    assert done.returncode == 6, done.stderr
    assert "thread" in done.stderr
    assert "bug" not in done.stderr


def test_runs_of_one_lineage_share_an_identifier(saved: Path) -> None:
    first = checkpoint.load_run(saved / "run" / STEP)
    play(saved)
    assert checkpoint.load_run(saved / "run/step-00000004").run == first.run
    assert len(first.run) == 16
