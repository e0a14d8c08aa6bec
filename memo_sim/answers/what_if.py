"""Answers a what-if question: ranks the plans, writes the best one as a plan file, and explains why it is best."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import exp, expm1, inf
from pathlib import Path

import msgspec

import memo_sim
from memo_sim.answers.goodput import goodput_reasons
from memo_sim.answers.odd_length import about_length
from memo_sim.answers.summary import MUCH_SLOWER, summary_of
from memo_sim.contract.accuracy import Setting
from memo_sim.contract.attention_kernels import PRICED_ONLY
from memo_sim.contract.codec import check_distinct, check_not_read, check_writable, sha256_of, write
from memo_sim.contract.errors import MemoError, UsageError
from memo_sim.contract.peaks import warnings_about
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Decisions, Plan, PlanRow, Prediction, Provenance, StepInterval
from memo_sim.contract.progress import Progress
from memo_sim.contract.result import Result
from memo_sim.contract.summary import Summary
from memo_sim.contract.systems import DEFAULT_SYSTEM, OPEN
from memo_sim.engine.simulate import Simulation
from memo_sim.planning.arena import Arena, arena_of
from memo_sim.planning.kernels_elsewhere import kernels_elsewhere
from memo_sim.planning.layouts import cuts_sequences, layouts
from memo_sim.planning.micro_batches import with_larger_micro_batches
from memo_sim.planning.presets import Policy
from memo_sim.planning.question import Question
from memo_sim.planning.search import MOST_LAYOUTS_AT_ONCE, Evaluated, SearchResult, play, search
from memo_sim.planning.space import policies
from memo_sim.program.arena.folded import folded
from memo_sim.program.layout.fp8 import played
from memo_sim.program.lower import program_sha256
from memo_sim.reasons.answer import explain, plan_title
from memo_sim.reasons.remedies import ways_out
from memo_sim.reasons.runner_up import Closeness
from memo_sim.validation.intervals import LEVEL, setting_of, shipped_spread, step_interval, without_interval
from memo_sim.views.pictures import FORMATS
from memo_sim.views.plan_table import step_line

LEAST_EXACT = 3
"""How many ranks are exact at least: the best plan, the runner-up, and one more in case the best one's arena does not
fit. With subsequences, no more ranks are exact: ten exact ranks take three times as long."""

LEAST_OF_MANY = 2
"""The same with more than ``MOST_LAYOUTS_AT_ONCE`` layouts. To prove the third best takes longest: of 70B on 64 GPUs,
the runner-up is 0.4 % behind the best, and many pipelines may be the third."""


MOST_WRITTEN_SPANS = 60_000
"""Largest number of spans of a plan's traces in which every micro-batch is written: about 13 MB over all stages.

Of a longer step, the files have the micro-batches that were played, which the others repeat."""

NO_INTERVAL = "The step has no interval: "
UNNAMED_FRAMEWORK = f"{NO_INTERVAL}a plan on PyTorch's allocator does not say which framework it was made for."


@dataclass(frozen=True)
class Outputs:
    """The files that an answer is written to: the plan (trace and placement next to it), a picture, a timeline, a page.

    ``read`` are the input files of the question, which must not be overwritten.
    """

    plan: Path | None = None
    picture: Path | None = None
    timeline: Path | None = None
    report: Path | None = None
    pareto_picture: bool = False
    """Whether the picture is of the Pareto front, in place of the best plan's timeline."""
    full_timeline: bool = False
    """Whether the timeline has the instructions of every micro-batch."""
    read: tuple[Path, ...] = ()

    @property
    def unwritten(self) -> str | None:
        """Which files are not written because no plan fits; the report always is. None where none was asked for."""
        named = [str(path) for path in (self.plan, self.picture, self.timeline) if path is not None]
        return f"no plan for {', '.join(named)}: not written" if named else None

    def check(self) -> None:
        """Refuse files that cannot be written, or that would overwrite an input or each other. Runs before any work.

        Raises:
            UsageError: when a file cannot be written, is an input, has an unknown format, or is named twice.
        """
        named = [path for path in (self.plan, self.picture, self.timeline, self.report) if path is not None]
        for path in named:
            check_writable(path)
        if self.plan is not None:
            for kind in ("trace", "placement"):
                named.append(beside(self.plan, kind))
                check_writable(named[-1])
        check_not_read(named, self.read)
        self._check_beside()
        check_distinct(named)
        if self.picture is not None and self.picture.suffix not in FORMATS:
            raise UsageError("unknown picture format", got=str(self.picture), wanted=", ".join(FORMATS))
        if self.report is not None:
            from memo_sim.views.report.page import check_page

            check_page(self.report)
        if self.plan is not None and self.plan.suffix != ".json":
            raise UsageError("a plan is a JSON file", got=str(self.plan), wanted="a name that ends in .json")

    def _check_beside(self) -> None:
        """Refuse a timeline that has the name of a file that the plan brings with it."""
        if self.plan is None or self.timeline is None:
            return
        for kind in ("trace", "placement"):
            if self.timeline.resolve() == beside(self.plan, kind).resolve():
                hint = f"--trace with another name, such as {self.plan.stem}.perfetto.json"
                got = f"--trace {self.timeline}"
                raise UsageError(f"-o {self.plan} writes this file itself: the plan's {kind}", got=got, hint=hint)


