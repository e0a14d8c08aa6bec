"""The part of the campaign that runs in this process: 10^5 changed files and options, each judged.

An input follows from (seed, number) alone, so one that was found can be played again. Inputs are played in forked
children, a thousand each: what crashes or hangs beyond its alarm ends the child alone, and the next one goes on.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import matplotlib as mpl

from tests.campaign.judge import Judged, judge
from tests.campaign.mutations import change
from tests.campaign.options import Options
from tests.campaign.seeds import OUT, Target, targets

OPTIONS_SHARE = 0.15
"""The part of all inputs that changes options and not files."""
OPTIONS_S = 20.0
"""What a question with other options may take: it may search more than the one that it was made from."""
A_CHILD = 1000
HANGS_S = 60.0
"""Without a word from a child for so long it hangs where no alarm is heard."""


@dataclass(frozen=True)
class Played:
    """One input and how it ended."""

    number: int
    kind: str
    change: str
    code: int | str
    complaints: list[str]
    command: list[str]
    stderr: str
    seconds: float

    @property
    def signature(self) -> str:
        """What equal findings have in common."""
        first = self.stderr.partition("\n")[0]
        return re.sub(r"\d+|'.*?'|\".*?\"", "N", f"{self.kind} | {'; '.join(self.complaints)} | {first}")[:300]


@dataclass
class Totals:
    """How many inputs ended how, by kind, and every finding by its signature."""

    codes: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: dict[str, list[Played]] = field(default_factory=dict)
    seconds: float = 0.0
    slowest: Played | None = None

    def add(self, played: Played) -> None:
        """Count one input."""
        self.codes[played.kind, str(played.code)] += 1
        if played.complaints:
            self.findings.setdefault(played.signature, []).append(played)
        if self.slowest is None or played.seconds > self.slowest.seconds:
            self.slowest = played

    def table(self) -> str:
        """Return a Markdown table: inputs by kind and exit code."""
        kinds, codes = (sorted({key[i] for key in self.codes}) for i in (0, 1))
        lines = [f"| kind | inputs | {' | '.join(codes)} |", "|" + " --- |" * (len(codes) + 2)]
        for kind in kinds:
            counts = [self.codes[kind, code] for code in codes]
            lines.append(f"| {kind} | {sum(counts):,} | {' | '.join(f'{n:,}' if n else '' for n in counts)} |")
        sums = [sum(self.codes[kind, code] for kind in kinds) for code in codes]
        lines.append(f"| all | {sum(sums):,} | {' | '.join(f'{n:,}' for n in sums)} |")
        return "\n".join(lines)


class Inputs:
    """Every input of the campaign by its number. Files are made in ``folder`` when this is made.

    With ``quick`` only kinds of files that are read in milliseconds, and options of ``memo-sim``.
    """

    def __init__(self, folder: Path, seed: int, *, quick: bool = False) -> None:
        self.folder, self.seed = folder, seed
        tempfile.gettempdir()  # Python tries the folder by writing to it, once
        mpl.get_configdir()  # makes its folders, once
        mpl.get_cachedir()
        self.targets = targets(folder / "seeds", quick=quick)
        self.options = Options(folder / "options", self.targets, quick=quick)
        self.same = [self._unchanged(target) for target in self.targets]
        """How each target's command ends with its unchanged file."""

    def play(self, number: int, box: Path | None = None) -> Played:
        """Play one input in a fresh folder, ``box`` or a temporary one."""
        rng = Random(f"{self.seed}:{number}")
        box = box or self.folder / "box"
        shutil.rmtree(box, ignore_errors=True)
        begun = time.monotonic()
        if rng.random() < OPTIONS_SHARE:
            drawn = self.options.draw(rng)
            drawn.prepare(box)
            found = judge(drawn.command, box, codes=drawn.codes, written=drawn.written, seconds=OPTIONS_S)
            kind, name, command = f"options of {' '.join(drawn.command[:2])}", drawn.name, drawn.command
        else:
            (target,) = rng.choices(self.targets, [each.weight for each in self.targets])
            kind, command = target.kind, target.command
            name, found = self._file(rng, target, box)
        stderr = found.stderr[-1500:] if found.complaints else ""
        return Played(number, kind, name, found.code, found.complaints, list(command), stderr, time.monotonic() - begun)

    def _file(self, rng: Random, target: Target, box: Path) -> tuple[str, Judged]:
        shutil.copytree(target.folder, box)
        (box / OUT).mkdir()
        tree = (target.folder / target.tree).read_bytes() if target.tree else None
        made = change(rng, target.form, (target.folder / target.file).read_bytes(), tree)
        made.apply(box / target.file)
        if target.seal is not None and made.expected != "same":
            target.seal(box / target.file)
        codes = frozenset({3}) if made.expected == "refused" else target.codes
        codes = target.kinds.get(made.name, codes)
        places = (Path(target.file).name, *target.names)
        found = judge(target.command, box, codes=codes, written=(OUT, "run"), places=places)
        if made.expected == "same":
            found.complaints.extend(self._compare(target, found))
        return made.name[:200], found

    def _unchanged(self, target: Target) -> tuple[int | str, str]:
        box = self.folder / "same"
        shutil.rmtree(box, ignore_errors=True)
        shutil.copytree(target.folder, box)
        (box / OUT).mkdir()
        found = judge(target.command, box, codes=frozenset({0}), written=(OUT, "run"), seconds=60)
        assert not found.complaints, (target.kind, target.command, found)
        return found.code, _answer(found.stdout)

    def _compare(self, target: Target, found: Judged) -> Iterator[str]:
        """Yield whether the answer is another one than that of the unchanged file."""
        if (found.code, _answer(found.stdout)) != self.same[self.targets.index(target)]:
            yield "the same file in other bytes has another answer"


