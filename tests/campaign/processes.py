"""The part of the campaign with processes: runs that are killed, share a folder, meet limits or lose a rank.

Every run is a forked child that trains the same small plan, so it starts in a tenth of a second and ends like any other
process. A kill comes either at the n-th thing that the child does to a file, which a seed repeats exactly, or after a
part of the time that a whole run takes. Whatever happened, a resumed run has to end with the very weights of a run that
nothing happened to.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load

from memo_exec.cli import main
from memo_sim.contract.plan import Layout
from tests.exec_cpu.plans import byte_decisions, write_plan
from tests.exec_cpu.small import gpt

STEPS = 4
WAITS_S = 300.0
"""Without an end for so long a run hangs."""
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
WEIGHTS = "weights/model.safetensors"
ROUNDING = 1e-6
"""What weights may differ by when memory was short: a library that gets no scratch sums in another order."""
Limits = dict[int, int]


@dataclass
class Ended:
    """How a run ended: its exit code (below 0: the signal that ended it), and what it printed."""

    code: int
    text: str


@dataclass
class Trial:
    """One thing that happened to a run, and everything that was wrong afterwards."""

    name: str
    codes: list[int] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return one line: what happened, the exit codes in order, and what was wrong."""
        return f"{self.name.removesuffix('; ')} | {self.codes} | {'; '.join(self.complaints) or 'fine'}"


@dataclass
class Running:
    """A run in a child."""

    process: int
    printed: Path
    tally: Path
    ended: Ended | None = None

    def wait(self, seconds: float = WAITS_S) -> Ended:
        """Return how it ended; kill it when it takes too long."""
        until = time.monotonic() + seconds
        while self.ended is None:
            process, status = os.waitpid(self.process, os.WNOHANG)
            if process:
                self.ended = Ended(os.waitstatus_to_exitcode(status), self.printed.read_text(errors="replace"))
            elif time.monotonic() > until:
                os.kill(self.process, signal.SIGKILL)
                os.waitpid(self.process, 0)
                self.ended = Ended(999, f"hung\n{self.printed.read_text(errors='replace')}")
            else:
                time.sleep(0.005)
        return self.ended

    def events(self) -> int:
        """Return how many things a run that has ended did to files."""
        return int(self.tally.read_text())


class Counter:
    """Counts what a child does to files, and sends it a signal at the n-th time."""

    EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "os.truncate")

    def __init__(self, folder: Path, at: int | None, number: int, tally: Path) -> None:
        self.folder, self.at, self.number, self.tally = f"{folder}/", at, number, tally
        self.count = 0

    def hook(self, event: str, given: tuple[Any, ...]) -> None:
        """Look at an audit event of the interpreter."""
        if event not in self.EVENTS or not given or not isinstance(given[0], str | bytes | os.PathLike):
            return
        if not f"{os.fsdecode(given[0])}/".startswith(self.folder):
            return
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), self.number)

    def report(self) -> None:
        """Write the count where the parent reads it."""
        self.tally.write_text(str(self.count))


class Runs:
    """Starts runs of one plan with one file of data in folders of their own."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.folder = folder
        sizes = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "ffn_hidden": 32}
        policy = {"seq_tokens": 128, "swapped_tokens": 0, "recompute": "full", "global_batch": 2}
        model = gpt(**sizes, max_positions=128, vocab=256)
        for name, layout in (("one", Layout()), ("two", Layout(dp=2, zero=1))):
            write_plan(folder / f"{name}.json", byte_decisions(model=model, layout=layout, **policy))
        np.save(folder / "ids.npy", np.arange(5000, dtype=np.int64) * 7 % 256)
        self.number = 0

    def start(
        self,
        save: Path,
        *more: str,
        plan: str = "one",
        kill: tuple[int | None, int] = (None, 0),
        limits: Limits | None = None,
        environment: dict[str, str] | None = None,
    ) -> Running:
        """Start a run that saves into ``save``. ``kill`` is the number of the event, or None, and the signal."""
        self.number += 1
        printed, tally = (self.folder / f"{name}-{self.number}" for name in ("printed", "tally"))
        line = ["memo-exec", "run", str(self.folder / f"{plan}.json"), "--data", str(self.folder / "ids.npy")]
        line += ["--steps", str(STEPS), "--save", str(save), "--save-every", "1", *more]
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            self._play(line, printed, Counter(save, *kill, tally), limits or {}, environment or {})
        return Running(child, printed, tally)

    def _play(
        self, line: list[str], printed: Path, counter: Counter, limits: Limits, environment: dict[str, str]
    ) -> None:
        """Be the command ``line``; never returns."""
        code = 1
        try:
            descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.environ.update(environment)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = line
            sys.addaudithook(counter.hook)
            for kind, most in limits.items():
                resource.setrlimit(kind, (most, most))
            try:
                main()
                code = 0
            except SystemExit as left:
                code = left.code if isinstance(left.code, int) else 1
            sys.stdout.flush()
            sys.stderr.flush()
            counter.report()
        finally:  # whatever a limit breaks, a child never goes on as its parent
            os._exit(code)

    def whole(self, save: Path, **given: Any) -> Ended:
        """Play a run or resume it, without anything happening to it."""
        return self.start(save, "--resume", **given).wait()


def pages_bytes() -> int:
    """Return the address space that this process has now; children begin with the same."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