def beside(plan: Path, kind: str) -> Path:
    """Return the path of a plan's predicted trace or placement."""
    return plan.with_name(f"{plan.stem}.{kind}.json")


@dataclass(frozen=True)
class Answer:
    """The result document, with the simulation of the best plan and its arena.

    Simulation and arena are None when no plan fits; the arena also when memory is not planned. ``found`` is the
    search's result; it is None for a plan that was only priced.
    """

    result: Result
    best: Simulation | None
    arena: Arena | None
    found: SearchResult | None = None

    @property
    def best_simulation(self) -> Simulation:
        """The simulation of the best plan, where there is one."""
        assert self.best is not None
        return self.best


def what_if(
    question: Question,
    *,
    top: int = 10,
    pareto: bool = False,
    price_per_device_hour: float | None = None,
    explained: bool = True,
    progress: Progress | None = None,
) -> Answer:
    """Return the answer to ``question`` with its ``top`` plans; with a price, what tokens cost.

    ``explained``: whether the reasons know how every policy does on the best plan's layout. Without, only those are
    evaluated that may be nearly as fast.

    They are the plans that an exhaustive evaluation would rank first. Where layouts have subsequences, this holds for
    the first ``LEAST_EXACT`` plans only, and where there are many layouts for the first ``LEAST_OF_MANY``. Where one
    plan is asked for without reasons, no others are proved, unless its arena does not fit. Of larger micro-batches,
    those are known that may be the best (``planning/micro_batches.py``). With ``pareto`` the front covers the whole
    space, not only what the search evaluated; where alpha is open, it covers the eighths and the fastest alpha.

    Raises:
        Infeasible: when no layout divides the model and the sequence.
        UsageError: when pinned knobs contradict each other or the cluster.
    """
    siblings = inf if explained else 1 + MUCH_SLOWER
    proved = [exact_ranks(question, top)]
    if top == 1 and not (explained or pareto):
        proved.insert(0, 1)
    for exact in proved:
        found = search(question, keep=exact, siblings=siblings, front=pareto, progress=progress)
        found = with_larger_micro_batches(question, found, siblings=siblings)
        first = found.best
        simulation, arena = _best_that_fits(question, found)
        if first is None or (simulation is not None and simulation.decisions == first.decisions):
            break  # else its arena does not fit, so others are of interest
    best, beyond = found.best, list[str]()
    if exact < min(top, len(found.ranked)):
        beyond.append(
            f"The first {exact} ranks are exact; of so many plans, pruned ones could be faster than the later ranks."
        )
    if pareto and any(policy.alpha is None for policy in policies(question)):
        beyond.append(
            "The Pareto front covers every layout. Where alpha is open, it covers the fastest alpha and every eighth,"
            " and may lack plans between two eighths."
        )
    rows = [_row(e, question) for e in found.ranked[:top]]
    interval = interval_of(question, simulation.decisions, simulation.prediction) if simulation else None
    sure = _certainty(question, simulation, interval)
    ways = _ways_out(question, found)
    summary = _summary(
        question,
        found,
        simulation,
        interval=interval,
        sure=sure,
        price_per_device_hour=price_per_device_hour,
        ways=ways,
    )
    result = Result(
        model=question.model.name,
        cluster=question.cluster.name,
        seq_tokens=question.seq_tokens,
        best=rows[0] if best else None,
        plans=rows,
        evaluated=found.evaluated,
        pruned=found.pruned,
        warnings=warnings_of(question, simulation),
        why=[
            *sure,
            *explain(question, found, simulation, arena, close=_close(question, found), ways=ways),
            *_goodput(summary),
            *beyond,
        ],
        decisions=simulation.decisions if simulation else None,
        system=question.system,
        front=[_row(e, question) for e in found.front],
        front_is_whole=pareto,
        summary=summary,
    )
    return Answer(result, simulation, arena, found)


