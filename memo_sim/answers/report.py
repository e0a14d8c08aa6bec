"""Gathers what the report of a what-if answer shows, and writes the page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from memo_sim.contract.requests import Requests
from memo_sim.contract.shortage import LiveTensor
from memo_sim.planning.question import Question
from memo_sim.program.arena.requests import requests_of
from memo_sim.reasons.peak import tensors_at
from memo_sim.views.report.page import Page, write_page
from memo_sim.views.report.what_if import Best, what_if_page
from memo_sim.views.step import Step

if TYPE_CHECKING:
    from memo_sim.answers.what_if import Answer
    from memo_sim.contract.plan import Plan
    from memo_sim.engine.simulate import Simulation
    from memo_sim.engine.stage_run import StageRun
    from memo_sim.planning.arena import Arena

LARGEST = 12
"""Tensors that the page lists."""


def write_report(
    answer: Answer,
    question: Question,
    path: Path,
    *,
    plan: Plan | None,
    file: Path | None,
    created: str,
    command: str,
) -> None:
    """Write the page of an answer (``report_page``).

    Raises:
        UsageError: when the page cannot be written.
        ModuleNotFoundError: when jinja2 is not installed.
    """
    write_page(report_page(answer, question, plan=plan, file=file, created=created, command=command), path)


def report_page(
    answer: Answer, question: Question, *, plan: Plan | None, file: Path | None, created: str, command: str
) -> Page:
    """Return the page of an answer; ``plan`` is the best plan, ``file`` where it was written."""
    best = None
    if answer.best is not None and plan is not None:
        best = Best(
            plan=plan,
            file=None if file is None else str(file),
            steps=steps_of(answer.best, answer.arena),
            pace=answer.best.stages.index(answer.best.pace),
            largest=_largest(answer.best),
        )
    return what_if_page(
        answer.result,
        cluster=question.cluster,
        hardware=question.hardware,
        best=best,
        command=command,
        created=created,
    )


def steps_of(simulation: Simulation, arena: Arena | None) -> list[Step]:
    """Return the step of each pipeline stage for pictures and pages; ``arena`` is None when memory is not planned."""
    several = len(simulation.stages) > 1
    stages = zip(simulation.stages, simulation.traced_stages(), simulation.traces(), strict=True)
    steps = []
    for number, (stage, traced, trace) in enumerate(stages):
        held_bytes, held_as = stage.reserved_bytes, "reserved by PyTorch's allocator"
        if arena is not None:
            held_bytes = arena.prediction.peak_device_bytes if stage is simulation.fullest else None
            held_as = "planned arena"
        steps.append(
            Step(
                name=f"stage {number + 1} · rank {trace.rank}" if several else f"rank {trace.rank}",
                trace=trace,
                buffers=_buffers(traced),
                capacity_bytes=stage.memory.device_capacity_bytes,
                reserve_bytes=stage.memory.reserve_bytes,
                held_bytes=held_bytes,
                held_as=held_as,
            )
        )
    return steps


def _buffers(stage: StageRun) -> Requests:
    """Return a stage's device buffers with their names; an eager framework has more of them than the program."""
    memory = stage.memory
    return requests_of(stage.program, stage.columns, lives=memory.device_lives, names=memory.buffer_names)


def _largest(simulation: Simulation) -> list[LiveTensor]:
    """Return the largest tensors at the peak of the stage with most live bytes, by name."""
    memory = simulation.most_live.memory
    at = memory.device.instruction
    found = tensors_at(memory.program, memory.device_lives, at, device=True, names=memory.buffer_names)
    return found[:LARGEST]
