"""Answers a what-if question: the ranked plans, the best one as a plan file, and why it is best."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import memo_sim
from memo_sim.contract.codec import check_distinct, check_not_read, check_writable, sha256_of, write
from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Decisions, Plan, PlanRow, Prediction, Provenance
from memo_sim.contract.progress import Progress
from memo_sim.contract.result import Result
from memo_sim.engine.simulate import Simulation
from memo_sim.explain.answer import explain, plan_title
from memo_sim.planning.arena import Arena, arena_of
from memo_sim.planning.layouts import cuts_sequences
from memo_sim.planning.presets import Policy
from memo_sim.planning.question import Question
from memo_sim.planning.search import Evaluated, SearchResult, play, search
from memo_sim.planning.space import policies
from memo_sim.program.lower import program_sha256
from memo_sim.views.pictures import FORMATS

LEAST_EXACT = 3
"""Plans whose rank is exact however few are listed: the best, the runner-up, and one for a best whose arena fails. Of
subsequences no more are: a plan takes seconds to play, and others are listed as they come."""


@dataclass(frozen=True)
class Outputs:
    """The files an answer is written to: the plan (trace and placement beside it), a picture, a timeline.

    ``read`` are the files that the question comes from.
    """

    plan: Path | None = None
    picture: Path | None = None
    timeline: Path | None = None
    read: tuple[Path, ...] = ()

    def check(self) -> None:
        """Refuse files that cannot be written, or that would overwrite what is read or each other, before any work.

        Raises:
            UsageError: when one cannot be written, is read, or is of no known kind, or two are one file.
        """
        named = [path for path in (self.plan, self.picture, self.timeline) if path is not None]
        for path in named:
            check_writable(path)
        if self.plan is not None:
            for kind in ("trace", "placement"):
                named.append(beside(self.plan, kind))
                check_writable(named[-1])
        check_not_read(named, self.read)
        check_distinct(named)
        if self.picture is not None and self.picture.suffix not in FORMATS:
            raise UsageError("not a kind of picture", got=str(self.picture), wanted=", ".join(FORMATS))
        if self.plan is not None and self.plan.suffix != ".json":
            raise UsageError("a plan is a JSON file", got=str(self.plan), wanted="a name that ends in .json")


def beside(plan: Path, kind: str) -> Path:
    """Return where a plan's predicted trace or its placement lies."""
    return plan.with_name(f"{plan.stem}.{kind}.json")


@dataclass(frozen=True)
class Answer:
    """The result document, the best plan played and its arena (None when nothing fits, or memory is not planned).

    ``found`` is the search behind it, None for a plan that was only priced.
    """

    result: Result
    best: Simulation | None
    arena: Arena | None
    found: SearchResult | None = None


def what_if(
    question: Question,
    *,
    top: int = 10,
    pareto: bool = False,
    progress: Progress | None = None,
) -> Answer:
    """Return the answer to ``question`` with its ``top`` plans, which are those that evaluating everything would give.

    Where layouts have subsequences, that holds for the first ``LEAST_EXACT``. With ``pareto`` the front is that of the
    whole space, not only of what was evaluated for the best plans; where alpha is open, of its eighths and the fastest.

    Raises:
        Infeasible: when no layout divides the model and the sequence.
        UsageError: when pinned knobs contradict each other or the cluster.
    """
    exact = LEAST_EXACT if cuts_sequences(question) else max(top, LEAST_EXACT)
    found = search(question, keep=exact, siblings=True, front=pareto, progress=progress)
    simulation, arena = _best_that_fits(question, found)
    best, beyond = found.best, list[str]()
    if exact < min(top, len(found.ranked)):
        beyond.append(
            f"With subsequences the first {exact} plans are exact; others that were pruned may come before the next."
        )
    if pareto and any(policy.alpha is None for policy in policies(question)):
        beyond.append(
            "The front is that of every layout, with alpha, where it is open, at its fastest and at every eighth:"
            " between two eighths there may be plans that it lacks."
        )
    rows = [row(e.decisions, e.prediction, system=_system(e, question)) for e in found.ranked[:top]]
    result = Result(
        model=question.model.name,
        cluster=question.cluster.name,
        seq_tokens=question.seq_tokens,
        best=rows[0] if best else None,
        plans=rows,
        evaluated=found.evaluated,
        pruned=found.pruned,
        why=[*explain(question, found, simulation, arena), *beyond],
        front=[row(e.decisions, e.prediction, system=_system(e, question)) for e in found.front],
        front_is_whole=pareto,
    )
    return Answer(result, simulation, arena, found)


def _best_that_fits(question: Question, found: SearchResult) -> tuple[Simulation | None, Arena | None]:
    """Play and place the best plan; where the arena does not fit, that is said of the plan and the next one is best."""
    while best := found.best:
        simulation = play(question, best.decisions)
        if best.decisions.memory_policy != "planned":
            return simulation, None
        arena = arena_of(simulation)
        at = found.ranked.index(best)
        found.ranked[at] = replace(best, prediction=arena.prediction)
        if arena.prediction.status == "ok":
            return simulation, arena
        found.ranked.sort(key=lambda e: e.rank_key)
    return None, None


