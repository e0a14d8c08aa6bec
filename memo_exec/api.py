"""The executor from Python: the commands of ``memo-exec`` as functions with typed results.

    outcome = memo_exec.run("plan.json", steps=20, data="text.txt", lr=1e-4)
    outcome.document.ratio, outcome.table(), outcome.plot("step.png")

The arguments are the options of the commands with underscores. Every failure is a ``MemoError``. Under torchrun every
rank calls the function; what only the first rank knows is None on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal, get_args

from memo_exec.commands import calibrate as calibrate_command
from memo_exec.commands import compare as compare_command
from memo_exec.commands import run as command
from memo_exec.commands import verify as verify_command
from memo_exec.commands.outputs import draw_both
from memo_exec.commands.report import report_page
from memo_exec.commands.run_options import run_options
from memo_exec.commands.run_outcome import Outcome
from memo_exec.training.loop import StepFigure
from memo_sim.contract import codec
from memo_sim.contract.comparison import Comparison
from memo_sim.contract.errors import UsageError
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.knobs import DtypeName
from memo_sim.contract.named_arguments import with_names_checked
from memo_sim.contract.peaks import warnings_about
from memo_sim.contract.plain_text import one_line, printable
from memo_sim.contract.plan import Plan
from memo_sim.contract.progress import Progress
from memo_sim.contract.trace import Trace
from memo_sim.contract.units import format_seconds
from memo_sim.contract.verdict import Verdict
from memo_sim.views.comparison_table import comparison_table
from memo_sim.views.html_table import rows_as_html
from memo_sim.views.pictures import Picture, picture_in
from memo_sim.views.report.page import save_page
from memo_sim.views.rows import Row, comparison_rows, verdict_rows
from memo_sim.views.typed_result import PathLike, TypedResult
from memo_sim.views.verdict_table import verdict_table

__all__ = ["CalibrateResult", "ComparisonResult", "RunResult", "VerifyResult", "calibrate", "compare", "run", "verify"]


class _Compared(TypedResult):
    """A measured step beside a predicted one: ``memo.comparison/1``, and the timelines that there are."""

    if TYPE_CHECKING:  # a class below has a field or a property of each name

        @property
        def document(self) -> Comparison:
            """The measured step compared with the prediction."""

        @property
        def traces(self) -> Sequence[Trace]:
            """The predicted timeline, where there is one, and the measured one."""

    @with_names_checked()
    def table(self) -> list[Row]:
        """Return rows for ``pandas.DataFrame``: each figure of the step, predicted, measured and their ratio."""
        return comparison_rows(self.document)

    @with_names_checked()
    def plot(self, path: PathLike | None = None) -> Picture:
        """Draw the predicted and the measured timeline, into ``path`` (.png, .svg, .pdf) where one is given.

        Raises:
            UsageError: when there is no predicted timeline, or the file cannot be written.
            CannotRun: when matplotlib is not installed.
        """
        return picture_in(lambda file: draw_both(list(self.traces), file), path)

    @with_names_checked()
    def save_report(self, path: PathLike, *, plan: PathLike | None = None) -> None:
        """Write both timelines and all figures as one HTML page; ``plan`` is the plan's file, which the heading names.

        Raises:
            UsageError: when the file cannot be written.
            BadInput: when ``plan`` cannot be read.
            CannotRun: when jinja2 is not installed.
        """
        file = None if plan is None else Path(plan)
        page = partial(report_page, self.document, self.traces, plan=file)
        save_page(lambda **told: page(command=told["command"]), path, "memo_exec")

    @with_names_checked()
    def check(self, tolerance: float) -> None:
        """Check that the predicted step is within ``tolerance``, a fraction of the measured one.

        Raises:
            OutOfTolerance: when it is not, or there is no prediction.
        """
        compare_command.check_tolerance(self.document, tolerance)

    def __str__(self) -> str:
        """Return the comparison as the command prints it."""
        return printable(comparison_table(self.document))

    def _repr_html_(self) -> str:
        return rows_as_html(f"measured on {self.document.machine}", self.table())


@dataclass(frozen=True, repr=False, eq=False)
class RunResult(_Compared):
    """How a run went: the measured step beside the predicted one, the losses, and both timelines."""

    outcome: Outcome

    @property
    def document(self) -> Comparison:
        """The median step after warm-up compared with the prediction."""
        return self.outcome.comparison

    @property
    def losses(self) -> list[float]:
        """The loss of every step that this run has played."""
        return self.document.losses

    @property
    def measured(self) -> Trace:
        """The measured timeline of this rank's step."""
        return self.outcome.measured

    @property
    def predicted(self) -> Trace | None:
        """The predicted timeline; None where no trace lies beside the plan."""
        return self.outcome.predicted

    @property
    def traces(self) -> Sequence[Trace]:
        """The predicted timeline, where there is one, and the measured one."""
        return [self.measured] if self.predicted is None else [self.predicted, self.measured]

    @property
    def steps(self) -> int:
        """How many steps have ended, including those before a resume."""
        return self.outcome.steps

    @property
    def stopped_by(self) -> int:
        """The number of the signal that ended the run early; 0 when it played all its steps."""
        return self.outcome.stopped_by

    def __repr__(self) -> str:
        step = format_seconds(self.document.measured.step_s)
        return f"<RunResult on {one_line(self.document.machine)}: {self.steps} steps, {step} a step>"