class Campaign:
    """Every trial, from one seed."""

    def __init__(self, folder: Path, seed: int, kills: int) -> None:
        self.runs, self.rng, self.kills, self.folder = Runs(folder), Random(seed), kills, folder
        begun = time.monotonic()
        first = self.runs.start(folder / "first", "--resume")
        assert first.wait().code == 0, first.ended
        self.seconds, self.events = time.monotonic() - begun, first.events()
        self.weights = (folder / "first" / WEIGHTS).read_bytes()

    def trials(self) -> Iterator[Trial]:
        """Play every trial."""
        for number in range(self.kills):
            yield self.killed(number)
        yield self.two_runs_in_one_folder()
        yield from self.limited()
        yield from self.full_or_read_only()
        yield from self.one_rank_of_two()

    def killed(self, number: int) -> Trial:
        """Kill a run, sometimes again while it resumes, and let it end."""
        save = self.folder / f"killed-{number}"
        trial = Trial("")
        for _ in range(self.rng.choice([1, 1, 2])):
            kind = self.rng.choice(SIGNALS)
            if self.rng.random() < 0.7:
                at = self.rng.randrange(1, self.events + 1)
                trial.name += f"{kind.name} at file event {at} of {self.events}; "
                ended = self.runs.start(save, "--resume", kill=(at, kind)).wait()
            else:
                after = self.rng.random() * self.seconds
                trial.name += f"{kind.name} after {after / self.seconds:.0%} of a run; "
                run = self.runs.start(save, "--resume")
                time.sleep(after)
                os.kill(run.process, kind)
                ended = run.wait()
            trial.codes.append(ended.code)
            # a run that had ended before the signal came, or had no such event left, is a run like any other
            if ended.code not in (0, -kind, 128 + kind):
                trial.complaints.append(f"exit code {ended.code} after {kind.name}: {ended.text[-500:]}")
        self._finish(trial, save)
        return trial

    def _finish(self, trial: Trial, save: Path, *, rounding: float = 0.0) -> None:
        """Resume a run and compare its weights; none may differ by more than ``rounding``."""
        ended = self.runs.whole(save)
        trial.codes.append(ended.code)
        if ended.code != 0:
            trial.complaints.append(f"--resume ends with {ended.code}: {ended.text[-500:]}")
            return
        if (off := difference((save / WEIGHTS).read_bytes(), self.weights)) > rounding:
            trial.complaints.append(f"other weights than a run that nothing happened to, by up to {off:g}")
        if left := [path.name for path in save.iterdir() if path.name.startswith(".unfinished") or ".tmp" in path.name]:
            trial.complaints.append(f"left behind: {left}")

    def two_runs_in_one_folder(self) -> Trial:
        """Stop a run while it holds the folder; another one is refused; the first one ends as if alone."""
        save = self.folder / "shared"
        trial = Trial("two runs in one folder")
        first = self.runs.start(save, kill=(self.events // 2, signal.SIGSTOP))
        os.waitpid(first.process, os.WUNTRACED)
        second = self.runs.whole(save)
        os.kill(first.process, signal.SIGCONT)
        ended = first.wait()
        trial.codes += [second.code, ended.code]
        if second.code != 2 or "another run" not in second.text:
            trial.complaints.append(f"the second run ends with {second.code}: {second.text[-300:]}")
        if ended.code != 0 or (save / WEIGHTS).read_bytes() != self.weights:
            trial.complaints.append(f"the first run ends with {ended.code}: {ended.text[-300:]}")
        return trial

    def limited(self) -> Iterator[Trial]:
        """Play runs under limits of memory, open files and size of files."""
        base, mib = pages_bytes(), 2**20
        tables: tuple[tuple[str, int, list[int]], ...] = (
            ("RLIMIT_AS", resource.RLIMIT_AS, [base + more * mib for more in (1, 4, 8, 16, 32, 48, 64, 80, 96, 192)]),
            ("RLIMIT_NOFILE", resource.RLIMIT_NOFILE, [5, 6, 7, 8, 10, 16]),
            ("RLIMIT_FSIZE", resource.RLIMIT_FSIZE, [0, 1, 100, 1000, 10_000, 50_000, 100_000, 200_000, 400_000]),
        )
        for name, kind, bounds in tables:
            for most in bounds:
                shown = f"{(most - base) // mib} MiB more" if name == "RLIMIT_AS" else str(most)
                trial = Trial(f"{name} {shown}")
                save = self.folder / trial.name.replace(" ", "-")
                ended = self.runs.start(save, "--resume", limits={kind: most}).wait()
                self._judge_refused(trial, ended)
                self._finish(trial, save, rounding=ROUNDING if kind == resource.RLIMIT_AS else 0.0)
                yield trial

    @staticmethod
    def _judge_refused(trial: Trial, ended: Ended) -> None:
        trial.codes.append(ended.code)
        if ended.code not in (0, 2, 3, 6) and "SystemError" not in ended.text:
            trial.complaints.append(f"exit code {ended.code}: {ended.text[-700:]}")
        if "SystemError" in ended.text:  # what CPython itself raises where even a MemoryError has no memory
            return
        if "Traceback (most recent" in ended.text or "this is a bug" in ended.text:
            trial.complaints.append("a traceback, or the message of a bug")

    def full_or_read_only(self) -> Iterator[Trial]:
        """Play runs that save to a small disk, and to one that is read-only. Without a right to mount: none."""
        for kilobytes in (8, 100, 250, 400, 600):
            save = self.folder / f"disk-{kilobytes}"
            trial = Trial(f"a disk of {kilobytes} KiB")
            with mounted(save, f"size={kilobytes}k") as there:
                if not there:
                    return
                self._judge_refused(trial, self.runs.start(save / "run", "--resume").wait())
                remount(save, "size=64m")
                self._finish(trial, save / "run")
            yield trial
        save = self.folder / "read-only"
        trial = Trial("a read-only disk")
        with mounted(save, "size=64m"):
            self.runs.start(save / "run", "--resume", kill=(self.events // 2, signal.SIGKILL)).wait()
            remount(save, "ro")
            self._judge_refused(trial, self.runs.start(save / "run", "--resume").wait())
            remount(save, "rw")
            self._finish(trial, save / "run")
        yield trial

    def one_rank_of_two(self) -> Iterator[Trial]:
        """Kill one rank of two at seeded file events; the other one ends with a message, and both resume."""
        save = self.folder / "pair"
        trial = Trial("two ranks, nothing happens")
        events = [run.events() for run in self._pair(trial, save, (None, 0))]
        yield trial
        weights = (save / WEIGHTS).read_bytes()
        for number in range(max(2, self.kills // 3)):
            save, rank = self.folder / f"pair-{number}", number % 2
            at = self.rng.randrange(1, events[rank] + 1)
            trial = Trial(f"SIGKILL of rank {rank} of 2 at file event {at} of {events[rank]}")
            self._pair(trial, save, (at, signal.SIGKILL), rank=rank)
            self._pair(trial, save, (None, 0))
            if not trial.complaints and (save / WEIGHTS).read_bytes() != weights:
                trial.complaints.append("other weights than two ranks that nothing happened to")
            yield trial

    def _pair(self, trial: Trial, save: Path, kill: tuple[int | None, int], *, rank: int = 0) -> list[Running]:
        """Play two ranks; ``kill`` is for ``rank``, and the other one has to end with a message then."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        both = [
            self.runs.start(
                save,
                "--resume",
                plan="two",
                kill=kill if each == rank else (None, 0),
                environment=shared | {"RANK": str(each), "LOCAL_RANK": str(each)},
            )
            for each in range(2)
        ]
        for each, run in enumerate(both):
            ended = run.wait()
            if kill[0] is None and ended.code:
                trial.complaints.append(f"rank {each} ends with {ended.code}: {ended.text[-500:]}")
            if kill[0] is not None and each != rank:
                self._judge_refused(trial, ended)
            else:
                trial.codes.append(ended.code)
        return both


def difference(weights: bytes, others: bytes) -> float:
    """Return the largest difference of two files of weights; infinity when they have other tensors."""
    if weights == others:
        return 0.0
    left, right = load(weights), load(others)
    if left.keys() != right.keys():
        return float("inf")
    return max(float(np.abs(left[name].astype(np.float64) - right[name]).max()) for name in left)


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[bool]:
    """Mount a small disk in memory; yield whether that was allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        there = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        there = False
    try:
        yield there
    finally:
        if there:
            subprocess.run(["umount", str(folder)], capture_output=True, check=True)


def remount(folder: Path, options: str) -> None:
    """Give a mounted disk other options."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], capture_output=True, check=True)


def play_all(seed: int, kills: int, tell: Callable[[Trial], None]) -> list[Trial]:
    """Play every trial, and return them."""
    played = []
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        for trial in Campaign(Path(os.path.realpath(name)), seed, kills).trials():
            tell(trial)
            played.append(trial)
    return played