def exact_ranks(question: Question, top: int) -> int:
    """Return how many ranks are exact where ``top`` are asked for."""
    if len(layouts(question)) > MOST_LAYOUTS_AT_ONCE:
        return LEAST_OF_MANY
    return LEAST_EXACT if cuts_sequences(question) else max(top, LEAST_EXACT)


def _ways_out(question: Question, found: SearchResult) -> list[str]:
    """Return what would make the plan nearest to fitting fit; nothing where a plan fits or none can be evaluated."""
    if found.best is not None or found.ranked[0].prediction.status == "invalid":
        return []
    return ways_out(question, found.ranked[0])


def _summary(
    question: Question,
    found: SearchResult,
    simulation: Simulation | None,
    *,
    interval: StepInterval | None,
    sure: list[str],
    price_per_device_hour: float | None,
    ways: list[str],
    searched: bool = True,
) -> Summary | None:
    """Return the verdict about the best plan, or about the nearest; None where no plan can be evaluated."""
    shown = found.best or found.ranked[0]
    if shown.prediction.status == "invalid":
        return None
    simulation = simulation or play(question, shown.decisions, found)
    reasons = [line.removeprefix(NO_INTERVAL).removesuffix(".") for line in sure if line.startswith(NO_INTERVAL)]
    summary = summary_of(
        question,
        simulation,
        msgspec.structs.replace(shown.prediction, interval=interval),
        no_interval=" ".join(reasons),
        planned_arena=simulation.prediction.status == "ok" and shown.decisions.memory_policy == "planned",
        price_per_device_hour=price_per_device_hour,
        ways_out=ways,
        searched=searched,
        rivals=[*(one.prediction for one in found.ranked), *found.played.values()],
    )
    length = about_length(question, found) if searched else []
    return msgspec.structs.replace(summary, assumptions=[*length, *summary.assumptions])


def _goodput(summary: Summary | None) -> list[str]:
    """Return where the time of a long job goes, where the question speaks of failures."""
    return goodput_reasons(summary.goodput, summary.step_s) if summary else []


def warnings_of(question: Question, best: Simulation | None) -> list[str]:
    """Return why the figures cannot be right: the profile, or the best plan, is above what the chip can do."""
    return warnings_about(question.hardware, best.peak_shares if best else {})


def interval_of(question: Question, decisions: Decisions, prediction: Prediction) -> StepInterval | None:
    """Return the interval of a plan's step, from the errors that ship with memo; None where there is none."""
    setting = setting_of(question.system, decisions, question.hardware, prediction)
    return step_interval(prediction.step_s, setting, shipped_spread())


def _close(question: Question, found: SearchResult) -> Closeness | None:
    """Return which plans predictions cannot tell from the best; None where no plan fits or too little is known."""
    best = found.best
    if best is None or best.prediction.step_s is None or question.hardware.rough:
        return None
    spread = shipped_spread()

    def setting(plan: Evaluated) -> Setting:
        return setting_of(question.system, plan.decisions, question.hardware, plan.prediction)

    mine = setting(best)
    same = spread.margin(mine, mine)
    if same is None:
        return None
    alike = others = 0
    for rival in found.ranked:
        theirs = setting(rival)
        margin = spread.margin(mine, theirs)
        if rival is best or rival.prediction.step_s is None or margin is None:
            continue
        if rival.prediction.step_s > best.prediction.step_s * exp(margin.half):
            continue
        alike += margin.pairs > 0
        others += margin.pairs == 0
    return Closeness(expm1(same.half), LEVEL, same.pairs, same.sources, alike, others)


def _certainty(question: Question, best: Simulation | None, interval: StepInterval | None) -> list[str]:
    """Return how exact the best plan's step is, or why that is not known."""
    if best is None or best.prediction.step_s is None:
        return []
    if interval is not None:
        return [step_line(best.prediction.step_s, interval)]
    setting = setting_of(question.system, best.decisions, question.hardware, best.prediction)
    return [f"{NO_INTERVAL}{without_interval(setting, shipped_spread())}."]


