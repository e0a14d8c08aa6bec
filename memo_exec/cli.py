"""``memo-exec``: parse, call, render; nothing else.

Results go to standard output; step lines, progress and warnings to standard error. torch is imported inside the
commands.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from memo_exec.commands.error_file import leave_for_torchrun
from memo_sim import __version__
from memo_sim.contract.errors import RankLost, UsageError
from memo_sim.views.command_line import SETTINGS, SIGNALLED, Commands, Finite, run_commands, say, typed, with_progress

if TYPE_CHECKING:
    from memo_exec.commands.run import Outcome
    from memo_sim.contract.comparison import Comparison

Options = dict[str, Any]

HYPERPARAMETERS = {
    "lr": "learning_rate",
    "beta1": "beta1",
    "beta2": "beta2",
    "eps": "epsilon",
    "weight_decay": "weight_decay",
    "clip": "clip",
    "warmup_steps": "warmup_steps",
    "decay_steps": "decay_steps",
    "final_fraction": "final_fraction",
}
"""Options and the fields of ``Hyperparameters`` they set."""


class Named(click.Path):
    """A path that is not empty: an unset variable of a script is no file, and Path("") would be this folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or fail with the option's name."""
        if not str(value):
            self.fail("An empty name is given.", param, ctx)
        return super().convert(value, param, ctx)


FILE = Named(path_type=Path, dir_okay=False)
DIRECTORY = Named(path_type=Path, file_okay=False)


@click.group(cls=Commands, context_settings=SETTINGS)
@click.version_option(__version__, prog_name="memo-exec")
def cli() -> None:
    """Run a plan on this machine, measure it, and compare with what was predicted.

    Exit codes: 0 fine, 1 a bug, 2 wrong usage, 3 a bad input file, 5 outside --tolerance, 6 this machine cannot run the
    plan, 130 interrupted.
    """


@cli.command("run")
@click.argument("plan", type=FILE)
@click.option("--data", type=FILE, help="Text (its bytes are the tokens), or token ids: .npy, .bin, .ids.")
@click.option("--weights", type=DIRECTORY, help="Start from these Hugging Face safetensors, not from random weights.")
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Steps of the whole run.")
@click.option("--seed", type=click.IntRange(0), help="Of the weights and the order of the data; 0 unless given.")
@click.option("--lr", type=Finite(0, min_open=True), help="Learning rate [default: 3e-4].")
@click.option("--warmup-steps", type=click.IntRange(0), help="Steps of linear warm-up [default: 0].")
@click.option(
    "--decay-steps", type=click.IntRange(0), help="Steps of cosine decay after it; 0 = constant [default: 0]."
)
@click.option("--final-fraction", type=Finite(0, 1), help="Of --lr, where the decay ends [default: 0.1].")
@click.option("--weight-decay", type=Finite(0), help="Of matrices and embeddings [default: 0.1].")
@click.option("--clip", type=Finite(0), help="Largest gradient norm; 0 = no clipping [default: 1].")
@click.option("--beta1", type=Finite(0, 1, max_open=True), help="[default: 0.9]")
@click.option("--beta2", type=Finite(0, 1, max_open=True), help="[default: 0.95]")
@click.option("--eps", type=Finite(0, min_open=True), help="[default: 1e-8]")
@click.option("--save", type=DIRECTORY, help="Keep checkpoints here, and the trained weights at the end.")
@click.option("--save-every", type=click.IntRange(1), default=10, show_default=True, help="Steps between checkpoints.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint of --save; begin when there is none.")
@click.option("--tolerance", type=Finite(0), help="Exit 5 when the step time's error exceeds this fraction.")
@click.option("--trace", "trace_path", type=FILE, help="Write both timelines for ui.perfetto.dev.")
@click.option("--measured", "measured_path", type=FILE, help="Write the measured step as memo.trace/1.")
@click.option(
    "--debug", is_flag=True, help="Check the program first, poison what was offloaded, check every copy and order."
)
@click.option(
    "--replay-allocator",
    is_flag=True,
    help="CUDA: hand out device memory below torch, at planned addresses, and say what did not fit the plan.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one memo.comparison/1 document.")
