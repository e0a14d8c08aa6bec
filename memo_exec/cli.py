"""The command line ``memo-exec``: parses options, calls the functions in ``commands``, and prints their results.

Results go to standard output. Step lines, progress and warnings go to standard error. Only the commands import torch,
so ``--help`` starts quickly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from memo_exec.commands.error_file import leave_for_torchrun
from memo_exec.commands.verify_bounds import BOUNDS
from memo_sim import __version__
from memo_sim.contract.errors import RankLost, UsageError
from memo_sim.contract.plain_text import one_line, printable
from memo_sim.views.command_line import (
    SETTINGS,
    SIGNALLED,
    Commands,
    Finite,
    run_commands,
    say,
    say_usage,
    show,
    show_document,
    typed,
    with_progress,
)
from memo_sim.views.stage_numbers import from_one

if TYPE_CHECKING:
    from memo_exec.commands.run_outcome import Outcome
    from memo_sim.contract.comparison import Comparison
    from memo_sim.contract.knobs import DtypeName
    from memo_sim.contract.trace import Trace

Options = dict[str, Any]


class Named(click.Path):
    """A path that is not empty.

    An unset variable of a script gives an empty name, and Path("") would be the current folder.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or fail with the option's name."""
        if not str(value):
            self.fail("The path is an empty name.", param, ctx)
        return super().convert(value, param, ctx)


FILE = Named(path_type=Path, dir_okay=False)
DIRECTORY = Named(path_type=Path, file_okay=False)


@click.group(cls=Commands, context_settings=SETTINGS)
@click.version_option(__version__, prog_name="memo-exec")
def cli() -> None:
    """Run a plan on this machine, measure it, and compare the measurement with the prediction.

    Exit codes: 0 success, 1 a bug, 2 wrong usage, 3 a bad input file, 5 outside --tolerance or not verified, 6 this
    machine cannot run the plan, 130 interrupted.
    """


@cli.command("run")
@click.argument("plan", type=FILE)
@click.option(
    "--data",
    type=FILE,
    help="Training data: text (its bytes are the tokens), token ids in .npy, .bin or .ids, or conversations in .jsonl, "
    "of which the assistant's tokens are targets [default: a text of Shakespeare].",
)
@click.option(
    "--tokenizer",
    type=DIRECTORY,
    help="Folder with the tokenizer and chat template of the model, which make tokens of conversations.",
)
@click.option(
    "--weights", type=DIRECTORY, help="Start from the Hugging Face safetensors in this folder, not from random weights."
)
@click.option(
    "--adapters",
    type=DIRECTORY,
    help="A plan with --lora: start from the adapters in this PEFT folder, not from random ones.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Number of steps of the whole run, including those before --resume.",
)
@click.option("--seed", type=click.IntRange(0), help="Seed of the weights and of the order of the data [default: 0].")
@click.option("--lr", type=Finite(0, min_open=True), help="Learning rate [default: 3e-4].")
@click.option("--warmup-steps", type=click.IntRange(0), help="Number of steps with linear warm-up [default: 0].")
@click.option(
    "--decay-steps",
    type=click.IntRange(0),
    help="Number of steps with cosine decay, after the warm-up; 0 keeps --lr constant [default: 0].",
)
@click.option(
    "--final-fraction",
    type=Finite(0, 1),
    help="Learning rate at the end of the decay, as a fraction of --lr [default: 0.1].",
)
@click.option("--weight-decay", type=Finite(0), help="Weight decay of matrices and embeddings [default: 0.1].")
@click.option("--clip", type=Finite(0), help="Largest global norm of the gradients; 0 = no clipping [default: 1].")
@click.option(
    "--clip-ratio",
    type=Finite(0, 1, max_open=True),
    help="Objective grpo: a token's ratio of probabilities counts down to 1 - this and up to 1 + this [default: 0.2].",
)
@click.option(
    "--clip-ratio-high", type=Finite(0), help="Objective grpo: up to 1 + this instead [default: --clip-ratio]."
)
@click.option(
    "--kl-weight", type=Finite(0), help="Objective grpo: weight of the KL term against the reference [default: 0]."
)
@click.option("--beta1", type=Finite(0, 1, max_open=True), help="AdamW's beta1 [default: 0.9].")
@click.option("--beta2", type=Finite(0, 1, max_open=True), help="AdamW's beta2 [default: 0.95].")
@click.option("--eps", type=Finite(0, min_open=True), help="AdamW's epsilon [default: 1e-8].")
@click.option(
    "--save", type=DIRECTORY, help="Save checkpoints to this folder, and the trained weights when the run ends."
)
@click.option(
    "--save-every", type=click.IntRange(1), default=10, show_default=True, help="Steps between two checkpoints."
)
@click.option(
    "--resume",
    is_flag=True,
    help="Continue from the newest checkpoint in --save, with its hyperparameters unless options change them; start a "
    "new run when there is none.",
)
@click.option(
    "--tolerance",
    type=Finite(0),
    help="Exit with code 5 when the predicted step time is off by more than this fraction of the measured one.",
)
@click.option(
    "--trace", "trace_path", type=FILE, help="Write the predicted and the measured timeline for ui.perfetto.dev."
)
@click.option("--measured", "measured_path", type=FILE, help="Write the measured step as memo.trace/1.")
@click.option(
    "--expert-load",
    "expert_load_path",
    type=FILE,
    help="A model with experts: write how many rows each of them got, for --expert-load of memo-sim.",
)
@click.option("--report", type=FILE, help="Write the measured step beside its prediction as one HTML page.")
@click.option(
    "--debug", is_flag=True, help="Check the program first, then every value, copy and order of a step (slow)."
)
@click.option(
    "--replay-allocator",
    is_flag=True,
    help="CUDA only: serve device memory at planned addresses below torch, and report requests that differ from the "
    "plan.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one memo.comparison/1 document.")
