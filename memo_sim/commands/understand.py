"""``memo-sim oom``, ``compare`` and ``explain``: why a run is short of memory, what differs, what binds.

Everything heavier than click is imported inside the command that needs it.
"""

from __future__ import annotations

from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

import click

from memo_sim.question_options import cluster_options, question_of, question_options
from memo_sim.views.command_line import command_line, show, show_document, with_progress


@click.command("oom")
@click.argument("model", required=False)
@cluster_options
@click.option("--seq-len", help="Tokens of one sequence: 65536, 64k, 1m.")
@click.option(
    "--plan", "plan_path", type=click.Path(), help="The run of this plan.json, in place of MODEL and options."
)
@question_options
@click.option("--top", type=click.IntRange(1), default=3, show_default=True, help="Ways out to list.")
@click.option("--report", type=click.Path(path_type=Path), help="Write the answer as one HTML page that opens offline.")
@click.option("--json", "as_json", is_flag=True, help="Print one memo.shortage/1 document.")
def oom_command(*, top: int, report: Path | None, as_json: bool, **options: Any) -> None:
    """Say why a run is out of memory, and which single changes make it fit, with their price.

    Pin the knobs of your run with the same options as in what-if. MODEL is a preset, a memo.model/1 file or a Hugging
    Face config.json. The exit code is 0 whether the run fits or not.
    """
    from memo_sim.api import oom_of
    from memo_sim.contract.codec import check_not_read
    from memo_sim.views.report.page import check_page
    from memo_sim.views.shortage_table import shortage_text

    if report is not None:
        check_page(report)
        check_not_read([report], [Path(options[n]) for n in ("model", "cluster", "plan_path") if options[n]])
    plan, question = question_of(options)
    command = command_line("memo-sim")
    found = with_progress("changes", lambda tell: oom_of(question, plan, progress=tell, command=command))
    if report is not None:
        found.save_report(report)
    if as_json:
        show_document(found.to_json().encode())
    else:
        show(shortage_text(found.document, top=top))


@click.command("compare")
@click.argument("compared", nargs=-1, required=True, type=click.Path(), metavar="A B ...")
@click.option("--cluster", help="Simulate plans and results on this cluster, in place of their own predictions.")
@click.option("--top", type=click.IntRange(1), default=15, show_default=True, help="Operators to list.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw step and memory side by side (.png, .svg, .pdf).")
@click.option("--report", type=click.Path(path_type=Path), help="Write the comparison as one HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print one memo.difference/1 document.")
def compare_command(
    compared: tuple[str, ...], cluster: str | None, plot: Path | None, report: Path | None, *, top: int, as_json: bool
) -> None:
    """Say what differs between plans, results and measured runs: decisions, step time, memory.

    Each argument is a plan, the result of what-if --json (its best plan), the comparison of memo-exec run --json, or a
    trace. A plan without its trace beside it, and a result, are simulated again on their cluster, or on --cluster.
    """
    from memo_sim.api import compare
    from memo_sim.contract.codec import check_distinct, check_not_read
    from memo_sim.views.chart import check_chart
    from memo_sim.views.difference_table import difference_table
    from memo_sim.views.report.difference import difference_page
    from memo_sim.views.report.page import check_page, save_page

    written = [path for path in (plot, report) if path is not None]
    if plot is not None:
        check_chart(plot)
    if report is not None:
        check_page(report)
    traces = (trace for path in map(Path, compared) for trace in path.parent.glob(f"{escape(path.stem)}.trace*.json"))
    check_not_read(written, [*map(Path, compared), *traces, *([Path(cluster)] if cluster else [])])
    check_distinct(written)
    found = with_progress("sides", lambda tell: compare(*compared, cluster=cluster, progress=tell))
    if plot is not None:
        found.plot(plot)
    if report is not None:
        save_page(partial(difference_page, found.document), report, command_line("memo-sim"))
    if as_json:
        show_document(found.to_json().encode())
    else:
        show(difference_table(found.document, top=top))


@click.command("explain")
@click.argument("explained", type=click.Path(), metavar="PLAN|RESULT")
@click.option("--cluster", help="Explain the plan on this cluster, in place of the one that it was made for.")
@click.option("--top", type=click.IntRange(1), default=8, show_default=True, help="Rivals to list.")
@click.option("--json", "as_json", is_flag=True, help="Print one memo.explanation/1 document.")
def explain_command(explained: str, cluster: str | None, *, top: int, as_json: bool) -> None:
    """Say what binds a plan, what would help most and by how much, and why each rival loses.

    The argument is a plan, or the result of what-if --json. Rivals of a plan differ from it in one decision; those of a
    result are its ranked plans.
    """
    from memo_sim.api import explain
    from memo_sim.views.explanation_table import explanation_text

    found = with_progress("simulations", lambda tell: explain(explained, cluster=cluster, progress=tell))
    if as_json:
        show_document(found.to_json().encode())
    else:
        show(explanation_text(found.document, top=top))
