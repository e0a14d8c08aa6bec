"""``memo-sim export`` and ``memo-sim import``: parse, call, render; nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memo_sim.contract.errors import Infeasible
from memo_sim.views.command_line import Silent, show, show_document, with_progress

if TYPE_CHECKING:
    from memo_sim.contract.interchange import FrameworkName, Launcher

TO = ("megatron-lm", "megatron-bridge", "torchtitan", "deepspeed", "accelerate", "trl")
"""Frameworks that plans go to and come from; ``interchange/frameworks.py`` has a module for each."""
FROM = (*TO, "verl")
"""Frameworks that jobs come from; verl's are read alone."""

GIVEN = click.option(
    "--set",
    "given",
    multiple=True,
    metavar="NAME=VALUE",
    help="A variable that a script leaves open, or an option of the job (repeat).",
)
"""Values for what the files of a job leave open."""


@click.command("export")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--to", "framework", type=click.Choice(TO), required=True, help="The framework.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="A new folder, or an empty one.",
)
@click.option("--cluster", help="Instead of the cluster that the plan was made for.")
@click.option(
    "--launcher",
    type=click.Choice(["torchrun", "slurm"]),
    default="torchrun",
    show_default=True,
    help="What starts the processes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one memo.export/1 document.")
def export_command(
    plan: Path, framework: FrameworkName, output: Path, cluster: str | None, launcher: Launcher, *, as_json: bool
) -> None:
    """Write the files by which another framework runs PLAN, and what is lost on the way.

    lost.md lists every decision of the plan that the framework cannot express, what it does instead, and what that
    costs by memo's prediction. Where what it can run does not fit, the files are written and the exit code is 4.
    """
    from memo_sim.api import export

    found = export(plan, to=framework, directory=output, cluster=cluster, launcher=launcher)
    if as_json:
        show_document(found.to_json().encode())
    else:
        show(str(found))
    if not found.fits:
        raise Infeasible(
            "the plan does not fit as the framework would run it",
            where=str(output / "lost.md"),
            hint=f"search one that does: {found.search_command}",
        )


@click.command("import")
@click.argument("files", nargs=-1, required=True, type=click.Path())
@click.option("--cluster", help="Where the job runs: says what it costs there, and what would be better.")
@click.option("--framework", type=click.Choice(FROM), help="Whose files they are, where they do not show it.")
@GIVEN
@click.option("--no-search", is_flag=True, help="Do not search for something better.")
@click.option("--all", "everything", is_flag=True, help="Show every option that was ignored with its value.")
@click.option("--json", "as_json", is_flag=True, help="Print one memo.job/1 document.")
def import_command(files: tuple[str, ...], cluster: str | None, **options: Any) -> None:
    """Read a job of another framework: what it says, what it costs, and what would be better.

    FILES are a shell script or arguments in YAML; a later file wins. Nothing in them is run: a value that only running
    would tell is named, and --set gives it. Every option is listed as read or as ignored, with the reason. `what-if
    --from` prices a job as a plan, and writes it.
    """
    from memo_sim.answers.import_job import parse_given
    from memo_sim.api import import_job
    from memo_sim.views.import_page import import_summary

    asked = {"cluster": cluster, "framework": options["framework"], "search": not options["no_search"]}
    asked["set"] = parse_given(options["given"])
    found = with_progress("plans", lambda tell: import_job(files, **asked, progress=tell))
    if options["as_json"]:
        show_document(found.to_json().encode())
    else:
        show(import_summary(found.document, everything=options["everything"]))
    if found.job is not None and found.job.status != "ok":
        raise Infeasible("the job does not fit", hint="see above") if not options["as_json"] else Silent(4)
