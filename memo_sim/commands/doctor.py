"""``memo-sim doctor``: parse, call, render; nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from memo_sim.commands.interchange import FROM, GIVEN
from memo_sim.contract.errors import UsageError
from memo_sim.views.command_line import show, show_document, with_progress


@click.command("doctor")
@click.option(
    "--trace", type=click.Path(), help="A PyTorch profiler trace (.json, .json.gz), or a folder with one of each rank."
)
@click.option("--memory", type=click.Path(), help="A memory snapshot of the same job (_dump_snapshot).")
@click.option("--cluster", help="Predict with this cluster or profile; otherwise the GPU that the trace names.")
@click.option(
    "--config",
    multiple=True,
    type=click.Path(),
    help="The job's script or configuration (as `import` reads it): what it costs with the measured rates (repeat).",
)
@click.option("--framework", type=click.Choice(FROM), help="With --config: whose files they are.")
@GIVEN
@click.option("--no-search", is_flag=True, help="With --config: do not search for something better.")
@click.option("--all", "everything", is_flag=True, help="With --config: show every ignored option with its value.")
@click.option(
    "--export",
    "export_to",
    type=click.Path(path_type=Path),
    help="With --config: write the best plan into a new folder, as files of the job's framework.",
)
@click.option("--nccl-tests", type=click.Path(), multiple=True, help="Output of nccl-tests: text, or JSON (repeat).")
@click.option("--nvbandwidth", type=click.Path(), help="JSON of `nvbandwidth -j`.")
@click.option("-o", "--output", type=click.Path(), help="Write the profile, corrected by what was measured.")
@click.option("--cluster-output", type=click.Path(), help="With -o: write the cluster of several nodes with it.")
@click.option("--json", "as_json", is_flag=True, help="Print one memo.recorded/1 document.")
def doctor_command(*, output: str | None, cluster_output: str | None, as_json: bool, **options: Any) -> None:
    """Hold a recorded step of your own job against a profile: what takes how long, and what was expected.

    Record with torch.profiler.profile(record_shapes=True), a schedule and profiler.step(). Collective and copy rates
    may also come from nccl-tests and nvbandwidth. With -o the profile takes over what was measured; a plan for it:
    memo-sim what-if MODEL --cluster PROFILE.
    """
    from memo_sim.answers.import_job import parse_given
    from memo_sim.api import doctor
    from memo_sim.contract.codec import check_new_folder

    config, export_to = options.pop("config"), options.pop("export_to")
    of_job = {name: options.pop(name) for name in ("framework", "given", "no_search", "everything")}
    _check(options, config, export_to, of_job, as_json=as_json)
    _check_outputs(options, config, output, cluster_output)
    if export_to:
        check_new_folder(export_to)
    asked = {"framework": of_job["framework"], "search": not of_job["no_search"]}
    asked |= {"config": config, "set": parse_given(of_job["given"])} if config else {}
    found = with_progress("plans", lambda tell: doctor(**options, **asked, progress=tell))
    if output:
        found.save(output)
        if cluster_output:
            found.save_cluster(cluster_output, profile=output)
    if as_json:
        show_document(found.to_json().encode())
        return
    if text := found.text(output, everything=of_job["everything"]):
        show(text)
    if export_to:
        show(f"\n{found.export(export_to)}")
    elif found.imported is not None and found.imported.better:
        show("\n--export DIR writes the best plan of the job's own framework as its files.")


def _check(
    files: dict[str, Any], config: tuple[str, ...], export_to: Path | None, of_job: dict[str, Any], *, as_json: bool
) -> None:
    """Refuse options that say nothing together."""
    if as_json and (config or not files["trace"]):
        raise UsageError("--json prints what a trace shows", wanted="--trace FILE, without --config")
    if not config and (export_to or any(of_job.values())):
        raise UsageError("these options are about the files of a job", wanted="--config FILE")
    if export_to and of_job["no_search"]:
        raise UsageError("the best plan is found by a search", got="--export with --no-search")


def _check_outputs(
    files: dict[str, Any], config: tuple[str, ...], output: str | None, cluster_output: str | None
) -> None:
    """Refuse files that cannot be written, or that are read."""
    from memo_sim.contract.codec import check_distinct, check_not_read, check_writable

    if cluster_output and not output:
        raise UsageError("a cluster's file names its profile's", wanted="-o PROFILE --cluster-output CLUSTER")
    written = [Path(path) for path in (output, cluster_output) if path]
    for path in written:
        check_writable(path)
    check_distinct(written)
    named = [*files["nccl_tests"], *config, *(files[name] for name in ("trace", "memory", "nvbandwidth", "cluster"))]
    read = [Path(path) for path in named if path]
    traces = (each for folder in read if folder.is_dir() for each in folder.iterdir())
    check_not_read(written, [*read, *traces])