def run_command(**options: Any) -> None:
    """Train by PLAN and print measured against predicted (the median step after warm-up).

    A plan for several devices runs under torchrun, a rank a device: torchrun --nproc_per_node 2 -m memo_exec run PLAN.
    The first rank prints; every rank writes its own timelines (trace.json, trace.rank1.json, ...). After a failure
    torchrun exits with 1; what it prints last says which rank failed, why, and with which of memo-exec's exit codes.
    """
    from memo_exec.commands.outputs import check_outputs, of_rank
    from memo_exec.commands.run import RunOptions, run

    for name in ("trace_path", "measured_path"):
        options[name] = options[name] and of_rank(options[name])
    if (every := typed("save_every")) and options["save"] is None:
        raise UsageError("checkpoints are kept where --save says", got=", ".join(every), hint="add --save DIR")
    read = (options["plan"], options["data"], options["weights"])
    check_outputs(options["trace_path"], options["measured_path"], read=read)
    chosen = RunOptions(
        hyperparameters={HYPERPARAMETERS[k]: v for k, v in options.items() if k in HYPERPARAMETERS and v is not None},
        **{name: options[name] for name in RunOptions.__dataclass_fields__ if name in options},
    )
    outcome = run(options["plan"], chosen, tell=lambda figure: say(figure.line()), note=say)
    if outcome is None:
        raise click.Abort
    if not outcome.stopped_by and outcome.rank == 0:
        _print_comparison(outcome.comparison, as_json=options["as_json"])
    _write_traces(outcome, options["trace_path"], options["measured_path"])
    if outcome.stopped_by:
        if outcome.rank == 0:
            say(f"interrupted after step {outcome.steps}")
        sys.exit(SIGNALLED + outcome.stopped_by)
    if outcome.rank == 0:
        _check_tolerance(outcome.comparison, options["tolerance"])


@cli.command("profile")
@click.argument("plan", type=FILE)
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Steps to play; the median counts.")
@click.option(
    "--trace", "trace_path", type=FILE, help="For ui.perfetto.dev [default: PLAN's name with .perfetto.json]."
)
@click.option("-o", "--output", type=FILE, help="The measured memo.trace/1 [default: PLAN's name with .measured.json].")
@click.option(
    "--requests",
    "as_requests",
    is_flag=True,
    help="Record what a step asks of the allocator instead (-o: memo.requests/1 [default: .requests.json]).",
)
def profile_command(plan: Path, steps: int, trace_path: Path | None, output: Path | None, *, as_requests: bool) -> None:
    """Play a few steps of PLAN and write the measured timeline.

    With --requests one step is recorded request by request and compared with the program's own peak. Where no GPU can
    run the step it is played with fake tensors, so it need not fit this machine.
    """
    from memo_exec.commands.outputs import check_outputs, of_rank, write_perfetto
    from memo_exec.commands.run import RunOptions, run
    from memo_sim.contract.codec import write

    if as_requests:
        if given := typed("steps", "trace_path"):
            hint = "leave it out, or --requests"
            raise UsageError("one step is recorded, and no timeline written", got=", ".join(given), hint=hint)
        _profile_requests(plan, output or plan.with_name(f"{plan.stem}.requests.json"))
        return
    trace_path = of_rank(trace_path or plan.with_name(f"{plan.stem}.perfetto.json"))
    output = of_rank(output or plan.with_name(f"{plan.stem}.measured.json"))
    check_outputs(trace_path, output, read=(plan,))
    outcome = run(plan, RunOptions(steps=steps), tell=lambda figure: say(figure.line()), note=say)
    if outcome is None or outcome.stopped_by:
        raise click.Abort
    write_perfetto([outcome.measured], trace_path)
    write(output, outcome.measured)
    click.echo(f"{output}: one measured step\n{trace_path}: open it at ui.perfetto.dev")


def _profile_requests(plan: Path, output: Path) -> None:
    from memo_exec.commands.outputs import check_outputs
    from memo_exec.commands.run import observe
    from memo_sim.contract.codec import write

    check_outputs(output, read=(plan,))
    found = observe(plan, say)
    write(output, found.requests)
    click.echo("\n".join([*found.lines(), f"{output}: the requests of one step"]))


