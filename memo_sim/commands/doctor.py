"""``memo-sim doctor``: parse, call, render; nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from memo_sim.contract.errors import UsageError
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
    from memo_sim.answers.import_job import import_job
    from memo_sim.api import doctor
    from memo_sim.contract.codec import check_not_read, check_writable
    from memo_sim.views.recorded_table import diagnosis_text, priced_text

    if output:
        check_writable(Path(output))
        read = [*files["nccl_tests"], *config, *(files[name] for name in ("trace", "memory", "nvbandwidth", "cluster"))]
        check_not_read([Path(output)], [Path(path) for path in read if path])
    if as_json and (config or not files["trace"]):
        raise UsageError("--json prints what a trace shows", wanted="--trace FILE, without --config")
    found = doctor(**files)
    if output:
        found.save(output)
    if as_json:
        show_document(found.to_json().encode())
        return
    if text := diagnosis_text(found.made.job, found.profile.name, found.changes, output=output):
        show(text)
    if config:
        machine = found.made.cluster, found.profile
        job = with_progress("plans", lambda tell: import_job(config, {}, machine=machine, progress=tell))
        show(f"\n{priced_text(job)}")
