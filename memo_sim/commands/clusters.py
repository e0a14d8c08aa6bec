"""Commands of ``memo-sim`` about clusters: parse, call, render; ``cli.py`` adds them to the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memo_sim.contract.errors import Infeasible
from memo_sim.question_options import (
    FROM_DATASHEET,
    JOBS,
    OF_A_SEARCH,
    PRICE,
    Options,
    asked,
    gpu_kinds,
    long_run_options,
    names_in,
    prices_of,
    question_on,
    question_options,
)
from memo_sim.views.command_line import Silent, command_line, show, show_document, typed, with_progress

if TYPE_CHECKING:
    from memo_sim.api import WhatIfResult
    from memo_sim.contract.plan import Plan
    from memo_sim.planning.question import Question


@click.command("datasheet")
@click.argument("figures", metavar="KEY=VALUE,...")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the profile: a .json to keep and edit.")
def datasheet_command(figures: str, output: Path | None) -> None:
    """Make a rough hardware profile from the figures of a GPU's data sheet.

    Pairs are joined by commas, or by spaces within quotes: tflops=165,memory=24,pcie=4x16. The options
    --from-datasheet of other commands take the same text; a written profile stands for --cluster.

    \b
    tflops        dense bf16 TFLOP/s with fp32 accumulation, without sparsity
    memory        GiB of one board
    pcie          generation x lanes: 4x16
    bandwidth     GB/s of the device's memory [in proportion to tflops]
    fp32          TFLOP/s without tensor cores [in proportion to tflops]
    nvlink        GB/s of all NVLinks of a device, both directions together [none]
    p2p           yes or no: boards reach each other's memory over PCIe [no]
    uplink        boards that share one PCIe link to the host [1]
    devices       boards of a node [8]
    nodes         nodes [1]
    network-gbps  Gb/s of one network card [none]
    cards         network cards of a node [1]
    host          GiB of a node's host memory [in proportion to memory]
    like          a100, h100 or b200: whose fractions of peak are taken [a100]
    generation    the architecture's name
    name          the profile's name [datasheet]

    a100 is like chips whose tensor cores work as Ampere's do (Ampere, Ada, GeForce and RTX PRO Blackwell), h100 like
    Hopper's, b200 like data-center Blackwell's. With several nodes, or a network, the cluster is written beside the
    profile: NAME.cluster.json.
    """
    from memo_sim.contract.catalog import cluster_from_datasheet
    from memo_sim.contract.codec import check_distinct, check_writable, write
    from memo_sim.contract.errors import UsageError
    from memo_sim.contract.peaks import warnings_about
    from memo_sim.views.datasheet_table import datasheet_table
    from memo_sim.views.text_table import warning_lines

    beside = output.with_name(f"{output.stem}.cluster.json") if output else None
    if output is not None and beside is not None:
        if output.suffix != ".json":
            raise UsageError("a profile is a JSON file", got=str(output), wanted="a name that ends in .json")
        check_writable(output)
        check_writable(beside)
        check_distinct([output, beside])
    cluster, hardware = cluster_from_datasheet(figures)
    for block in warning_lines(warnings_about(hardware, {})):
        show(block + "\n")
    show(datasheet_table(cluster, hardware))
    if output is None or beside is None:
        return
    write(output, hardware)
    show(f"\nwrote {output}: --cluster {output} is one node of {hardware.devices}")
    if cluster.network is not None:
        import msgspec

        write(beside, msgspec.structs.replace(cluster, hardware=output.name))
        show(f"wrote {beside}: --cluster {beside} is {cluster.nodes} x {cluster.devices_per_node} with its network")


def compare_clusters(
    options: Options, ask: Callable[[Plan | None, Question, Options, float | None], WhatIfResult]
) -> None:
    """Answer ``what-if`` about the several clusters that ``--cluster`` lists; ``ask`` answers about one of them.

    Raises:
        UsageError: when the options contradict each other, or name what there is not.
        Infeasible: when no plan fits on any of them.
    """
    from memo_sim.api import check_clusters, ranked
    from memo_sim.contract.errors import UsageError

    if given := typed("top", *OF_A_SEARCH):
        hint = "name one cluster, or leave it out"
        raise UsageError("not for several clusters at once", got=", ".join(given), hint=hint)
    names = names_in(options["cluster"])
    check_clusters(names)
    all_asked = [asked({**options, "cluster": name}) for name in names]
    outputs = all_asked[0][0]
    replace(outputs, read=tuple(file for each, *_ in all_asked for file in each.read)).check()
    prices = prices_of(options, [question.cluster.name for *_, question in all_asked])
    found = [ask(plan, question, options, price) for (_, plan, question), price in zip(all_asked, prices, strict=True)]
    result = ranked(found, prices=prices)
    result.answers[0].write(replace(outputs, report=None))
    if outputs.report is not None:
        result.save_report(outputs.report, plan=outputs.plan)
    if options["as_json"]:
        show_document(result.to_json().encode())
    else:
        show(str(result))
    if result.best is None:
        if options["as_json"]:
            raise Silent(4)
        raise Infeasible("no plan fits on any cluster", got=outputs.unwritten, hint="see above")


@click.command("gpus")
@click.argument("model")
@click.option("--seq-len", required=True, help="Tokens of one sequence: 65536, 64k, 1m.")
@click.option(
    "--cluster",
    metavar="KIND,...",
    help="Kinds of GPU to compare: h100, h100-ndr4, a cluster name or file, a profile file [a800,h100,h200,b200].",
)
@FROM_DATASHEET
@click.option("--within", metavar="DURATION", help="Time that a step may take: 600s, 10m, 2h.")
@click.option(
    "--most-gpus", type=click.IntRange(1), default=1024, show_default=True, help="More of one kind are not tried."
)
@question_options
@long_run_options
@PRICE
@JOBS
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the chosen plan, its trace and placement.")
@click.option("--report", type=click.Path(path_type=Path), help="Write the answer as one HTML page that opens offline.")
@click.option("--json", "as_json", is_flag=True, help="Print one memo.gpus/1 document.")
def gpus_command(**options: Any) -> None:
    """Find how many GPUs are needed, of which kind, and what they cost.

    For each kind: the smallest number on which MODEL fits, the smallest whose step is within --within, and the one with
    the fewest GPU-hours. All are asked for the same batch.

    MODEL is a preset, a memo.model/1 file or a Hugging Face config.json.
    """
    from memo_sim.answers.what_if import Outputs
    from memo_sim.api import gpus_of
    from memo_sim.contract.catalog import model_file, profile_path
    from memo_sim.planning.processes import command_processes

    kinds = gpu_kinds(options)
    names = names_in(options["cluster"]) if options["cluster"] else []
    profiles = (profile_path(name, kind.cluster) for name, kind in zip(names, kinds, strict=False))
    read = (Path(model_file(options["model"])), *map(Path, names), *profiles)
    outputs = Outputs(plan=options["output"], report=options["report"], read=read)
    outputs.check()
    limits = Options(within=options["within"], most_gpus=options["most_gpus"], command=command_line("memo-sim"))
    limits["prices"] = prices_of(options, [kind.name for kind in kinds])
    questions = [(kind, question_on(options, kind.cluster, kind.hardware, fill=False)) for kind in kinds]
    with command_processes(options["jobs"]):
        found = with_progress("gpus", lambda tell: gpus_of(questions, **limits, progress=tell), told="numbers of GPUs")
    if found.at_chosen is not None:
        found.at_chosen.write(replace(outputs, report=None))
    if outputs.report is not None:
        found.save_report(outputs.report, plan=outputs.plan)
    if options["as_json"]:
        show_document(found.to_json().encode())
    else:
        show(str(found))
    if found.at_chosen is None:
        if options["as_json"]:
            raise Silent(4)
        raise Infeasible("no number of GPUs is enough", got=outputs.unwritten, hint="see above")
