"""``memo-sim``: parse, call, render; nothing else.

Results go to standard output, progress and warnings to standard error. Everything heavier than click is imported
inside the command that needs it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from memo_sim import __version__
from memo_sim.commands.clusters import compare_clusters, datasheet_command, gpus_command
from memo_sim.commands.doctor import doctor_command
from memo_sim.commands.interchange import GIVEN, export_command, import_command
from memo_sim.commands.sweep import sweep_command
from memo_sim.commands.understand import compare_command, explain_command, oom_command
from memo_sim.contract.cycles import look_seldom
from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.knobs import MEMORY_GIB
from memo_sim.question_options import (
    JOBS,
    PRICE,
    Options,
    asked,
    cluster_options,
    long_run_options,
    names_in,
    prices_of,
    question_options,
)
from memo_sim.views.command_line import (
    SETTINGS,
    Commands,
    Finite,
    Silent,
    command_line,
    run_commands,
    say,
    say_usage,
    show,
    show_document,
    with_progress,
)
from memo_sim.views.stage_numbers import from_one

if TYPE_CHECKING:
    from memo_sim.contract.plan import Plan
    from memo_sim.planning.question import Question
    from memo_sim.results.planned import WhatIfResult


@click.group(cls=Commands, context_settings=SETTINGS)
@click.version_option(__version__, prog_name="memo-sim")
def cli() -> None:
    """Plan long-context training: does it fit, how fast will it be, with which plan, and why.

    Exit codes: 0 fine, 1 a bug, 2 wrong usage, 3 a bad input file, 4 nothing fits, 5 outside --max-error, 6 a package
    that the command needs is missing, 130 interrupted.
    """


WHY = click.option("--why", is_flag=True, help="Add the reasons: what limits the plan, and why others lose.")
IN_JSON, IN_TEXT = 10, 3
"""Exact ranks of an answer without --top: those that a document or a page has, and those that its reasons need."""


@cli.command("what-if")
@click.argument("model", required=False)
@cluster_options
@click.option("--seq-len", help="Tokens of one sequence: 65536, 64k, 1m.")
@click.option("--plan", "plan_path", type=click.Path(), help="Price this plan.json instead of searching.")
@click.option(
    "--from",
    "job_paths",
    multiple=True,
    type=click.Path(),
    help="Price the job of this script or configuration of another framework (repeat for several files).",
)
@GIVEN
@question_options
@long_run_options
@PRICE
@JOBS
@WHY
@click.option(
    "--top",
    type=click.IntRange(1),
    help="Add a table of so many ranked plans (--json, --report: 10 unless given); with subsequences three are exact.",
)
@click.option(
    "--pareto",
    is_flag=True,
    help="Add the Pareto front of time, device and host memory, alpha in eighths; near-duplicates are left out.",
)
@click.option(
    "--one-more-gib", is_flag=True, help="Say what a GiB more of device and of host memory buys (asks again)."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    help="Write the best plan, its trace and placement beside it.",
)
@click.option(
    "--plot", type=click.Path(), help="Draw the best plan's timeline, with --pareto the front (.png, .svg, .pdf)."
)
@click.option("--trace", "trace_path", type=click.Path(), help="Write its timeline for ui.perfetto.dev.")
@click.option("--full-trace", is_flag=True, help="With --trace: the instructions of every micro-batch.")
@click.option("--report", type=click.Path(), help="Write the answer as one HTML page that opens offline.")
@click.option("--json", "as_json", is_flag=True, help="Print one memo.result/2; of several clusters memo.results/1.")
def what_if_command(**options: Any) -> None:
    """Search every knob that is not pinned, and rank the plans.

    MODEL is a preset, a memo.model/1 file, or a Hugging Face config.json or its folder.
    """
    from memo_sim.views.answer_text import answer_text

    if options["cluster"] and len(names_in(options["cluster"])) > 1 and options["from_datasheet"] is None:
        compare_clusters(options, _ask)
        return
    outputs, plan, question = asked(options)
    result = _ask(plan, question, options, *prices_of(options, [question.cluster.name]))
    result.write(outputs)
    if result.refused and not options["as_json"]:
        raise result.refused
    if options["as_json"]:
        show_document(result.to_json().encode())
    else:
        show(answer_text(result.document, why=options["why"], top=options["top"], searched=plan is None))
    if result.best is None:
        if options["as_json"]:
            raise Silent(4)
        raise Infeasible("no plan fits", got=outputs.unwritten, hint="see the ways out above")


@cli.command("longest")
@click.argument("model")
@cluster_options
@click.option("--step", default="64k", show_default=True, help="The answer is a multiple of so many tokens.")
@click.option("--max-step-s", type=Finite(0, min_open=True), help="Seconds that a training step may take at most.")
@click.option("--one-more-gib", is_flag=True, help="Say how much longer a GiB more makes it (asks again, twice).")
@question_options
@long_run_options
@PRICE
@JOBS
@WHY
@click.option("-o", "--output", type=click.Path(), help="Write the plan, its trace and placement beside it.")
@click.option("--plot", type=click.Path(), help="Draw its timeline (.png, .svg, .pdf).")
@click.option("--trace", "trace_path", type=click.Path(), help="Write its timeline for ui.perfetto.dev.")
@click.option("--report", type=click.Path(), help="Write the answer as one HTML page that opens offline.")
@click.option("--json", "as_json", is_flag=True, help="Print one memo.longest/2 document.")
def longest_command(*, step: str, max_step_s: float | None, one_more_gib: bool, **options: Any) -> None:
    """Find the longest sequence that fits, to a step: the fastest plan there, and what bounds it.

    MODEL is a preset, a memo.model/1 file or a Hugging Face config.json.
    """
    from memo_sim.api import longest_of
    from memo_sim.contract.units import parse_tokens
    from memo_sim.planning.processes import command_processes
    from memo_sim.views.answer_text import longest_text

    parse_tokens(step, option="--step")
    outputs, _, question = asked({**options, "plan_path": None, "seq_len": step}, fill=False)
    (price,) = prices_of(options, [question.cluster.name])
    wanted: Options = {"step": step, "max_step_s": max_step_s, "one_more_gib": one_more_gib}
    wanted |= {"price_per_gpu_hour": price, "command": command_line("memo-sim")}
    with command_processes(options["jobs"]):
        found = with_progress("lengths", lambda tell: longest_of(question, **wanted, progress=tell), told="tried")
    if found.at_longest is not None:
        found.at_longest.write(replace(outputs, report=None))
    if outputs.report is not None:
        found.save_report(outputs.report, plan=outputs.plan)
    if options["as_json"]:
        show_document(found.to_json().encode())
    else:
        show(longest_text(found.document, why=options["why"]))
    if found.at_longest is None:
        if options["as_json"]:
            raise Silent(4)
        raise Infeasible("no length fits", got=outputs.unwritten, hint="see the reasons above")


def _ask(plan: Plan | None, question: Question, options: Options, price: float | None) -> WhatIfResult:
    from memo_sim.planning.processes import command_processes
    from memo_sim.results.answered import answered, priced

    command = command_line("memo-sim")
    if plan is not None:
        where = options["plan_path"] or options["job_paths"][0]
        return priced(plan, question, where=where, price_per_gpu_hour=price, command=command)
    document = options["as_json"] or options["report"]
    top = options["top"] or (IN_JSON if document else IN_TEXT)
    explained = bool(document or options["why"] or options["pareto"] or (options["top"] or 1) > 1)
    wanted: Options = {name: options[name] for name in ("pareto", "one_more_gib")}
    wanted |= {"top": top, "price_per_gpu_hour": price, "command": command, "explained": explained}
    with command_processes(options["jobs"]):
        return with_progress("plans", lambda tell: answered(question, **wanted, progress=tell), told="tried")


@cli.command("validate")
@click.argument("cases", required=False)
@click.option("--all", "every", is_flag=True, help="Every bundled case file, held against the accepted accuracy.")
@click.option("--source", help="Only the rows of this source.")
@click.option("--system", help="Only the rows of this system.")
@click.option("--max-error", type=Finite(0), help="Exit 5 when a mean absolute error exceeds this fraction.")
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    help="Write accuracy, worst and all cases as Markdown, or as a page: .md, .html.",
)
@click.option("--accept", "accepting", is_flag=True, help="With --all: hold this accuracy from now on.")
@click.option(
    "--jobs", type=click.IntRange(1, 64), default=1, show_default=True, help="Processes that share the cases."
)
@click.option("--json", "as_json", is_flag=True, help="Print one memo.validation/2 document.")
def validate_command(cases: str | None, report: Path | None, *, every: bool, accepting: bool, **options: Any) -> None:
    """Predict published cases and compare: CASES is a bundled file's name (memo-table5) or a CSV file.

    `memo-sim schema cases` describes the columns of a case file. Where no row can be evaluated the exit code is 4.
    """
    from memo_sim.answers.what_if import now
    from memo_sim.contract.codec import check_not_read, check_writable, encode, write_bytes
    from memo_sim.validation.accepted import accept, accuracy_of, check_accepted, load_accepted
    from memo_sim.validation.cases import list_case_files, load_cases, load_notes, path_of
    from memo_sim.validation.intervals import held_out, shipped_errors
    from memo_sim.validation.validate import check_error, check_evaluated, validate
    from memo_sim.views.report.page import SUFFIX, check_page, write_page
    from memo_sim.views.report.validation import validation_page
    from memo_sim.views.validation_report import validation_report
    from memo_sim.views.validation_table import validation_table

    if every == (cases is not None):
        raise UsageError("validate needs either a case file or --all", hint="memo-sim list cases")
    source, system = options["source"], options["system"]
    if accepting and not (every and source is None and system is None):
        raise UsageError("only all cases can be accepted", wanted="--all --accept without --source and --system")
    files = list_case_files() if cases is None else [cases]
    if report:
        check_page(report) if report.suffix.lower() == SUFFIX else check_writable(report)
        check_not_read([report], map(path_of, files))
    known = [case for file in files for case in load_cases(file)]
    rows = [c for c in known if source in (None, c.source) and system in (None, c.question.system)]
    if not rows:
        raise UsageError("no such rows", got=f"source {source}, system {system}", hint=f"see the columns of {cases}")
    found = with_progress("cases", lambda tell: validate(rows, progress=tell, jobs=options["jobs"]))
    tested = held_out(found, shipped_errors())
    if options["as_json"]:
        show_document(encode(found))
    else:
        show(validation_table(found, seq_tokens=[c.question.seq_tokens for c in rows], held_out=tested))
    if report:
        told = {"command": command_line("memo-sim"), "created": now(), "version": __version__}
        groups, notes = accuracy_of(found).groups, load_notes()
        if report.suffix.lower() == SUFFIX:
            write_page(validation_page(found, groups, tested, notes, **told), report)
        else:
            write_bytes(report, validation_report(found, groups, tested, notes, **told).encode())
    check_evaluated(found)
    if accepting:
        accept(found)
    elif every:
        check_accepted(found, load_accepted())
    if options["max_error"] is not None:
        check_error(found, options["max_error"])


@cli.command("fit")
@click.argument("cases")
@click.option("--constant", default="copy-rate", show_default=True, help="Named below.")
@click.option("--system", help="Only that system's cases.")
@click.option("--case", "chosen", multiple=True, required=True, help="A case to fit on (repeat).")
@click.option("--from", "low", type=Finite(0), required=True, help="Least value allowed, in the constant's unit.")
@click.option("--to", "high", type=Finite(0), required=True, help="Greatest value allowed.")
@click.option("--unfitted", type=Finite(0), required=True, help="The value one would assume without a fit.")
def fit_command(cases: str, constant: str, system: str | None, chosen: tuple[str, ...], **values: float) -> None:
    """Fit one constant of a profile on published cases, and show what the fit buys.

    copy-rate: the rate at which all devices of a node copy at once, GB/s. attention-factor: how many times as long
    attention takes under DeepSpeed-Ulysses as measured. device-memory: what cudaMalloc and cudaFree of a GiB take
    together, ms/GiB. host-launch: what an eager framework's host takes to launch a kernel, us; host-pass: what it takes
    besides for a pass through a stage, ms.

    Prints the fitted value and the errors of all rows with it, with the unfitted value, and with each length's rows
    left out of the fit. The profile is not changed.
    """
    from memo_sim.validation.cases import load_cases
    from memo_sim.validation.fit import find_constant, fit
    from memo_sim.views.fit_table import fit_table

    rows = [c for c in load_cases(cases) if system in (None, c.question.system)]
    report = with_progress("fits", lambda tell: fit(find_constant(constant), rows, chosen, progress=tell, **values))
    show(fit_table(report))


@cli.command("figure")
@click.argument("name")
@click.option("-o", "--output", type=click.Path(), help="Draw the figure into this file: .png, .svg, .pdf.")
@click.option("--json", "as_json", is_flag=True, help="Print one memo.figure/1 (of a table memo.validation/2).")
def figure_command(name: str, output: str | None, *, as_json: bool) -> None:
    """Compute a figure or table of a paper again: MEMO's 1a, 1b, 6, 11a, 11b, 11c, table3 to table5; SPPO's
    sppo-1, sppo-6, sppo-7, sppo-10, sppo-11, sppo-12, sppo-table2; METP's metp-4 to metp-7.

    A table's predictions stand where the paper printed the measurements, with the error beneath each.
    """
    from memo_sim.contract.codec import encode
    from memo_sim.papers.figures import figure
    from memo_sim.papers.memo import TABLES, published
    from memo_sim.views.chart import chart_table, check_chart, draw_chart
    from memo_sim.views.published_table import published_table
    from memo_sim.views.validation_table import summary_table

    if name in TABLES:
        if output:
            raise UsageError("a table is not drawn", got=f"-o {output}", hint="leave -o out, or --json")
        report, cells = with_progress("cases", lambda tell: published(name, progress=tell))
        text = f"{published_table(cells)}\n\n{summary_table(report.cases)}"
        if as_json:
            show_document(encode(report))
        else:
            show(text)
        return
    if output:
        check_chart(output)
    found = with_progress("plans", lambda tell: figure(name, progress=tell))
    if output:
        draw_chart(found, output)
    if as_json:
        show_document(encode(found))
    else:
        show(chart_table(found))


@cli.command("list")
@click.argument("what", type=click.Choice(["models", "clusters", "systems", "cases", "hardware", "combinations"]))
@click.argument("features", nargs=-1, metavar="[FEATURE [FEATURE]]")
@click.option("--json", "as_json", is_flag=True, help="Of combinations: print one memo.combinations/1 document.")
def list_command(what: str, features: tuple[str, ...], *, as_json: bool) -> None:
    """List what can be named (models, clusters, systems, case files, hardware profiles), or what goes together.

    combinations: a table of layouts, schedules, recompute modes, kinds of models and the like, computed from the rules
    that refuse plans. With one FEATURE: what it goes with, and why not with others. With two: whether they go together.
    """
    from memo_sim.answers.combinations import combinations_of
    from memo_sim.answers.listing import describe
    from memo_sim.contract.codec import encode
    from memo_sim.views.combinations_table import combinations_text

    if what == "combinations":
        found = combinations_of(features)
        if as_json:
            show_document(encode(found))
        else:
            show(combinations_text(found, of=features[0] if features else ""))
        return
    if features or as_json:
        got = features[0] if features else "--json"
        raise UsageError("that belongs to list combinations", got=got, hint=f"memo-sim list {what}")
    for line in describe(what):
        show(line)


@cli.command("schema")
@click.argument("name")
def schema_command(name: str) -> None:
    """Print the JSON Schema of a document: model, hardware, cluster, plan, trace, result, ...; cases: of a row."""
    import json

    from memo_sim.contract.schemas import json_schema
    from memo_sim.validation.cases import row_schema

    schema = row_schema() if name == "cases" else json_schema(name, others=("cases",))
    click.echo(json.dumps(schema, indent=2, sort_keys=True))


@cli.command("plan-memory")
@click.argument("path", metavar="INPUT")
@click.option(
    "--solver",
    type=click.Choice(["portfolio", "bilevel-mip", "mip", "greedy", "cp-sat"]),
    default="portfolio",
    show_default=True,
    help="portfolio: first fit, then exact search; bilevel-mip: MEMO's two levels; mip, cp-sat: all buffers at once.",
)
@click.option("--time-limit", type=Finite(0, min_open=True), default=60, show_default=True, help="Seconds to solve.")
@click.option("--device", type=click.IntRange(0), help="Of a snapshot; the one with most memory when not given.")
@click.option("--device-memory-gib", type=Finite(*MEMORY_GIB), help="What the caching allocator may reserve.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the placement: .json, .csv or .pickle.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw addresses over time (.png, .svg, .pdf).")
@click.option("--json", "as_json", is_flag=True, help="Print one memo.memory/2 document.")
def plan_memory_command(path: str, output: Path | None, plot: Path | None, *, as_json: bool, **options: Any) -> None:
    """Place every buffer of INPUT in one arena, beside what PyTorch's caching allocator would reserve.

    INPUT is a plan, memo.requests/1, a CSV id,lower,upper,size, a log of malloc and free lines, or a PyTorch memory
    snapshot. A placement in a .pickle opens in PyTorch's memory viewer.
    """
    from memo_sim.answers.plan_memory import check_outputs, write_files
    from memo_sim.api import plan_memory
    from memo_sim.views.placement_table import placement_report

    check_outputs(output, plot, read=Path(path))
    found = plan_memory(path, **options)
    write_files(found.made, output, plot)
    if as_json:
        show_document(found.to_json().encode())
    else:
        show(placement_report(found.document))


for command in (
    compare_command,
    datasheet_command,
    doctor_command,
    explain_command,
    export_command,
    gpus_command,
    import_command,
    oom_command,
    sweep_command,
):
    cli.add_command(command)


def _fail(text: str, code: int, error: BaseException) -> NoReturn:
    """Say why on standard error, where there is something to say, and end the process."""
    if isinstance(error, click.ClickException):
        say_usage(error)
    elif text:
        say(f"memo-sim: {from_one(text)}")
    sys.exit(code)


def main() -> None:
    """Run the command line; every expected failure becomes its message and exit code."""
    look_seldom()
    run_commands(cli, "memo-sim", _fail)


if __name__ == "__main__":
    main()