def price(plan: Plan, question: Question) -> Answer:
    """Return an existing plan played on the question's cluster, as the only candidate."""
    prediction = play(question, plan.decisions).prediction
    policy = Policy.of(plan.decisions)
    found = SearchResult(ranked=[Evaluated(policy, plan.decisions, prediction)], evaluated=1, pruned=0)
    simulation, arena = _best_that_fits(question, found)
    line = row(plan.decisions, found.ranked[0].prediction, system="plan")
    result = Result(
        model=plan.decisions.model.name,
        cluster=question.cluster.name,
        seq_tokens=plan.decisions.seq_tokens,
        best=line if simulation else None,
        plans=[line],
        evaluated=1,
        pruned=0,
        why=[*explain(question, found, simulation, arena), *_idle(plan.decisions, question)],
    )
    return Answer(result, simulation, arena)


def _idle(decisions: Decisions, question: Question) -> list[str]:
    """Say how many of a cluster's devices a plan leaves alone."""
    used, there = decisions.layout.devices, question.cluster.devices
    if used >= there:
        return []
    idle = "1 stays idle" if there - used == 1 else f"{there - used} stay idle"
    text = f"The plan is for {used} of the {there} devices of {question.cluster.name}: {idle}"
    return [f"{text}, and MFU and TGS count the {used} alone; ask with MODEL and --seq-len for a plan that uses all."]


def without_answer(question: Question, error: Infeasible) -> Result:
    """Return the document of a question that nothing could be evaluated for; the error says why."""
    return Result(
        model=question.model.name,
        cluster=question.cluster.name,
        seq_tokens=question.seq_tokens,
        best=None,
        plans=[],
        evaluated=0,
        pruned=0,
        why=[line.strip() for line in error.message().splitlines()],
    )


def plan_of(
    simulation: Simulation, arena: Arena | None, question: Question, *, created: str, command: str
) -> tuple[Plan, Placement | None]:
    """Return the plan file of a played plan (decisions, prediction and provenance apart), and the placement it pins.

    There is none for a step of too many micro-batches, or for memory that is not planned.
    """
    placement = arena.placement if arena and arena.whole else None
    plan = Plan(
        decisions=simulation.decisions,
        program_sha256=program_sha256(simulation.full_programs),
        placement_sha256=sha256_of(placement) if placement else "",
        prediction=arena.prediction if arena else simulation.prediction,
        provenance=Provenance(
            created=created,
            memo_version=memo_sim.__version__,
            command=command,
            cluster=question.cluster.name,
            hardware_sha256=sha256_of(question.hardware),
        ),
    )
    return plan, placement


def write_files(answer: Answer, question: Question, outputs: Outputs, *, created: str, command: str) -> None:
    """Write the best plan of ``answer`` to ``outputs``; where nothing fits there is nothing to write."""
    if answer.best is None or outputs == Outputs():
        return
    traces = answer.best.traces()
    if outputs.picture:  # first: a drawing that fails leaves nothing behind
        from memo_sim.views.timeline import draw_timeline

        title = plan_title(answer.best.decisions, answer.best.prediction.step_s)
        title += f", stage 0 of {len(traces)}" if len(traces) > 1 else ""
        capacity = int(question.hardware.device_memory_bytes.value)
        draw_timeline(traces[0], outputs.picture, title=title, capacity_bytes=capacity)
    if outputs.timeline:
        from memo_sim.views.chrome_trace import write_chrome_trace

        write_chrome_trace(traces, outputs.timeline)
    if outputs.plan:
        plan, placement = plan_of(answer.best, answer.arena, question, created=created, command=command)
        for number, trace in enumerate(traces):
            write(beside(outputs.plan, f"trace.stage{number}" if number else "trace"), trace)
        if placement is not None:
            write(beside(outputs.plan, "placement"), placement)
        write(outputs.plan, plan)


def row(decisions: Decisions, prediction: Prediction, *, system: str) -> PlanRow:
    """Return one plan as scripts read it."""
    return PlanRow(
        status=prediction.status,
        system=system,
        mfu=prediction.mfu,
        tgs=prediction.tgs,
        step_s=prediction.step_s,
        alpha=decisions.alpha,
        offload_window=decisions.offload_window,
        layout=decisions.layout,
        recompute=decisions.recompute,
        mlp_chunk_tokens=decisions.mlp_chunk_tokens,
        attention_chunk_tokens=decisions.attention_chunk_tokens,
        memory_policy=decisions.memory_policy,
        states=decisions.states,
        micro_batch=decisions.micro_batch,
        peak_device_bytes=prediction.peak_device_bytes,
        reserved_bytes=prediction.reserved_bytes,
        allocation_retries=prediction.allocation_retries,
        peak_host_bytes_per_node=prediction.peak_host_bytes_per_node,
        stalls=prediction.stalls,
        shortfall_bytes=prediction.shortfall_bytes,
        reason=prediction.reason,
        outside_calibration=prediction.outside_calibration,
    )


def _system(evaluated: Evaluated, question: Question) -> str:
    return f"{question.system}: {evaluated.policy.label}" if question.system != "any" else evaluated.policy.label