@dataclass(frozen=True, repr=False, eq=False)
class ComparisonResult(_Compared):
    """The answer of ``compare``: a measured step beside a predicted one."""

    document: Comparison
    traces: Sequence[Trace]

    def __repr__(self) -> str:
        ratio = self.document.ratio
        told = "no prediction" if ratio is None else f"predicted / measured {ratio.step_s:.3f}"
        return f"<ComparisonResult: {format_seconds(self.document.measured.step_s)} a step, {told}>"


@dataclass(frozen=True, repr=False, eq=False)
class VerifyResult(TypedResult):
    """The answer of ``verify``: whether a plan's gradients are those of keep-everything and of plain autograd."""

    document: Verdict

    @property
    def verified(self) -> bool:
        """Whether no check found a fault, and every difference is within its tolerance."""
        return self.document.verified

    @with_names_checked()
    def table(self) -> list[Row]:
        """Return rows for ``pandas.DataFrame``: each kind of value, its reference, and its largest difference."""
        return verdict_rows(self.document)

    def __str__(self) -> str:
        """Return the verdict as ``memo-exec verify`` prints it."""
        return printable(verdict_table(self.document))

    def __repr__(self) -> str:
        return f"<VerifyResult {one_line(self.document.model)}: {'verified' if self.verified else 'differs'}>"

    def _repr_html_(self) -> str:
        return rows_as_html(str(self).partition("\n")[0], self.table())


@dataclass(frozen=True, repr=False, eq=False)
class CalibrateResult(TypedResult):
    """The answer of ``calibrate``: this machine's profile, ``memo.hardware/1``, which ``save`` writes."""

    document: Hardware

    @property
    def warnings(self) -> list[str]:
        """Which rates are above what the chip can do."""
        return warnings_about(self.document, {})

    def __repr__(self) -> str:
        return f"<CalibrateResult {one_line(self.document.name)}>"