def _answer(text: str) -> str:
    """Return an output without what differs between equal runs: the times that were measured."""
    if '"memo.comparison/' in text:
        tree = json.loads(text)
        return f"{tree['losses']} {tree['grad_norms']} {tree['program_sha256']}"
    text = re.sub(r'"(elapsed_s|created)": [^,\n]*', "", text)
    return re.sub(r" +", " ", re.sub(r"[\d.e+-]+ (us|ms|s)\b", "", text))


def campaign(seed: int, numbers: range, *, tell: Any = None, limit_s: float | None = None) -> tuple[Totals, int]:
    """Play inputs in children; return the totals and the number of the first input that was not played."""
    begun, totals, nxt = time.monotonic(), Totals(), numbers.start
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=memory_folder()) as name:
        inputs = Inputs(Path(os.path.realpath(name)), seed)
        while nxt < numbers.stop and (limit_s is None or time.monotonic() - begun < limit_s):
            stop = min(nxt + A_CHILD, numbers.stop)
            for played in _in_child(inputs, range(nxt, stop)):
                totals.add(played)
                nxt = played.number + 1
            if tell is not None:
                tell(nxt, totals)
    totals.seconds = time.monotonic() - begun
    return totals, nxt


def memory_folder() -> str | None:
    """Return a folder in memory where there is one: most of an input's time would be flushes to a disk."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _in_child(inputs: Inputs, numbers: range) -> Iterator[Played]:
    """Play inputs in a forked child. One in which the child ends or hangs is a finding, and the last one."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _play_all(inputs, numbers, writing)
    os.close(writing)
    at, text, silent = numbers.start, b"", False
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while not (silent := not select.select([pipe], [], [], HANGS_S)[0]) and (read := pipe.read(2**16)):
            *lines, text = (text + read).split(b"\n")
            for line in lines:
                played = Played(**json.loads(line))
                at = played.number + 1
                yield played
    if silent:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if at < numbers.stop:
        why = f"the process {'hung' if silent else 'died'}: status {os.waitstatus_to_exitcode(status)}"
        yield Played(at, "process", "", "died", [why], [], "", 0.0)


def _play_all(inputs: Inputs, numbers: range, writing: int) -> None:
    """Play inputs in this child and write each to the pipe; never returns."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    status = 1
    try:
        with os.fdopen(writing, "wb", buffering=0) as pipe:
            for number in numbers:
                pipe.write(json.dumps(asdict(inputs.play(number))).encode() + b"\n")
        status = 0
    finally:
        os._exit(status)
