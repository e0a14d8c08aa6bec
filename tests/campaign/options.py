"""Options of every command with legal and with wrong values. The commands and options are those that click knows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import click

from memo_exec.cli import cli as exec_cli
from memo_sim.cli import cli as sim_cli
from memo_sim.contract.knobs import CountOrAuto, DocumentLengths, LayerChoice, Length, Load, LowRank, Numbers
from memo_sim.question_options import ON_COMMAND_LINE, Several
from tests.campaign.judge import DOCUMENTED
from tests.campaign.mutations import LONG, NUMBERS, SPECIAL, TEXTS
from tests.campaign.seeds import OUT, Target

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "model": ("model.json", "llama-tiny", "gpt-tiny"),
    "models": ("llama-tiny", "gpt-tiny,llama-tiny"),
    "plan": ("plan.json",),
    "files": ("train.sh",),
    "cases": ("cases.csv",),
    "path": ("b.csv", "plan.json", "r.json", "s.pickle", "a.log"),
    "predicted": ("plan.json", "plan.trace.json"),
    "measured": ("measured.json",),
    "compared": ("plan.json", "plan.trace.json"),
    "explained": ("plan.json",),
    "name": ("model", "plan", "cases", "6"),
    "features": ("tp", "subsequences"),
    "figures": ("tflops=165,memory=24,pcie=4x16", "tflops=165 memory=24 pcie=4x16 nvlink=600 devices=2"),
}
"""Quick legal values of arguments by their names."""
REQUIRED = {
    "seq_len": "1k",
    "chosen": "one",
    "low": "1",
    "high": "3",
    "unfitted": "2",
    "output": "out/new.json",
    "framework": "megatron-lm",
}
"""Quick legal values of options without which a command does nothing."""
ALWAYS = {
    ("memo-sim", "what-if"): ("--cluster", "machine.json", "--seq-len", "1k", "--system", "full-recompute"),
    ("memo-sim", "longest"): ("--cluster", "machine.json", "--step", "1024m", "--system", "full-recompute"),
    ("memo-sim", "gpus"): ("--cluster", "a800", "--most-gpus", "2", "--system", "full-recompute"),
    ("memo-sim", "sweep"): (
        *("--cluster", "machine.json", "--seq-len", "1k", "--system", "full-recompute"),
        *("--jobs", "1"),
    ),
    ("memo-sim", "oom"): ("--seq-len", "1k", "--system", "full-recompute"),
    ("memo-sim", "explain"): ("--cluster", "machine.json"),
    ("memo-sim", "compare"): ("plan.json", "--cluster", "machine.json"),
    ("memo-exec", "run"): ("--steps", "1"),
    ("memo-exec", "profile"): ("--steps", "1", "--trace", "out/t.json", "-o", "out/m.json"),
}
"""Options that make a command quick, or keep its files in one folder. One that is drawn comes later and wins."""
TEXT_VALUES: dict[str, tuple[str, ...]] = {
    "cluster": ("machine.json", "h100-1x8", "a800-2x8", "b200-1x8"),
    "dask": ("tcp://127.0.0.1:9",),
    "from_datasheet": ("tflops=165,memory=24,pcie=4x16",),
    "within": ("10m", "1s", "0.5h"),
    "price_per_gpu_hour": ("2.5", "a800=1"),
    "seq_len": ("1k", "2048", "1.5k", "1m"),
    "step": ("1024m", "512m"),
    "system": ("full-recompute", "megatron-lm", "memo"),
    "source": ("a-table",),
    "constant": ("copy-rate", "host-launch"),
    "chosen": ("one", "two"),
    "unfitted": ("2",),
}
"""Quick legal values of options that take any text."""
KNOB_VALUES: dict[type, tuple[str, ...]] = {
    Length: ("0", "256", "1k"),
    CountOrAuto: ("1", "2", "auto"),
    Numbers: ("1,1", "2"),
    LayerChoice: ("all", "every-2", "first-1", "groups-2"),
    Load: ("balanced",),
    DocumentLengths: ("mean=128,max=1k", "mean=4k,max=4k"),
    LowRank: ("none", "r=8", "r=4,alpha=8,targets=q+v,rslora"),
}
"""Quick legal values of knobs that click takes as text."""
NEVER = {"every", "jobs", "help", "version"}
"""Options left out: --all takes minutes, --jobs starts processes. --accept alone is refused, so it stays."""
RARE = {"fit": 0.1, "longest": 0.3, "gpus": 0.3, "compare": 0.4, "oom": 0.3, "explain": 0.3, "sweep": 0.3}
"""Commands that take their time, and how often they are drawn beside one that is quick."""
FILES = (
    *("snapshot", "buffers in CSV", "requests", "allocator log", "model", "hardware profile", "cases", "trace"),
    *("plan", "tokens", "job"),
)
"""Kinds of target whose files the commands read."""
NEEDS_MINUTES = {("memo-exec", "calibrate")}
"""Commands that are only called so that they refuse."""


@dataclass(frozen=True)
class Drawn:
    """One command line and the files that it needs."""

    name: str
    command: tuple[str, ...]
    files: Path
    codes: frozenset[int] = DOCUMENTED
    written: tuple[str, ...] = (OUT,)

    def prepare(self, box: Path) -> None:
        """Make the folder in which the command runs."""
        shutil.copytree(self.files, box)
        (box / OUT).mkdir()
        (box / OUT / "old.json").write_text("{}\n")
        (box / "loop").symlink_to("loop")


class Options:
    """Draws command lines. The commands read files of ``targets``; with ``quick`` only memo-sim's are drawn."""

    def __init__(self, folder: Path, targets: list[Target], *, quick: bool = False) -> None:
        self.folder, self.exec_folder = folder, folder.with_name("options-exec")
        for target in targets:
            trains = target.command[:2] == ("memo-exec", "run")
            if target.kind in FILES:
                shutil.copytree(target.folder, self.exec_folder if trains else folder, dirs_exist_ok=True)
        self.commands = [
            (program, name, command)
            for program, group in (("memo-sim", sim_cli), ("memo-exec", exec_cli))
            for name, command in sorted(group.commands.items())
            if not (quick and (program == "memo-exec" or name in RARE or name == "what-if"))
        ]
        self.knobs = {knob.name: knob.kind for knob in ON_COMMAND_LINE}

    def draw(self, rng: Random) -> Drawn:
        """Return a command line with up to four options, at most one of them wrong by intent."""
        ((program, name, command),) = rng.choices(self.commands, [RARE.get(name, 1) for _, name, _ in self.commands])
        arguments = [each for each in command.params if isinstance(each, click.Argument)]
        options = [each for each in command.params if isinstance(each, click.Option) and each.name not in NEVER]
        values = {each.name: rng.choice(self.legal(each)) for each in arguments}
        drawn = rng.sample(options, min(len(options), rng.choice([0, 1, 1, 2, 2, 3, 4])))
        wrong = rng.choice([*drawn, *arguments, None]) if rng.random() < 0.6 else None
        must_fail = (program, name) in NEEDS_MINUTES
        words = [*ALWAYS.get((program, name), ())]
        for option in options:
            if option.required and option not in drawn:
                words += [option.opts[-1], REQUIRED[option.name or ""]]
        expected = DOCUMENTED
        for option in drawn:
            if option is wrong and not option.is_flag:
                value, sure = _wrong(rng, option)
                expected = frozenset({2}) if sure else expected
                words += [option.opts[-1], value]
            else:
                words += self._given(rng, option)
        if wrong is not None and isinstance(wrong, click.Argument):
            values[wrong.name] = rng.choice(
                [*TEXTS, *SPECIAL, "missing.json", "loop", OUT, "/dev/zero", "../x", "x" * 300]
            )
        if must_fail:
            words += ["--output", "nowhere/profile.json"]
        line = [value for value in values.values() if value or rng.random() < 0.9] + words
        told = " ".join(line)
        if any("\0" in word for word in line):  # no process can be given one
            line = [word.replace("\0", "") for word in line]
        slow = name == "figure" and values.get("name") not in ("6",)
        if slow and wrong is None:
            line[0] = rng.choice(["6", "7", "none"])
        files = self.exec_folder if program == "memo-exec" and name != "compare" else self.folder
        # what the user names may be written, in place of another file too; a table that is read gains a column
        return Drawn(
            told[:200],
            (program, name, *line),
            files,
            expected,
            (OUT, *({*words} - {each for each in (*values.values(), "") if not each.endswith(".csv")})),
        )

    def legal(self, parameter: click.Parameter) -> tuple[str, ...]:
        """Return quick legal values of an argument."""
        kind = parameter.type
        if isinstance(kind, click.Choice):
            return tuple(kind.choices)
        if parameter.name not in ARGUMENTS:
            raise LookupError(f"tests/campaign/options.py needs a quick value for the argument {parameter.name}")
        return ARGUMENTS[parameter.name]

    def _given(self, rng: Random, option: click.Option) -> Iterator[str]:
        """Yield an option with a legal value."""
        if option.is_flag:
            yield rng.choice([*option.opts, *option.secondary_opts])
            return
        yield rng.choice(option.opts)
        yield str(rng.choice(self._values(option)))

    def _values(self, option: click.Option) -> list[Any]:
        kind, name = option.type, option.name or ""
        if isinstance(kind, Several):
            kind = kind.each
        if isinstance(kind, click.Choice):
            return list(kind.choices)
        if isinstance(kind, click.IntRange):
            least = kind.min if kind.min is not None else 0
            return [least, least + 1, min(least + 2, kind.max or least + 2)]
        if isinstance(kind, click.FloatRange):
            low = kind.min if kind.min is not None else 0.0
            high = kind.max if kind.max is not None else low + 2
            return [low + (high - low) * part for part in (0.25, 0.5, 0.75)]
        if isinstance(kind, click.Path):
            return _paths(name)
        if name in TEXT_VALUES:
            return list(TEXT_VALUES[name])
        return list(KNOB_VALUES.get(type(self.knobs.get(name)), ("x", "1")))