@with_names_checked()
def run(
    plan: PathLike | Plan,
    *,
    steps: int | None = None,
    data: PathLike | None = None,
    tokenizer: PathLike | None = None,
    weights: PathLike | None = None,
    adapters: PathLike | None = None,
    seed: int | None = None,
    lr: float | None = None,
    warmup_steps: int | None = None,
    decay_steps: int | None = None,
    final_fraction: float | None = None,
    weight_decay: float | None = None,
    clip: float | None = None,
    clip_ratio: float | None = None,
    clip_ratio_high: float | None = None,
    kl_weight: float | None = None,
    beta1: float | None = None,
    beta2: float | None = None,
    eps: float | None = None,
    save: PathLike | None = None,
    save_every: int | None = None,
    resume: bool = False,
    debug: bool = False,
    replay_allocator: bool = False,
    tell: Callable[[StepFigure], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> RunResult | None:
    """Train as a plan says, and compare the median step after warm-up with the prediction.

    ``plan`` is a plan's file, with its placement and trace beside it, or a plan on PyTorch's caching allocator, which
    needs no placement. Without a file there is no predicted timeline.

    A value that is not given is the command's own (``memo-exec run --help``). ``tell`` receives the figures of each
    step and ``note`` other messages. Returns None when the checkpoint to resume from had played all steps already.

    Raises:
        BadInput: when the plan, data, weights or checkpoint cannot be used.
        CannotRun: when this machine cannot run the plan.
        UsageError: when an argument is wrong, or arguments contradict each other or the checkpoint.
    """
    named = {
        "steps": steps,
        "data": data,
        "tokenizer": tokenizer,
        "weights": weights,
        "adapters": adapters,
        "seed": seed,
        "lr": lr,
        "warmup_steps": warmup_steps,
        "decay_steps": decay_steps,
        "final_fraction": final_fraction,
        "weight_decay": weight_decay,
        "clip": clip,
        "clip_ratio": clip_ratio,
        "clip_ratio_high": clip_ratio_high,
        "kl_weight": kl_weight,
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "save": save,
        "save_every": save_every,
        "resume": resume,
        "debug": debug,
        "replay_allocator": replay_allocator,
    }
    options = run_options(named)
    with _file_of(plan) as path:
        outcome = command.run(path, options, tell=tell or (lambda figure: None), note=note or (lambda text: None))
    return None if outcome is None else RunResult(outcome)


@contextmanager
def _file_of(plan: PathLike | Plan) -> Iterator[Path]:
    """Return the path of a plan's file; a plan of none is written to a folder that lasts as long as the context.

    Raises:
        UsageError: when the plan is on planned memory, whose placement is a file of its own.
    """
    if not isinstance(plan, Plan):
        yield Path(plan)
        return
    if plan.decisions.memory_policy == "planned":
        raise UsageError(
            "a plan on planned memory runs from its file, with its placement beside it",
            got="a Plan",
            wanted='a file: answer.save("plan.json"), then run("plan.json")',
        )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        codec.write(path, plan)
        yield path


@with_names_checked()
def verify(
    plan: PathLike,
    *,
    device: Literal["cpu", "cuda"] | None = None,
    seed: int = 0,
    steps: int = 1,
    layers: int | None = None,
) -> VerifyResult | None:
    """Compare the gradients of a plan with keep-everything and plain autograd, at a reduced size.

    ``device`` is where to play: by default the GPU for a plan of one rank and under torchrun, else the CPU. ``steps``
    are steps to play, ``layers`` those of the reduced model. That a plan differs is a result: ``verified`` is False.

    Raises:
        BadInput: when the plan cannot be read, or is not what it pins.
        CannotRun: when it cannot be reduced, or this machine cannot play it.
        UsageError: when an argument is wrong.
    """
    options = verify_command.verify_options({"device": device, "seed": seed, "steps": steps, "layers": layers})
    verdict = verify_command.verify_plan(Path(plan), options)
    return None if verdict is None else VerifyResult(verdict)


@with_names_checked()
def compare(predicted: PathLike, measured: PathLike) -> ComparisonResult:
    """Compare a prediction with a measured step, by lane and by kind of instruction, as ``memo-exec compare`` does.

    ``predicted`` is a plan's file, with its predicted trace in the same folder, or a trace's; ``measured`` a trace's.

    Raises:
        BadInput: when a file is not such a document, or the two are of different programs.
    """
    return ComparisonResult(*compare_command.compare_files(Path(predicted), Path(measured)))


@with_names_checked()
def calibrate(
    *,
    name: str | None = None,
    budget_s: float | None = None,
    dtypes: Sequence[DtypeName] = (),
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> CalibrateResult | None:
    """Measure single operators and copies on this machine; ``save`` writes its profile, for ``cluster=``.

    ``name`` is the profile's, by default made from the device's. The calibration needs ``budget_s`` seconds; only the
    ends of the copies' curves and one point of every other table are measured in any case, and the profile says which
    points are missing. ``dtypes`` are those in which products and attention are measured besides the device's own (fp32
    on a CPU, bf16 on a GPU). ``progress`` receives (measurements done, all) and ``note`` messages.

    Raises:
        CannotRun: when no attention kernel works here, or another rank stops.
        UsageError: when an argument is wrong.
    """
    if budget_s is not None and not 0 < budget_s < float("inf"):
        raise UsageError("not a value of budget_s", got=repr(budget_s), wanted="a number of seconds above 0")
    if unknown := [name for name in dtypes if name not in get_args(DtypeName)]:
        raise UsageError("not a dtype", got=", ".join(map(repr, unknown)), wanted=", ".join(get_args(DtypeName)))
    profile = calibrate_command.calibrate(
        name=name,
        budget_s=budget_s,
        dtypes=dtypes,
        progress=progress or (lambda done, total: None),
        note=note or (lambda text: None),
        command="memo_exec.calibrate()",
    )
    return None if profile is None else CalibrateResult(profile)