def _best_that_fits(question: Question, found: SearchResult) -> tuple[Simulation | None, Arena | None]:
    """Play and place the best plan. If its arena does not fit, mark the plan so and continue with the next one."""
    while best := found.best:
        simulation = play(question, best.decisions, found)
        if best.decisions.memory_policy != "planned":
            return simulation, None
        arena = arena_of(simulation)
        at = found.ranked.index(best)
        found.ranked[at] = replace(best, prediction=arena.prediction)
        if arena.prediction.status == "ok":
            return simulation, arena
        found.ranked.sort(key=lambda e: e.rank_key)
    return None, None


def price(plan: Plan, question: Question, *, price_per_device_hour: float | None = None) -> Answer:
    """Return the answer for an existing plan, played on the question's cluster as the only candidate.

    Kernels that are not there, or that the question names, are replaced (``planning/kernels_elsewhere.py``).

    Raises:
        Infeasible: when the plan cannot be played there.
    """
    decisions, changes = kernels_elsewhere(question, plan.decisions)
    question = replace(question, changes=changes)
    plan = msgspec.structs.replace(plan, decisions=decisions)
    played = play(question, plan.decisions)
    only = Evaluated(Policy.of(plan.decisions), plan.decisions, played.prediction)
    found = SearchResult(ranked=[only], evaluated=1, pruned=0, fastest=played)
    simulation, arena = _best_that_fits(question, found)
    line = row(plan.decisions, found.ranked[0].prediction, system="plan")
    # A plan of an earlier version does not say which framework it was made for. In planned memory that does not matter.
    named = plan.decisions.memory_policy == "planned" or question.system not in OPEN
    interval = interval_of(question, plan.decisions, found.ranked[0].prediction) if simulation and named else None
    line = msgspec.structs.replace(line, interval=interval)
    sure = _certainty(question, simulation, interval) if named else [UNNAMED_FRAMEWORK]
    sure = sure if simulation else []
    ways = _ways_out(question, found)
    summary = _summary(
        question,
        found,
        simulation,
        interval=interval,
        sure=sure,
        price_per_device_hour=price_per_device_hour,
        ways=ways,
        searched=False,
    )
    result = Result(
        model=plan.decisions.model.name,
        cluster=question.cluster.name,
        seq_tokens=plan.decisions.seq_tokens,
        best=line if simulation else None,
        plans=[line],
        evaluated=1,
        pruned=0,
        warnings=warnings_of(question, simulation),
        why=[
            *sure,
            *explain(question, found, simulation, arena, ways=ways),
            *_goodput(summary),
            *_idle(plan.decisions, question),
        ],
        summary=summary,
        decisions=plan.decisions if simulation else None,
    )
    return Answer(result, simulation, arena)


def _idle(decisions: Decisions, question: Question) -> list[str]:
    """Say how many of the cluster's devices a plan does not use."""
    used, there = decisions.layout.devices, question.cluster.devices
    if used >= there:
        return []
    idle = "1 stays idle" if there - used == 1 else f"{there - used} stay idle"
    text = f"The plan uses {used} of the {there} devices of {question.cluster.name}: {idle}"
    return [f"{text}. MFU and TGS count only the {used}. Ask with MODEL and --seq-len for a plan that uses all."]


def without_answer(question: Question, error: MemoError) -> Result:
    """Return the document of a question for which no plan could be evaluated; ``error`` gives the reason."""
    return Result(
        model=question.model.name,
        cluster=question.cluster.name,
        seq_tokens=question.seq_tokens,
        best=None,
        plans=[],
        evaluated=0,
        pruned=0,
        warnings=warnings_of(question, None),
        why=[line.strip() for line in error.message().splitlines()],
    )


def plan_of(
    simulation: Simulation, arena: Arena | None, question: Question, *, created: str, command: str
) -> tuple[Plan, Placement | None]:
    """Return the plan file of a simulated plan, and the placement whose hash it holds, equal micro-batches once.

    The placement is None for a step of too many micro-batches, and where memory is not planned.
    """
    placement = folded(arena.placement) if arena and arena.whole else None
    prediction = arena.prediction if arena else simulation.prediction
    plan = Plan(
        decisions=simulation.decisions,
        program_sha256=program_sha256(simulation.full_programs),
        placement_sha256=sha256_of(placement) if placement else "",
        prediction=msgspec.structs.replace(
            prediction, interval=interval_of(question, simulation.decisions, prediction)
        ),
        provenance=Provenance(
            created=created,
            memo_version=memo_sim.__version__,
            command=command,
            cluster=question.cluster.name,
            hardware_sha256=sha256_of(question.hardware),
            system=question.system,
        ),
    )
    return plan, placement