def run_command(**options: Any) -> None:
    """Train as PLAN says, and compare the median step after warm-up with the prediction.

    A plan for several devices runs under torchrun with one rank per device: torchrun --nproc_per_node 2 -m memo_exec
    run PLAN. The first rank prints. Every rank writes its own timelines (trace.json, trace.rank1.json, ...).

    After a failure torchrun exits with code 1. Its last lines say which rank failed, why, and with which exit code of
    memo-exec.
    """
    from memo_exec.commands.outputs import check_outputs, of_rank
    from memo_exec.commands.run import run
    from memo_exec.commands.run_options import run_options

    for name in ("trace_path", "measured_path"):
        options[name] = options[name] and of_rank(options[name])
    chosen = run_options(options if typed("save_every") else options | {"save_every": None})
    read = (options["plan"], options["data"], options["weights"], options["adapters"])
    load_path = options["expert_load_path"]
    check_outputs(options["trace_path"], options["measured_path"], options["report"], load_path, read=read)
    _check_report(options["report"])
    _check_load(load_path, options["plan"])
    outcome = run(options["plan"], chosen, tell=lambda figure: say(figure.line()), note=say)
    if outcome is None:
        return
    if load_path is not None and outcome.rank == 0:
        _write_load(outcome, load_path)
    if not outcome.stopped_by and outcome.rank == 0:
        _print_comparison(outcome.comparison, as_json=options["as_json"])
    _write_traces(outcome, options["trace_path"], options["measured_path"])
    if options["report"] is not None and outcome.rank == 0:
        _write_report(outcome.comparison, [outcome.predicted, outcome.measured], options["report"], options["plan"])
    if outcome.stopped_by:
        if outcome.rank == 0:
            say(f"interrupted after step {outcome.steps}")
        sys.exit(SIGNALLED + outcome.stopped_by)
    if outcome.rank == 0:
        _check_tolerance(outcome.comparison, options["tolerance"])


def _check_load(path: Path | None, plan_path: Path) -> None:
    """Refuse to write the load of experts of a model that has none, before the run.

    Raises:
        UsageError: when the plan's model has no experts.
    """
    from memo_sim.contract import codec
    from memo_sim.contract.plan import Plan

    if path is not None and codec.read(plan_path, Plan).decisions.model.mixture is None:
        raise UsageError("the plan's model has no experts", where="--expert-load", hint="leave --expert-load out")


def _write_load(outcome: Outcome, path: Path) -> None:
    """Write the load of experts, and say how to use it."""
    from memo_sim.contract import codec

    assert outcome.expert_load is not None  # ``_check_load``
    codec.write(path, outcome.expert_load)
    say(f"wrote the rows of every expert to {path}; memo-sim what-if ... --expert-load {path} prices them")


