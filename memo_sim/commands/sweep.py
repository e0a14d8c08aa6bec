"""``memo-sim sweep``: many questions, answered by several processes into one file.

Everything heavier than click is imported inside the command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memo_sim.contract.errors import MemoError, UsageError
from memo_sim.contract.knobs import OF_A_LONG_RUN, OF_A_QUESTION
from memo_sim.question_options import IN_A_PLAN, ON_COMMAND_LINE, Options, names_in, swept_options, values_of
from memo_sim.views.command_line import say, show, typed, with_progress

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from memo_sim.contract.sweep import SweepLine

MOST_QUESTIONS = 100_000
LISTS = ("cluster", "system", "seq_len")
"""Options that a sweep may not leave out or that always list names, beside the models."""


@click.command("sweep")
@click.argument("models", nargs=-1, metavar="MODEL...")
@click.option("--cluster", help="Clusters, joined by commas: h100-1x8,a800-1x8.")
@click.option("--seq-len", help="Lengths, joined by commas: 64k,128k,1m.")
@click.option("--questions", type=click.Path(path_type=Path), help="A file of questions, a JSON object a line.")
@swept_options
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="JSON lines, one an answer; a question that it has an answer to is not asked again.",
)
@click.option("--csv", "csv_path", type=click.Path(path_type=Path), help="Write the answers as a table, too.")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw length against speed and memory (.png, .svg, .pdf)."
)
@click.option("--jobs", type=click.IntRange(1, 1024), help="Processes that share the questions [default: one a CPU].")
@click.option("--dask", metavar="SCHEDULER", help="Workers of a dask cluster in place of processes: tcp://host:8786.")
@click.option("--json", "as_json", is_flag=True, help="Print the answers, one memo.sweep/1 document a line.")
def sweep_command(models: tuple[str, ...], output: Path, *, as_json: bool, **options: Any) -> None:
    """Ask what-if for every combination of models, clusters, systems, lengths and other options.

    Every option that takes a value takes several, joined by commas: --tp 8,4 --recompute full,tokenwise. --questions
    has the questions in a file instead, with the names of the options: a line is {"model": "llama3-8b", "cluster":
    "h100-1x8", "seq_len": "1m", "loss_chunk": 0}.

    Every answer is written at once. After an interruption the same command asks only what is missing. That nothing fits
    is an answer; the exit code tells whether questions failed.
    """
    from memo_sim.answers.sweep import read_questions
    from memo_sim.answers.sweep_file import encoded
    from memo_sim.api import sweep
    from memo_sim.contract.codec import check_distinct, check_not_read, check_writable, write_bytes
    from memo_sim.contract.plain_text import json_text
    from memo_sim.views.chart import check_chart
    from memo_sim.views.sweep_table import sweep_csv, sweep_table

    source, csv_path, plot = options["questions"], options["csv_path"], options["plot"]
    written = [path for path in (output, csv_path, plot) if path is not None]
    named = [*(name for text in models for name in names_in(text, where="MODEL")), *_listed("cluster", options)]
    read = [*map(Path, named), *([source] if source else [])]
    for path in written:
        check_writable(path)
    check_not_read(written, read)
    check_distinct(written)
    if plot is not None:
        check_chart(plot)
    questions = _questions(models, options) if source is None else read_questions(source)
    asked = (values.get(name) for values in questions for name in ("model", "cluster"))
    check_not_read(written, map(Path, dict.fromkeys(text for text in asked if isinstance(text, str))))
    if source is not None and (
        given := typed("models", *IN_A_PLAN, *OF_A_QUESTION, *OF_A_LONG_RUN, *(knob.name for knob in ON_COMMAND_LINE))
    ):
        hint = "leave these out, or write them into the file"
        raise UsageError("--questions brings its own values", got=", ".join(given), hint=hint)
    with _executor(options["dask"]) as executor:
        found = with_progress(
            "sweep",
            lambda tell: sweep(questions, output, executor=executor, jobs=options["jobs"], progress=tell),
            told="questions",
        )
    if csv_path is not None:
        write_bytes(csv_path, sweep_csv(found.lines).encode())
    if plot is not None:
        found.plot(plot)
    show(json_text(b"".join(map(encoded, found.lines))).rstrip("\n") if as_json else sweep_table(found.lines))
    _check_failed(found.lines, output)


def _questions(models: tuple[str, ...], options: Options) -> list[dict[str, Any]]:
    """Return a question for every combination of the listed values.

    Raises:
        UsageError: when there is no model, cluster or length.
    """
    from memo_sim.answers.sweep import grid

    lists: dict[str, Any] = {"model": [name for text in models for name in names_in(text, where="MODEL")]}
    lists |= {name: _listed(name, options) for name in LISTS}
    if missing := [name for name, values in lists.items() if not values]:
        hint = "memo-sim sweep llama3-8b --cluster h100-1x8 --seq-len 64k,128k -o s.jsonl"
        raise UsageError(
            "a sweep needs MODEL, --cluster and --seq-len, or --questions", got=f"no {missing[0]}", hint=hint
        )
    defaults = {knob.argument: knob.default for knob in ON_COMMAND_LINE}
    values = {name: value for name, value in values_of(options).items() if value not in (None, defaults.get(name))}
    lists |= {name: value for name, value in values.items() if name not in lists}
    count = prod(len(value) for value in lists.values() if isinstance(value, list))
    if count > MOST_QUESTIONS:
        raise UsageError("too many combinations", got=f"{count} questions", wanted=f"at most {MOST_QUESTIONS}")
    return grid(**lists)


def _listed(name: str, options: Options) -> list[str]:
    """Return the values of an option that is a list; none where it is not given."""
    return names_in(options[name], where=f"--{name.replace('_', '-')}") if options[name] else []


@contextmanager
def _executor(scheduler: str | None) -> Iterator[Executor | None]:
    if scheduler is None:
        yield None
        return
    from memo_sim.answers.sweep import dask_executor

    with dask_executor(scheduler) as executor:
        yield executor


def _check_failed(lines: list[SweepLine], output: Path) -> None:
    """End with the exit code of the first question that failed."""
    failures = [line.failure for line in lines if line.failure is not None]
    if failures:
        say(
            f"memo-sim: {len(failures)} of {len(lines)} questions failed\n"
            f"  where: {output}\n  next: the same command asks them again, and nothing else"
        )
        sys.exit(failures[0].exit_code or MemoError.exit_code)
