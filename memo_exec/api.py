"""The executor from Python: ``memo_exec.run`` is ``memo-exec run`` with a typed result.

    outcome = memo_exec.run("plan.json", steps=20, data="text.txt", lr=1e-4)
    outcome.document.ratio, outcome.table(), outcome.plot("step.png")

The arguments are the options of the command with underscores. Every failure is a ``MemoError``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memo_exec.commands import run as command
from memo_exec.commands.outputs import draw_both
from memo_exec.training.loop import StepFigure
from memo_sim.contract import codec
from memo_sim.contract.comparison import Comparison
from memo_sim.contract.named_arguments import with_names_checked
from memo_sim.contract.plain_text import one_line, printable
from memo_sim.contract.trace import Trace
from memo_sim.contract.units import format_seconds
from memo_sim.views.comparison_table import comparison_table
from memo_sim.views.html_table import html_table
from memo_sim.views.pictures import Picture, picture_in
from memo_sim.views.rows import Row, comparison_rows

__all__ = ["RunResult", "run"]

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, repr=False)
class RunResult:
    """How a run went: the measured step beside the predicted one, the losses, and both timelines."""

    outcome: command.Outcome

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
    def steps(self) -> int:
        """How many steps have ended, including those before a resume."""
        return self.outcome.steps

    @property
    def stopped_by(self) -> int:
        """The number of the signal that ended the run early; 0 when it played all its steps."""
        return self.outcome.stopped_by

    def table(self) -> list[Row]:
        """Return rows for ``pandas.DataFrame``: each figure of the step, predicted, measured and their ratio."""
        return comparison_rows(self.document)

    def plot(self, path: PathLike | None = None) -> Picture:
        """Draw the predicted and the measured timeline, into ``path`` (.png, .svg, .pdf) where one is given.

        Raises:
            UsageError: when there is no predicted timeline, or the file cannot be written.
            CannotRun: when matplotlib is not installed.
        """
        traces = [self.measured] if self.predicted is None else [self.predicted, self.measured]
        return picture_in(lambda file: draw_both(traces, file), path)

    def save(self, path: PathLike) -> None:
        """Write the comparison, ``memo.comparison/1``.

        Raises:
            UsageError: when the file cannot be written.
        """
        codec.write(Path(path), self.document)

    def to_json(self) -> str:
        """Return the document ``memo.comparison/1``."""
        return codec.encode(self.document).decode()

    def __str__(self) -> str:
        """Return the comparison as ``memo-exec run`` prints it."""
        return printable(comparison_table(self.document))

    def __repr__(self) -> str:
        step = format_seconds(self.document.measured.step_s)
        return f"<RunResult on {one_line(self.document.machine)}: {self.steps} steps, {step} a step>"

    def _repr_html_(self) -> str:
        rows = [[None if cell is None else _text(cell) for cell in row.values()] for row in self.table()]
        return html_table(f"measured on {self.document.machine}", ["figure", "predicted", "measured", "ratio"], rows)


def _text(cell: str | float) -> str:
    return cell if isinstance(cell, str) else f"{cell:.6g}"


@with_names_checked()
def run(
    plan: PathLike,
    *,
    steps: int | None = None,
    data: PathLike | None = None,
    weights: PathLike | None = None,
    seed: int | None = None,
    lr: float | None = None,
    warmup_steps: int | None = None,
    decay_steps: int | None = None,
    final_fraction: float | None = None,
    weight_decay: float | None = None,
    clip: float | None = None,
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
    """Train as a plan's file says, and compare the median step after warm-up with the prediction.

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
        "weights": weights,
        "seed": seed,
        "lr": lr,
        "warmup_steps": warmup_steps,
        "decay_steps": decay_steps,
        "final_fraction": final_fraction,
        "weight_decay": weight_decay,
        "clip": clip,
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "save": save,
        "save_every": save_every,
        "resume": resume,
        "debug": debug,
        "replay_allocator": replay_allocator,
    }
    outcome = command.run(
        Path(plan),
        command.run_options(named),
        tell=tell or (lambda figure: None),
        note=note or (lambda text: None),
    )
    return None if outcome is None else RunResult(outcome)
