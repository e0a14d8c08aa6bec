"""Tests ``memo-exec run`` with several ranks: losses of one process, checkpoints for other layouts, ranks that die."""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from memo_exec.commands.run import run
from memo_exec.commands.run_options import RunOptions
from memo_exec.commands.run_outcome import Outcome
from memo_exec.distributed.world import joined, launched
from memo_exec.training import checkpoint
from memo_exec.training.loop import StepFigure, Training
from memo_sim.contract import codec
from memo_sim.contract.errors import CannotRun, MemoError, UsageError
from memo_sim.contract.plan import Layout, Plan
from memo_sim.contract.trace import Spans
from tests.distributed.team import Failed, Member, Team
from tests.exec_cpu.plans import BYTES, byte_decisions, predicted, write_plan
from tests.exec_cpu.small import gpt

STEPS, SAVED = 5, 3
TOLERANCE = 1e-5
STAGES = {
    "one4": Layout(),
    "pp2": Layout(pp=2),
    "pp2-dp2-zero1": Layout(pp=2, dp=2, zero=1),
    "pp2-dp2-zero3": Layout(pp=2, dp=2, zero=3),
    "interleaved": Layout(pp=2, schedule="interleaved", virtual_stages=2),
}
"""Layouts for a model with four layers: two pipeline stages of two virtual stages each."""

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
TORCHRUN += ["-m", "memo_exec", "run"]
QUICK = {("tp2", "one"), ("tp2", "dp2-zero3"), ("dp3-zero2", "tp4"), ("cp2-dp2-zero1-over2", "cp2-dp2-zero3-over2")}
SAVED_BY = ("tp2", "dp3-zero2", "cp2-dp2-zero1-over2")
"""Pairs of the default run: the layout that saves a checkpoint, and the one that resumes from it."""

LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2),
    "tp4": Layout(tp=4),
    "cp2": Layout(cp=2),
    "dp2-zero1": Layout(dp=2, zero=1),
    "dp2-zero3": Layout(dp=2, zero=3),
    "dp3-zero2": Layout(dp=3, zero=2),
    "cp2-dp2-zero1-over2": Layout(cp=2, dp=2, zero=1, zero_ranks=2),
    "cp2-dp2-zero3-over2": Layout(cp=2, dp=2, zero=3, zero_ranks=2),
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one plan per layout, all of the same training."""
    folder = tmp_path_factory.mktemp("plans")
    for name, layout in LAYOUTS.items():
        write_plan(folder / f"{name}.json", byte_decisions(layout=layout, global_batch=6))
    for name, layout in STAGES.items():
        stages = byte_decisions(model=gpt(vocab=BYTES, layers=4), layout=layout, global_batch=4)
        write_plan(folder / f"{name}.json", stages)
    late = byte_decisions(layout=Layout(dp=2, zero=1), global_batch=6, dtype="bf16", overlap="both")
    write_plan(folder / "late.json", late)
    return folder


def play(member: Member, plan: Path, options: dict[str, Any]) -> Outcome:
    """Run a plan as one of its ranks."""
    outcome = run(plan, RunOptions(**options))
    assert outcome is not None
    assert outcome.rank == member.rank
    return outcome


def outcomes(team: Team, plans: Path, name: str, **options: Any) -> list[Outcome]:
    world = (LAYOUTS | STAGES | {"late": Layout(dp=2)})[name].devices
    found: list[Outcome] = team.play(play, world, plans / f"{name}.json", {"steps": STEPS} | options, meets=False)
    return found


@pytest.fixture(scope="module")
def whole(team: Team, plans: Path) -> list[float]:
    """The losses of one process."""
    return outcomes(team, plans, "one")[0].comparison.losses


@pytest.fixture(scope="module")
def saved(team: Team, plans: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints after a few steps of each of these layouts."""
    folder = tmp_path_factory.mktemp("saved")
    for name in SAVED_BY:
        outcomes(team, plans, name, steps=SAVED, save=folder / name)
    return folder


