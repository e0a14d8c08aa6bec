"""Runs the campaign: ``python -m tests.campaign --inputs 100000 --seed 1 -o findings.jsonl``.

Prints how many inputs ended with which exit code, and every finding once. Exits with 1 when there is one. ``--only N``
plays one input again and keeps its files. ``--processes`` runs the part with processes.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

from tests.campaign.inputs import Inputs, Totals, campaign


def load_everything() -> None:
    """Import every module of memo, so that children begin with all of them, and without threads."""
    torch.set_num_threads(1)
    for name in ("memo_sim", "memo_exec"):
        for found in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
            if "triton" not in found.name and not found.name.endswith("__main__"):
                try:
                    importlib.import_module(found.name)
                except ImportError:  # a backend that is not installed here
                    continue


@click.command()
@click.option("--inputs", type=click.IntRange(1), default=1000, show_default=True, help="Inputs to play.")
@click.option(
    "--first", type=click.IntRange(0), default=0, show_default=True, help="Number of the first input to play."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed that all inputs are drawn with.")
@click.option("--limit-s", type=float, help="Stop at the next thousand inputs after this many seconds.")
@click.option(
    "--only", type=click.IntRange(0), help="Play only the input of this number, and keep its files in --keep."
)
@click.option("--keep", type=click.Path(path_type=Path), default=Path("kept"), help="Folder for the files of --only.")
@click.option(
    "--processes",
    type=click.IntRange(0),
    help="Instead of inputs: kill, limit and interrupt running processes, this many kills.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File for findings, one JSON object a line.")
def main(**given: Any) -> None:
    """Give memo changed files and options, and judge how it ends.

    Every input is a command line with its files, some of them damaged. A finding is an input after which memo ends with
    an undocumented exit code, a message that names no place, a traceback, or a changed file of another command. The
    command exits with 1 when there is a finding.
    """
    load_everything()
    seed, first, keep = given["seed"], given["first"], given["keep"]
    if given["only"] is not None:
        played = Inputs(keep.resolve(), seed).play(given["only"], keep.resolve() / "input")
        click.echo(json.dumps(asdict(played), indent=2))
        click.echo(f"its files: {keep / 'input'}")
        return
    if given["processes"] is not None:
        from tests.campaign.processes import play_all

        trials = play_all(seed, given["processes"], tell=lambda trial: click.echo(trial.line()))
        sys.exit(1 if any(trial.complaints for trial in trials) else 0)

    def tell(reached: int, totals: Totals) -> None:
        click.echo(f"{reached} inputs, {sum(map(len, totals.findings.values()))} findings", err=True)
        if (output := given["output"]) is not None:
            lines = [json.dumps(asdict(played)) for found in totals.findings.values() for played in found[:3]]
            output.write_text("".join(f"{line}\n" for line in lines))

    totals, reached = campaign(seed, range(first, first + given["inputs"]), tell=tell, limit_s=given["limit_s"])
    click.echo(totals.table())
    slowest = totals.slowest
    click.echo(f"\ninputs {first} to {reached - 1} of seed {seed}, {totals.seconds:.0f} s; slowest: ", nl=False)
    click.echo(f"{slowest.number} with {slowest.seconds:.1f} s ({slowest.kind})" if slowest else "none")
    click.echo(f"{sum(map(len, totals.findings.values()))} findings of {len(totals.findings)} sorts")
    for signature, found in sorted(totals.findings.items(), key=lambda item: -len(item[1])):
        click.echo(f"{len(found):6} {signature!r}\n       first: {found[0].number} ({found[0].change!r})")
    sys.exit(1 if totals.findings else 0)


if __name__ == "__main__":
    main()