def _paths(name: str) -> list[str]:
    read = {"plan_path": "plan.json", "job_paths": "train.sh", "data": "ids.npy", "weights": "run/weights"}
    if name in read:
        return [read[name]]
    if name == "save":
        return [f"{OUT}/run"]
    return [f"{OUT}/new{suffix}" for suffix in (".json", ".png", ".svg", ".csv", ".pickle", ".md", "")] + [
        f"{OUT}/old.json"
    ]


PLACES = (
    *("", OUT, "missing/x.json", "/dev/full", "loop", "loop/x.json", "model.json", "plan.json", "b.csv"),
    *("machine.json", "/proc/self/mem", "x" * 300, "out/\x1b[31m.json", "out/a\nb.json", "out/\udcff.json"),
    *("plan.json/x.json", "ids.npy", "run", "out/$\\frac$.svg", "out/=1.csv"),
)
"""Names of outputs and inputs that are wrong, odd, or an input of the same command."""


def _wrong(rng: Random, option: click.Option) -> tuple[str, bool]:
    """Return a wrong value for an option, and whether it is refused for sure as wrong usage."""
    kind = option.type.each if isinstance(option.type, Several) else option.type
    if isinstance(kind, click.Path):
        return rng.choice(PLACES), False
    text = "x" * LONG if rng.random() < 0.02 else rng.choice([*NUMBERS, *TEXTS]).replace("\0", "")
    if isinstance(kind, click.Choice):
        return text, text not in kind.choices
    if isinstance(kind, click.IntRange | click.FloatRange):
        try:
            number = int(text) if isinstance(kind, click.IntRange) else float(text)
        except ValueError:
            return text, True
        outside = (kind.min is not None and number < kind.min) or (kind.max is not None and number > kind.max)
        big = abs(number) > 10 and kind.max is None
        # a legal but huge number of steps, layers or seconds would take its time
        return ("-1" if big and kind.min is not None else text), outside or (big and kind.min is not None)
    return text, False