def test_ranks_have_the_losses_of_one_process_and_a_peak_each(team: Team, plans: Path, whole: list[float]) -> None:
    found = outcomes(team, plans, "tp2")
    for outcome in found:
        comparison = outcome.comparison
        assert comparison.losses == pytest.approx(whole, rel=TOLERANCE)
        assert len(comparison.step_s_by_rank) == len(comparison.peak_device_bytes_by_rank) == 2
        assert comparison.measured.step_s == max(comparison.step_s_by_rank)
        assert outcome.measured.rank == outcome.rank
        assert outcome.measured.world_size == 2
    assert found[0].comparison == found[1].comparison


def test_a_receive_is_busy_as_long_as_its_send(team: Team, plans: Path) -> None:
    """A wait for the other stage's kernels does not count as transfer; the first stage waits for every gradient."""
    first, second = (outcome.measured.spans for outcome in outcomes(team, plans, "pp2-dp2-zero1")[::2])

    def seconds(spans: Spans, lane: str) -> list[float]:
        rows = zip(spans.lanes, spans.start_s, spans.end_s, strict=True)
        return [end - start for at, start, end in rows if at == lane]

    for one, other in ((first, second), (second, first)):
        assert len(seconds(one, "send")) == 2
        assert seconds(one, "send") == pytest.approx(seconds(other, "recv"), abs=1e-9)


def test_a_rank_of_a_pipeline_is_compared_with_its_own_stage(team: Team, plans: Path) -> None:
    """In both columns only the first stage has the embedding and only the last one the loss.

    The memory is that of the rank that uses the most.
    """
    plan = write_plan(plans / "known.json", codec.read(plans / "pp2.json", Plan).decisions, predicted())
    for outcome, beside in zip(outcomes(team, plans, "pp2"), ("trace", "trace.stage1"), strict=True):
        codec.write(plans / f"known.{beside}.json", outcome.measured)
    found: list[Outcome] = team.play(play, 2, plan, {"steps": 3}, meets=False)
    for outcome in found:
        assert outcome.predicted is not None
        assert outcome.predicted.spans.ids == outcome.measured.spans.ids
    comparison = found[0].comparison
    assert comparison.predicted is not None
    assert set(comparison.predicted.ops) == set(comparison.measured.ops)
    assert set(comparison.predicted.lanes) == set(comparison.measured.lanes)
    assert comparison.predicted.moved_bytes == comparison.measured.moved_bytes
    assert comparison.measured.peak_device_bytes == max(comparison.peak_device_bytes_by_rank)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=() if way in QUICK else pytest.mark.slow, id="-to-".join(way))
        for way in product(SAVED_BY, LAYOUTS)
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(
    team: Team, plans: Path, whole: list[float], saved: Path, way: tuple[str, str]
) -> None:
    source, target = way
    state = checkpoint.latest(saved / source)
    assert state is not None
    copy = saved / f"{source}-to-{target}" / state.name
    shutil.copytree(state, copy)
    resumed = outcomes(team, plans, target, save=copy.parent, resume=True)
    assert len(resumed[0].comparison.losses) == STEPS
    assert resumed[0].comparison.losses == pytest.approx(whole, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["pp2-dp2-zero1", "pp2-dp2-zero3"])
def test_a_checkpoint_of_stages_goes_on_in_other_stages(team: Team, plans: Path, tmp_path: Path, source: str) -> None:
    """The embedding is tied: the first and the last stage both hold it, each with its own shares."""
    alone = outcomes(team, plans, "one4")[0].comparison.losses
    outcomes(team, plans, source, steps=SAVED, save=tmp_path)
    state = checkpoint.latest(tmp_path)
    assert state is not None
    for target in ("one4", "interleaved", "pp2-dp2-zero3"):
        shutil.copytree(state, tmp_path / target / state.name)
        resumed = outcomes(team, plans, target, save=tmp_path / target, resume=True)
        assert resumed[0].comparison.losses == pytest.approx(alone, rel=TOLERANCE)


