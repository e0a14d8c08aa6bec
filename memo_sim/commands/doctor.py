"""``memo-sim doctor``: parse, call, render; nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from memo_sim.contract.errors import UsageError
from memo_sim.contract.plain_text import one_line
from memo_sim.views.command_line import show, show_document, with_progress


@click.command("doctor")
@click.option("--trace", type=click.Path(), help="A PyTorch profiler trace (.json, .json.gz) with shapes.")
@click.option("--memory", type=click.Path(), help="A memory snapshot of the same job (_dump_snapshot).")
@click.option("--cluster", help="Predict with this cluster or profile; otherwise the GPU that the trace names.")
@click.option(
    "--config",
    multiple=True,
    type=click.Path(),
    help="The job's script or configuration (as `import` reads it): what it costs with the measured rates (repeat).",
)
@click.option("--nccl-tests", type=click.Path(), multiple=True, help="Text output of one nccl-tests program (repeat).")
@click.option("--nvbandwidth", type=click.Path(), help="JSON of `nvbandwidth -j`.")
@click.option("-o", "--output", type=click.Path(), help="Write the profile, corrected by what was measured.")
@click.option("--json", "as_json", is_flag=True, help="Print one memo.recorded/1 document.")
def doctor_command(*, output: str | None, config: tuple[str, ...], as_json: bool, **files: Any) -> None:
    """Hold a recorded step of your own job against a profile: what takes how long, and what was expected.

    Record with torch.profiler.profile(record_shapes=True), a schedule and profiler.step(). Collective and copy rates
    may also come from nccl-tests and nvbandwidth. With -o the profile takes over what was measured; a plan for it:
    memo-sim what-if MODEL --cluster PROFILE.
    """
    from memo_sim.answers.doctor import diagnose
    from memo_sim.answers.import_job import import_job
    from memo_sim.contract.codec import check_not_read, check_writable, encode, write
    from memo_sim.views.import_page import import_summary
    from memo_sim.views.recorded_table import recorded_table

    if output:
        check_writable(Path(output))
        read = [*files["nccl_tests"], *config, *(files[name] for name in ("trace", "memory", "nvbandwidth", "cluster"))]
        check_not_read([Path(output)], [Path(path) for path in read if path])
    if as_json and (config or not files["trace"]):
        raise UsageError("--json prints what a trace shows", wanted="--trace FILE, without --config")
    found = diagnose(**files)
    if output:
        write(output, found.hardware)
    if as_json and found.job is not None:
        show_document(encode(found.job))
        return
    if found.job is not None:
        show(recorded_table(found.job))
    told = [one_line(text) for text in found.changes] or ["nothing: no kind of work has enough calls and time"]
    if output or found.job is None:
        head = f"{output} is {found.hardware.name} with:" if output else "measured; -o PROFILE writes a profile with:"
        show("\n".join([*([""] if found.job is not None else []), head, *told]))
    if config:
        machine = found.cluster, found.hardware
        job = with_progress("plans", lambda tell: import_job(config, {}, machine=machine, progress=tell))
        show("\nWith the measured rates:\n" + import_summary(job, everything=False))
