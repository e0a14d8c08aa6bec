"""``memo-sim export`` and ``memo-sim import``: parse, call, render; nothing else."""

from __future__ import annotations

from pathlib import Path

import click

from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.views.command_line import show, show_document

TO = ("megatron-lm", "torchtitan")
"""Frameworks that plans go to and come from; ``interchange/frameworks.py`` has a module for each."""


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
    plan: Path, framework: str, output: Path, cluster: str | None, launcher: str, *, as_json: bool
) -> None:
    """Write the files by which another framework runs PLAN, and what is lost on the way.

    lost.md lists every decision of the plan that the framework cannot express, what it does instead, and what that
    costs by memo's prediction. Where what it can run does not fit, the files are written and the exit code is 4.
    """
    from memo_sim.answers.export_plan import export_plan
    from memo_sim.contract.catalog import load_cluster
    from memo_sim.contract.codec import check_new_folder, encode, read, write_folder
    from memo_sim.contract.plan import Plan
    from memo_sim.interchange.frameworks import find_framework
    from memo_sim.views.export_page import export_summary

    check_new_folder(output)
    given = read(plan, Plan)
    name = cluster or given.provenance.cluster
    if not name:
        raise UsageError("the plan does not say which cluster it was made for", hint="name one: --cluster a800-1x8")
    exported = export_plan(
        given, find_framework(framework), *load_cluster(name), "slurm" if launcher == "slurm" else "torchrun"
    )
    write_folder(output, exported.files)
    if as_json:
        show_document(encode(exported.document))
    else:
        show(export_summary(exported.document, str(output)))
    if not exported.fits:
        raise Infeasible(
            "the plan does not fit as the framework would run it",
            where=str(output / "lost.md"),
            hint=f"search one that does: memo-sim what-if ... --system {exported.document.system}",
        )


COMMANDS = (export_command,)