def test_weights_of_several_ranks_are_written_whole(team: Team, plans: Path, saved: Path) -> None:
    """One process and two ranks start from these weights with the same loss, which is lower than without them."""
    begun = [
        outcomes(team, plans, name, steps=1, weights=saved / "tp2/weights")[0].comparison.losses[0]
        for name in ("one", "tp2")
    ]
    assert begun[0] == pytest.approx(begun[1], rel=TOLERANCE)
    assert begun[0] < outcomes(team, plans, "one", steps=1)[0].comparison.losses[0] - 0.1


@pytest.mark.slow
def test_parameters_left_to_the_next_step_are_saved_whole(team: Team, plans: Path, tmp_path: Path) -> None:
    uninterrupted = outcomes(team, plans, "late")[0].comparison.losses
    outcomes(team, plans, "late", steps=SAVED, save=tmp_path)
    assert outcomes(team, plans, "late", save=tmp_path, resume=True)[0].comparison.losses == uninterrupted


def stops(member: Member, plan: Path, how: str) -> str:
    """Run a plan whose last rank stops in its third step; return the message that the others raise."""
    last, play_step = member.rank == member.world - 1, Training.play_step

    def stop(*arguments: object) -> NoReturn:
        raise ZeroDivisionError("a bug of the test")

    def watched(self: Training) -> StepFigure:
        if last and self.step == 2:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            self.interpreter.kernels = {**self.interpreter.kernels, "attention": stop}
        return play_step(self)

    Training.play_step = watched  # type: ignore[method-assign]
    try:
        run(plan, RunOptions(steps=10**6))
    except CannotRun as error:
        return str(error)
    except ZeroDivisionError:
        os._exit(1)  # as the command line does
    return "nothing"


@pytest.mark.parametrize(
    ("how", "layout"), [("killed", "tp2"), ("raises", "tp2"), pytest.param("raises", "pp2", marks=pytest.mark.slow)]
)
def test_a_rank_that_dies_takes_the_others_down_with_a_message(plans: Path, how: str, layout: str) -> None:
    with Team(2) as own, pytest.raises(Failed) as caught:  # at the limit it would say that a rank has not answered
        own.play(stops, 2, plans / f"{layout}.json", how, meets=False, limit_s=90)
    (fine, said), (alive, end) = caught.value.answers
    assert fine
    assert "rank 0 of 2" in said
    assert (alive, end) == (False, "the process ended")


MOMENTS = {
    "before the plan": "memo_exec.training.checkpoint_shards._Writes.create_local_plan",
    "while it writes": "memo_exec.training.checkpoint_shards._Writes.lookup_object",
    "before the sums": "memo_exec.training.checkpoint.sum_of",
}
"""Functions that the writing of a checkpoint calls, by the moment."""


def dies_while_saving(member: Member, plan: Path, folder: Path, function: str) -> tuple[str, str]:
    """Run a plan whose last rank dies when its second checkpoint calls ``function``; return the error of the others."""
    owner, name = function.rsplit(".", 1)
    found: Any = pkgutil.resolve_name(owner.replace(".checkpoint_shards.", ".checkpoint_shards:"))
    real = getattr(found, name)

    def dying(*arguments: Any) -> Any:
        if member.rank == member.world - 1 and (folder / "step-00000001").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    setattr(found, name, dying)
    with pytest.raises(MemoError) as caught:
        run(plan, RunOptions(steps=9, save=folder, save_every=1))
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    "moment", ["before the plan", *(pytest.param(m, marks=pytest.mark.slow) for m in list(MOMENTS)[1:])]
)
def test_a_rank_that_dies_while_saving_is_no_bug_and_loses_nothing(plans: Path, tmp_path: Path, moment: str) -> None:
    with Team(2) as own, pytest.raises(Failed) as caught:
        own.play(dies_while_saving, 2, plans / "tp2.json", tmp_path, MOMENTS[moment], meets=False, limit_s=90)
    (fine, said), (alive, end) = caught.value.answers
    assert fine, said
    assert said[0] == "RankLost"
    assert "another rank has stopped" in said[1]
    assert (alive, end) == (False, "the process ended")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000001"
    assert not list(tmp_path.glob(".unfinished-*"))


