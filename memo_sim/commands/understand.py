"""``memo-sim oom``, ``compare`` and ``explain``: why a run is short of memory, what differs, what binds.

Everything heavier than click is imported inside the command that needs it.
"""

from __future__ import annotations

from typing import Any

import click

from memo_sim.question_options import question_of, question_options
from memo_sim.views.command_line import show, show_document, with_progress

CLUSTER = "a800-1x8, a cluster file, or a hardware profile file."


@click.command("oom")
@click.argument("model", required=False)
@click.option("--cluster", required=True, help=CLUSTER)
@click.option("--seq-len", help="Tokens of one sequence: 65536, 64k, 1m.")
@click.option(
    "--plan", "plan_path", type=click.Path(), help="The run of this plan.json, in place of MODEL and options."
)
@question_options
@click.option("--top", type=click.IntRange(1), default=3, show_default=True, help="Ways out to list.")
@click.option("--json", "as_json", is_flag=True, help="Print one memo.shortage/1 document.")
def oom_command(*, top: int, as_json: bool, **options: Any) -> None:
    """Say why a run is out of memory, and which single changes make it fit, with their price.

    Pin the knobs of your run with the same options as in what-if. MODEL is a preset, a memo.model/1 file or a Hugging
    Face config.json. The exit code is 0 whether the run fits or not.
    """
    from memo_sim.answers.shortage import shortage
    from memo_sim.contract.codec import encode
    from memo_sim.planning.plan_question import question_of_plan
    from memo_sim.views.shortage_table import shortage_text

    plan, question = question_of(options)
    if plan is not None:
        question = question_of_plan(plan.decisions, question.cluster, question.hardware)
    found = with_progress("changes", lambda tell: shortage(question, progress=tell))
    if as_json:
        show_document(encode(found))
    else:
        show(shortage_text(found, top=top))