def now() -> str:
    """Return the time of day as a plan's file has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_files(answer: Answer, question: Question, outputs: Outputs, *, created: str, command: str) -> None:
    """Write the best plan of ``answer`` to ``outputs``; when no plan fits, only the report, which says why."""
    if outputs.report is not None and answer.best is None:
        from memo_sim.answers.report import write_report

        told = {"created": created, "command": command}
        write_report(answer, question, outputs.report, plan=None, file=None, **told)
    if answer.best is None or not any((outputs.plan, outputs.picture, outputs.timeline, outputs.report)):
        return
    if outputs.picture:  # first, so that a drawing that fails leaves no other file
        _draw(answer, answer.best, question, outputs)
    if outputs.timeline:
        from memo_sim.views.chrome_trace import write_chrome_trace

        write_chrome_trace(answer.best.traces(), outputs.timeline, full=outputs.full_timeline)
    if not (outputs.plan or outputs.report):
        return
    plan, placement = plan_of(answer.best, answer.arena, question, created=created, command=command)
    if outputs.report:
        from memo_sim.answers.report import write_report

        told = {"created": created, "command": command}
        write_report(answer, question, outputs.report, plan=plan, file=outputs.plan, **told)
    if outputs.plan:
        for number, trace in enumerate(answer.best.traces(most_spans=MOST_WRITTEN_SPANS)):
            write(beside(outputs.plan, f"trace.stage{number}" if number else "trace"), trace)
        if placement is not None:
            write(beside(outputs.plan, "placement"), placement)
        write(outputs.plan, plan)


def _draw(answer: Answer, best: Simulation, question: Question, outputs: Outputs) -> None:
    """Draw the best plan's timeline, or the Pareto front."""
    assert outputs.picture is not None
    if outputs.pareto_picture:
        from memo_sim.views.front_chart import draw_front

        draw_front(answer.result, outputs.picture)
        return
    from memo_sim.answers.report import steps_of
    from memo_sim.views.timeline import draw_timeline

    title = plan_title(best.decisions, best.prediction.step_s, question.cluster.name)
    draw_timeline(steps_of(best, answer.arena), outputs.picture, title=title)


def _row(evaluated: Evaluated, question: Question) -> PlanRow:
    """Return one evaluated plan as a row, with its interval."""
    plain = row(evaluated.decisions, evaluated.prediction, system=_system(evaluated, question))
    interval = interval_of(question, evaluated.decisions, evaluated.prediction)
    return msgspec.structs.replace(plain, interval=interval)


def row(decisions: Decisions, prediction: Prediction, *, system: str) -> PlanRow:
    """Return one plan as a row of the result document, without an interval."""
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
        recompute_layers=decisions.recompute_layers,
        attention=decisions.kernels.attention,
        executable=decisions.kernels.attention not in PRICED_ONLY and played(decisions),
        fp8=decisions.fp8,
        mlp_chunk_tokens=decisions.mlp_chunk_tokens,
        mlp_rebuild=decisions.mlp_rebuild,
        attention_chunk_tokens=decisions.attention_chunk_tokens,
        memory_policy=decisions.memory_policy,
        rowwise=decisions.kernels.rowwise,
        allocator_limit_gib=decisions.allocator_limit_gib,
        states=decisions.states,
        loss=decisions.loss,
        micro_batch=decisions.micro_batch,
        peak_device_bytes=prediction.peak_device_bytes,
        peak_by_class=prediction.peak_by_class,
        reserved_bytes=prediction.reserved_bytes,
        allocation_retries=prediction.allocation_retries,
        peak_host_bytes_per_node=prediction.peak_host_bytes_per_node,
        lanes=prediction.lanes,
        stalls=prediction.stalls,
        shortfall_bytes=prediction.shortfall_bytes,
        reason=prediction.reason,
        outside_calibration=prediction.outside_calibration,
        interval=prediction.interval,
    )


def _system(evaluated: Evaluated, question: Question) -> str:
    return (
        f"{question.system}: {evaluated.policy.label}" if question.system != DEFAULT_SYSTEM else evaluated.policy.label
    )
