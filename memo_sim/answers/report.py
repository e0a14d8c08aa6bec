"""Gathers what the report of a what-if answer shows, and writes the page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from memo_sim.contract.requests import Requests
from memo_sim.planning.question import Question
from memo_sim.program.arena.requests import requests_of
from memo_sim.views.report.packed import Step
from memo_sim.views.report.page import write_page
from memo_sim.views.report.what_if import Best, what_if_page

if TYPE_CHECKING:
    from memo_sim.answers.what_if import Answer
    from memo_sim.contract.plan import Plan
    from memo_sim.engine.simulate import Simulation
    from memo_sim.engine.stage_run import StageRun


def write_report(
    answer: Answer, question: Question, path: Path, *, plan: Plan | None, file: Path | None, created: str, command: str
) -> None:
    """Write the page of an answer; ``plan`` is the best plan, ``file`` where it was written.

    Raises:
        UsageError: when the page cannot be written.
        ModuleNotFoundError: when jinja2 is not installed.
    """
    best = None
    if answer.best is not None and plan is not None:
        best = Best(
            plan=plan,
            file=None if file is None else str(file),
            steps=steps_of(answer.best),
            pace=answer.best.stages.index(answer.best.pace),
        )
    page = what_if_page(
        answer.result,
        cluster=question.cluster,
        hardware=question.hardware,
        best=best,
        command=command,
        created=created,
    )
    write_page(page, path)


def steps_of(simulation: Simulation) -> list[Step]:
    """Return the step of each pipeline stage for a page's timeline."""
    return [
        Step(
            name=f"stage {number} · rank {trace.rank}" if len(simulation.stages) > 1 else f"rank {trace.rank}",
            trace=trace,
            buffers=_buffers(stage, simulation),
            capacity_bytes=stage.memory.device_capacity_bytes,
            reserve_bytes=stage.memory.reserve_bytes,
        )
        for number, (stage, trace) in enumerate(zip(simulation.traced_stages(), simulation.traces(), strict=True))
    ]


def _buffers(stage: StageRun, simulation: Simulation) -> Requests | None:
    """Return a stage's device buffers with their names; an eager framework has other buffers than the program."""
    if simulation.decisions.memory_policy == "eager":
        return None
    return requests_of(stage.program, stage.columns, lives=stage.memory.device_lives)