def refused(member: Member, plan: Path) -> MemoError:
    """Run a plan that is refused; return the error."""
    with pytest.raises(CannotRun) as caught:
        run(plan, RunOptions(steps=1))
    assert caught.value.exit_code == 6, member
    return caught.value


def test_another_number_of_ranks_is_refused_before_they_meet(team: Team, plans: Path) -> None:
    for error in team.play(refused, 2, plans / "tp4.json", meets=False):
        assert (error.where, error.got, error.wanted) == ("$.decisions.layout", "WORLD_SIZE 2", 4)
        assert "torchrun --nproc_per_node 4" in str(error.hint)


@pytest.mark.slow
def test_torchrun(plans: Path, tmp_path: Path) -> None:
    """Start it as a user does: the first rank prints one document, and every rank writes its timeline."""
    command = [*TORCHRUN, str(plans / "tp2.json"), "--steps", "3", "--json", "--trace", str(tmp_path / "trace.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    document = json.loads(done.stdout)
    assert len(document["losses"]) == 3
    assert len(document["peak_device_bytes_by_rank"]) == 2
    assert done.stderr.count("step     3") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json", "trace.rank1.json"]


@pytest.mark.slow
def test_torchrun_ends_with_the_message(plans: Path) -> None:
    command = [*TORCHRUN, str(plans / "tp4.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    cause = done.stderr[done.stderr.index("Root Cause") :]
    assert "the number of ranks that were started" in cause
    assert "exitcode  : 6" in cause
    assert done.stderr.count("rank 0: ") <= 1
    assert done.returncode == 1


@pytest.mark.slow
def test_a_killed_worker_ends_torchrun(plans: Path, tmp_path: Path) -> None:
    command = [*TORCHRUN, str(plans / "tp2.json"), "--steps", "1000000", "--save", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        assert job.stderr is not None
        while not (line := job.stderr.readline()).startswith("step     2"):
            assert line, "the job ended before its second step"
        os.kill(_children(job.pid)[-1], signal.SIGKILL)
        _, said = job.communicate()  # a job that does not end meets the test's own time limit
    assert job.returncode != 0
    assert "another rank has stopped" in said or "Signal 9" in said


def _children(parent: int) -> list[int]:
    """Return the ids of the processes that ``parent`` has started."""
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def of_its_own(member: Member, plan: Path, folder: Path) -> str:
    """Run with a directory of checkpoints that differs from rank to rank; return the message of the refusal."""
    with pytest.raises(UsageError) as caught:
        run(plan, RunOptions(steps=STEPS, save=folder / str(member.rank), resume=True))
    return str(caught.value)


def shared(member: Member, folder: Path) -> str:
    """Check a directory that only the first rank has made; return the message of the refusal."""
    with joined(launched(), torch.device("cpu")) as world:
        made = folder / ("first" if member.rank == 0 else "own")
        with pytest.raises(UsageError) as caught:
            checkpoint.check_shared(made, world)
        return str(caught.value)


def test_ranks_without_common_storage_are_told_so(team: Team, plans: Path, saved: Path, tmp_path: Path) -> None:
    state = checkpoint.latest(saved / "tp2")
    assert state is not None
    shutil.copytree(state, tmp_path / "0" / state.name)
    for said in team.play(of_its_own, 2, plans / "tp2.json", tmp_path, meets=False):
        assert f"steps {SAVED}, 0" in said
    (tmp_path / "first").mkdir()
    for said in team.play(shared, 2, tmp_path, meets=False):
        assert "not seen by rank 1" in said