@cli.command("verify")
@click.argument("plan", type=FILE)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Where to play [default: the GPU for a plan of one rank and under torchrun, else the CPU].",
)
@click.option(
    "--seed", type=click.IntRange(*BOUNDS["seed"]), default=0, show_default=True, help="Seed of the weights and tokens."
)
@click.option(
    "--steps",
    type=click.IntRange(*BOUNDS["steps"]),
    default=1,
    show_default=True,
    help="Steps to play; from the second on, losses show the optimizer's update.",
)
@click.option(
    "--layers",
    type=click.IntRange(*BOUNDS["layers"]),
    help="Layers of the reduced model [default: as many as the policy needs, 4 on one rank].",
)
@click.option("--json", "as_json", is_flag=True, help="Print one memo.verdict/1 document.")
def verify_command(plan: Path, *, as_json: bool, **options: Any) -> None:
    """Compare the gradients of PLAN with keep-everything and with plain autograd, at a reduced size.

    The plan's policy, kinds of parallel ranks and cuts stay; layers, widths and tokens become few, and the answer lists
    them. Ranks are processes that the command starts on this machine's CPU; more than 8 become two of each kind. Under
    torchrun they are torchrun's. The programs of the plan are also checked at full size.

    Exit code 5: a gradient, a loss or a norm differs. Exit code 1: only a check of the programs found a fault.
    """
    from memo_exec.commands.verify import exit_code, verify_options, verify_plan
    from memo_sim.contract.codec import encode
    from memo_sim.views.verdict_table import verdict_table

    verdict = verify_plan(plan, verify_options(options), note=lambda text: say(f"verify: {text}"))
    if verdict is None:  # rank 0 prints
        return
    if as_json:
        show_document(encode(verdict))
    else:
        show(verdict_table(verdict))
    if code := exit_code(verdict):
        sys.exit(code)


@cli.command("profile")
@click.argument("plan", type=FILE)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Number of steps to play; the median one is written.",
)
@click.option(
    "--trace",
    "trace_path",
    type=FILE,
    help="File for the timeline for ui.perfetto.dev [default: PLAN's name with .perfetto.json].",
)
@click.option(
    "-o",
    "--output",
    type=FILE,
    help="File for the measured memo.trace/1 [default: PLAN's name with .measured.json].",
)
@click.option(
    "--requests",
    "as_requests",
    is_flag=True,
    help="Record the memory requests of a step instead; -o is then a memo.requests/1 [default: PLAN's name with "
    ".requests.json].",
)
def profile_command(plan: Path, steps: int, trace_path: Path | None, output: Path | None, *, as_requests: bool) -> None:
    """Play a few steps of PLAN and write the measured timeline.

    With --requests, record every memory request of one step, and compare their peak with the program's. Without a GPU
    that can run the step, fake tensors are used, so the step does not have to fit this machine.
    """
    from memo_exec.commands.outputs import check_outputs, of_rank, write_perfetto
    from memo_exec.commands.run import run
    from memo_exec.commands.run_options import RunOptions
    from memo_sim.contract.codec import write

    if as_requests:
        if given := typed("steps", "trace_path"):
            hint = "leave these options or --requests out"
            raise UsageError("--requests records one step and writes no timeline", got=", ".join(given), hint=hint)
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
    show(f"{output}: one measured step\n{trace_path}: open it at ui.perfetto.dev")


def _profile_requests(plan: Path, output: Path) -> None:
    from memo_exec.commands.outputs import check_outputs
    from memo_exec.commands.run import observe
    from memo_sim.contract.codec import write

    check_outputs(output, read=(plan,))
    found = observe(plan, say)
    write(output, found.requests)
    show("\n".join([*found.lines(), f"{output}: the requests of one step"]))


@cli.command("compare")
@click.argument("predicted", type=FILE)
@click.argument("measured", type=FILE)
@click.option(
    "--tolerance",
    type=Finite(0),
    help="Exit with code 5 when the predicted step time is off by more than this fraction of the measured one.",
)
@click.option("--trace", "trace_path", type=FILE, help="Write both timelines for ui.perfetto.dev.")
@click.option("--plot", type=FILE, help="Draw both timelines on one time axis (.png, .svg or .pdf).")
@click.option("--report", type=FILE, help="Write both timelines and all figures as one HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print one memo.comparison/1 document.")
def compare_command(predicted: Path, measured: Path, *, as_json: bool, **options: Any) -> None:
    """Compare a prediction with a measured step, by lane and by kind of instruction.

    PREDICTED is a plan, with its predicted trace in the same folder, or a memo.trace/1. MEASURED is a memo.trace/1
    that run --measured or profile has written.
    """
    from memo_exec.commands.compare import compare_files
    from memo_exec.commands.outputs import check_outputs, draw_both, write_perfetto

    trace_path, picture = options["trace_path"], options["plot"]
    check_outputs(trace_path, options["report"], read=(predicted, measured), picture=picture)
    _check_report(options["report"])
    comparison, traces = compare_files(predicted, measured)
    if picture is not None:
        draw_both(traces, picture)
    _print_comparison(comparison, as_json=as_json)
    if trace_path is not None:
        write_perfetto(traces, trace_path)
    if options["report"] is not None:
        _write_report(comparison, traces, options["report"], predicted)
    _check_tolerance(comparison, options["tolerance"])