@cli.command("compare")
@click.argument("predicted", type=FILE)
@click.argument("measured", type=FILE)
@click.option("--tolerance", type=Finite(0), help="Exit 5 when the step time's error exceeds this fraction.")
@click.option("--trace", "trace_path", type=FILE, help="Write both timelines for ui.perfetto.dev.")
@click.option("--plot", type=FILE, help="Draw both timelines on one axis (.png, .svg, .pdf).")
@click.option("--json", "as_json", is_flag=True, help="Print one memo.comparison/1 document.")
def compare_command(predicted: Path, measured: Path, *, as_json: bool, **options: Any) -> None:
    """Compare a prediction with a measured step, by lane and by kind of instruction.

    PREDICTED is a plan (with its trace beside it) or a memo.trace/1; MEASURED is a memo.trace/1 (of run --measured or
    profile).
    """
    from memo_exec.commands.compare import compare_files
    from memo_exec.commands.outputs import check_outputs, draw_both, write_perfetto

    trace_path, picture = options["trace_path"], options["plot"]
    check_outputs(trace_path, read=(predicted, measured), picture=picture)
    comparison, traces = compare_files(predicted, measured)
    if picture is not None:
        draw_both(traces, picture)
    _print_comparison(comparison, as_json=as_json)
    if trace_path is not None:
        write_perfetto(traces, trace_path)
    _check_tolerance(comparison, options["tolerance"])


@cli.command("calibrate")
@click.option("-o", "--output", type=FILE, required=True, help="The memo.hardware/1 profile to write.")
@click.option("--name", help="Of the profile; made from the device's name unless given.")
@click.option(
    "--budget-s",
    type=Finite(0, min_open=True),
    help="Begin no further pass over the operators beyond so many seconds [default: 240].",
)
def calibrate_command(output: Path, name: str | None, budget_s: float | None) -> None:
    """Measure single operators and copies on this machine and write its profile.

    Under torchrun, one rank a device of this node, also collectives, and copies with every device copying; rank 0
    writes.
    """
    from memo_exec.commands.calibrate import calibrate
    from memo_exec.commands.outputs import check_outputs
    from memo_sim.contract.codec import write

    check_outputs(output)
    profile = with_progress(
        "calibrating",
        lambda tell: calibrate(name=name, progress=tell, note=say, command=_command_line(), budget_s=budget_s),
        told="measurements",
    )
    if profile is None:  # rank 0 writes
        return
    write(output, profile)
    click.echo(f"{output}: profile {profile.name}; plan with memo-sim what-if MODEL --cluster {output} --seq-len ...")


@cli.command("doctor")
@click.argument("plan", type=FILE, required=False)
def doctor_command(plan: Path | None) -> None:
    """Show what is here: device, memory, kernels, versions. With PLAN check that plan instead.

    The plan is lowered; its hash, the program of every stage, what stages send each other, and the placement beside it
    are checked. Exit code: of the first check that fails, 3 for the files, 1 for a faulty program (a bug).
    """
    from memo_exec.commands.doctor import plan_report, report

    if plan is None:
        click.echo(report())
        return
    text, code = plan_report(plan)
    click.echo(text)
    if code:
        sys.exit(code)


def _command_line() -> str:
    return " ".join(["memo-exec", *sys.argv[1:]])


def _print_comparison(comparison: Comparison, *, as_json: bool) -> None:
    from memo_sim.contract.codec import encode
    from memo_sim.views.comparison_table import comparison_table

    click.echo(encode(comparison).decode() if as_json else comparison_table(comparison), nl=not as_json)


def _check_tolerance(comparison: Comparison, tolerance: float | None) -> None:
    from memo_exec.commands.compare import check_tolerance

    if tolerance is not None:
        check_tolerance(comparison, tolerance)


def _write_traces(outcome: Outcome, trace_path: Path | None, measured_path: Path | None) -> None:
    from memo_exec.commands.outputs import write_perfetto
    from memo_sim.contract.codec import write

    if trace_path is not None:
        both = [outcome.predicted, outcome.measured]
        write_perfetto([trace for trace in both if trace is not None], trace_path)
    if measured_path is not None:
        write(measured_path, outcome.measured)


def _who() -> str:
    """Return which rank speaks, where there are several."""
    from memo_exec.commands.outputs import rank

    return f"rank {rank()}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""


def _fail(text: str, code: int, error: BaseException) -> NoReturn:
    """Say why and end the process: one of several ranks at once, as a thread of it may wait for ranks that wait for it.

    What torchrun prints at its end is not printed here too.
    """
    usage = error if isinstance(error, click.ClickException) else None
    text = f"memo-exec: {_who()}{text if usage is None else usage.format_message()}"
    if not leave_for_torchrun(text, caused_elsewhere=isinstance(error, RankLost)):
        say(text) if usage is None else usage.show()
    if _who() and usage is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main() -> None:
    """Run the command line; every expected failure becomes its message and exit code."""
    run_commands(cli, "memo-exec", _fail)


if __name__ == "__main__":
    main()