@cli.command("calibrate")
@click.option("-o", "--output", type=FILE, required=True, help="File for the profile (memo.hardware/1).")
@click.option("--name", help="Name of the profile [default: made from the device's name].")
@click.option(
    "--budget-s",
    type=Finite(0, min_open=True),
    help="Seconds to take, the start included; points that are left then are marked as not measured [default: 240].",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Measure products and attention in this dtype too (repeat) [default: fp32 on a CPU, bf16 on a GPU].",
)
def calibrate_command(output: Path, name: str | None, budget_s: float | None, dtypes: tuple[DtypeName, ...]) -> None:
    """Measure single operators and copies on this machine and write its profile.

    Under torchrun, with one rank per device of this node, also measure collectives, and copies while all devices copy.
    Rank 0 writes the profile.
    """
    from memo_exec.commands.calibrate import calibrate
    from memo_exec.commands.outputs import check_outputs
    from memo_exec.probes.budget import launched_s
    from memo_sim.contract.codec import write
    from memo_sim.contract.peaks import warnings_about

    check_outputs(output)
    profile = with_progress(
        "calibrating",
        lambda tell: calibrate(
            name=name,
            progress=tell,
            note=say,
            command=_command_line(),
            budget_s=budget_s,
            dtypes=dtypes,
            spent_s=launched_s(),
        ),
        told="measurements",
    )
    if profile is None:  # rank 0 writes
        return
    write(output, profile)
    for text in warnings_about(profile, {}):
        say(f"WARNING: {text}")
    show(f"{output}: profile {profile.name}; plan with memo-sim what-if MODEL --cluster {output} --seq-len ...")


@cli.command("doctor")
@click.argument("plan", type=FILE, required=False)
def doctor_command(plan: Path | None) -> None:
    """Show the device, memory, kernels and library versions of this machine; with PLAN check that plan instead.

    The plan is lowered; its hash, the program of every stage, what stages send each other, and the placement beside it
    are checked. Exit code: of the first check that fails, 3 for the files, 1 for a faulty program (a bug).
    """
    from memo_exec.commands.doctor import plan_report, report

    if plan is None:
        show(report())
        return
    text, code = plan_report(plan)
    show(text)
    if code:
        sys.exit(code)


def _command_line() -> str:
    return one_line(" ".join(["memo-exec", *sys.argv[1:]]))


def _print_comparison(comparison: Comparison, *, as_json: bool) -> None:
    from memo_sim.contract.codec import encode
    from memo_sim.views.comparison_table import comparison_table

    if as_json:
        show_document(encode(comparison))
    else:
        show(comparison_table(comparison))


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


def _check_report(path: Path | None) -> None:
    """Refuse a report that cannot be written, before any work."""
    from memo_sim.views.report.page import check_page

    if path is not None:
        check_page(path)


def _write_report(comparison: Comparison, traces: Sequence[Trace | None], path: Path, plan: Path) -> None:
    from memo_exec.commands.report import write_report

    write_report(comparison, traces, path, plan=plan, command=_command_line())


def _rank_prefix() -> str:
    """Return the prefix of messages that names this rank; "" when there is one process."""
    from memo_exec.commands.outputs import rank

    return f"rank {rank()}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""


def _fail(text: str, code: int, error: BaseException) -> NoReturn:
    """Report an error and end the process.

    Under torchrun the message goes to torchrun, which prints it at its end. One of several ranks ends at once, without
    clean-up, because one of its threads may wait for a rank that waits for this one.
    """
    usage = error if isinstance(error, click.ClickException) else None
    text = f"memo-exec: {_rank_prefix()}{printable(from_one(text) if usage is None else usage.format_message())}"
    if not leave_for_torchrun(text, caused_elsewhere=isinstance(error, RankLost)):
        say(text) if usage is None else say_usage(usage)
    if _rank_prefix() and usage is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main() -> None:
    """Run the command line; turn every expected error into a message and an exit code."""
    run_commands(cli, "memo-exec", _fail)


if __name__ == "__main__":
    main()
