"""The public Python functions: what ``memo-sim`` answers, with typed results. ``import memo_sim`` offers them all.

    import memo_sim as memo

    answer = memo.what_if("llama3-8b", cluster="h100-1x8", seq_len="1m", tp=8)
    answer.best.step_s, answer.why, answer.table(), answer.save("plan.json")

The arguments are the options of ``memo-sim`` with underscores. Every failure is a ``MemoError``. A question that has no
plan that fits is a result whose ``best`` is None. ``docs/python.md`` says what stays as it is between versions.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Unpack

from memo_sim.answers import difference as difference_answer
from memo_sim.answers import longest as longest_answer
from memo_sim.answers import more_memory, named_values, sweep_file
from memo_sim.answers import plan_memory as memory_answer
from memo_sim.answers import sweep as sweep_answer
from memo_sim.answers import what_if as what_if_answer
from memo_sim.answers.given_plan import GivenPlan
from memo_sim.contract import codec
from memo_sim.contract.comparison import Comparison
from memo_sim.contract.difference import Difference
from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.knobs import ARGUMENTS
from memo_sim.contract.longest import Longest
from memo_sim.contract.memory_report import MemoryReport
from memo_sim.contract.model import Model
from memo_sim.contract.named_arguments import with_names_checked
from memo_sim.contract.named_knobs import Knobs
from memo_sim.contract.placement import Placement
from memo_sim.contract.plain_text import one_line, printable
from memo_sim.contract.plan import Plan, PlanRow
from memo_sim.contract.progress import Progress
from memo_sim.contract.result import Result
from memo_sim.contract.summary import Summary
from memo_sim.contract.sweep import SweepLine
from memo_sim.contract.trace import Trace
from memo_sim.contract.units import GIB, format_bytes, format_seconds, format_tokens, parse_tokens
from memo_sim.engine.simulate import Simulation
from memo_sim.planning.question import Question
from memo_sim.views.difference_chart import draw_difference
from memo_sim.views.difference_table import difference_table
from memo_sim.views.html_table import html_table
from memo_sim.views.pictures import Picture, picture_in
from memo_sim.views.plan_table import layout_label
from memo_sim.views.rows import Row, buffer_rows, difference_rows, kind_rows, length_rows, plan_rows
from memo_sim.views.sweep_chart import draw_sweep, front
from memo_sim.views.sweep_table import HEADS, sweep_cells, sweep_csv, sweep_rows, sweep_table
from memo_sim.views.tables import answer_text, longest_text, placement_report

__all__ = [
    "CompareResult",
    "Knobs",
    "LongestResult",
    "MemoryResult",
    "Picture",
    "SweepResult",
    "WhatIfResult",
    "compare",
    "grid",
    "load_plan",
    "load_sweep",
    "longest",
    "plan_memory",
    "simulate",
    "sweep",
    "what_if",
]

PathLike = str | os.PathLike[str]
SECONDS = (1e-9, 1e9)
"""Least and most seconds of a limit."""
PRICES = (1e-9, 1e12)
Solver = Literal["portfolio", "bilevel-mip", "mip", "greedy", "cp-sat"]


@dataclass(frozen=True, repr=False)
class WhatIfResult:
    """The answer of ``what_if`` and ``simulate``: ranked plans, reasons, and the best plan's simulation.

    ``refused`` says why no plan could be evaluated at all; it is None where plans were.
    """

    question: Question
    document: Result
    answer: what_if_answer.Answer | None
    command: str
    refused: Infeasible | None = None

    @property
    def best(self) -> PlanRow | None:
        """The fastest plan that fits, or None."""
        return self.document.best

    @property
    def summary(self) -> Summary | None:
        """The verdict in numbers, with what it assumes; None where no plan could be evaluated."""
        return self.document.summary

    @property
    def plans(self) -> list[PlanRow]:
        """The plans, the fastest that fits first; those that do not fit come last."""
        return self.document.plans

    @property
    def front(self) -> list[PlanRow]:
        """The Pareto front of step time, device memory and host memory."""
        return self.document.front

    @property
    def why(self) -> list[str]:
        """Why the best plan is best, or why none fits; one sentence each."""
        return self.document.why

    @property
    def warnings(self) -> list[str]:
        """Why the figures cannot be right."""
        return self.document.warnings

    @property
    def simulation(self) -> Simulation:
        """The best plan as played.

        Raises:
            Infeasible: when no plan fits.
        """
        return self._fitting().best_simulation

    @cached_property
    def plan(self) -> Plan:
        """The best plan as its file holds it.

        Raises:
            Infeasible: when no plan fits.
        """
        return self._plan_and_placement[0]

    @property
    def placement(self) -> Placement | None:
        """The addresses of the best plan's buffers; None where memory is not planned.

        Raises:
            Infeasible: when no plan fits.
        """
        return self._plan_and_placement[1]

    @cached_property
    def _plan_and_placement(self) -> tuple[Plan, Placement | None]:
        answer = self._fitting()
        made = {"created": what_if_answer.now(), "command": self.command}
        return what_if_answer.plan_of(answer.best_simulation, answer.arena, self.question, **made)

    @cached_property
    def traces(self) -> list[Trace]:
        """The best plan's predicted timeline, one for each pipeline stage.

        Raises:
            Infeasible: when no plan fits.
        """
        return self.simulation.traces()

    def table(self, of: Literal["plans", "front", "kinds"] = "plans") -> list[Row]:
        """Return rows for ``pandas.DataFrame``: the plans, the Pareto front, or the best plan's seconds by kind.

        A plan's row has its memory by class, its busy seconds by lane and compute's waits; ``kinds`` are the busy
        seconds by lane and kind of instruction of the stage that sets the pace.

        Raises:
            UsageError: when ``of`` is another word.
            Infeasible: for ``kinds``, when no plan fits.
        """
        document = self.document
        about: Row = {"model": document.model, "cluster": document.cluster, "seq_tokens": document.seq_tokens}
        if of == "kinds":
            return kind_rows(self.simulation.pace.kinds_s, self.simulation.prediction.step_s or 0.0)
        if of not in ("plans", "front"):
            raise UsageError("no such table", got=repr(of), wanted="plans, front, kinds")
        return plan_rows(document.plans if of == "plans" else document.front, about)

    def plot(self, path: PathLike | None = None) -> Picture:
        """Draw the best plan's timeline, into ``path`` (.png, .svg, .pdf) where one is given.

        Raises:
            Infeasible: when no plan fits.
            UsageError: when the file cannot be written.
            CannotRun: when matplotlib is not installed.
        """
        self._fitting()
        return picture_in(lambda file: self.write(what_if_answer.Outputs(picture=file)), path)

    def save(self, path: PathLike) -> None:
        """Write the best plan as ``memo-sim what-if -o`` does: its trace and placement beside it.

        Raises:
            Infeasible: when no plan fits.
            UsageError: when the file cannot be written, or its name does not end in .json.
        """
        self._fitting()
        self.write(what_if_answer.Outputs(plan=Path(path)))

    def save_timeline(self, path: PathLike) -> None:
        """Write the best plan's timeline for ui.perfetto.dev.

        Raises:
            Infeasible: when no plan fits.
            UsageError: when the file cannot be written.
        """
        self._fitting()
        self.write(what_if_answer.Outputs(timeline=Path(path)))

    def save_report(self, path: PathLike) -> None:
        """Write the answer as one HTML page that opens offline; one without a plan says why.

        Raises:
            UsageError: when the file cannot be written.
            CannotRun: when a package that draws the page is missing.
        """
        self.write(what_if_answer.Outputs(report=Path(path)))

    def as_given(self, name: str) -> GivenPlan:
        """Return the best plan as it was simulated, called ``name``.

        Raises:
            Infeasible: when no plan fits.
        """
        simulation = self.simulation
        return GivenPlan(name, simulation.decisions, simulation.cluster, simulation.hardware, simulation)

    def write(self, outputs: what_if_answer.Outputs) -> None:
        """Write the best plan to all the files of a command line; when no plan fits, only the report, which says why.

        Raises:
            UsageError: when a file cannot be written.
        """
        outputs.check()
        answer = self.answer or what_if_answer.Answer(self.document, None, None)
        made = {"created": what_if_answer.now(), "command": self.command}
        what_if_answer.write_files(answer, self.question, outputs, **made)

    def to_json(self) -> str:
        """Return the document ``memo.result/2``."""
        return codec.encode(self.document).decode()

    def _fitting(self) -> what_if_answer.Answer:
        if self.answer is None or self.answer.best is None:
            raise self.refused or Infeasible("no plan fits", hint="see .why")
        return self.answer

    def __str__(self) -> str:
        """Return the answer as ``memo-sim what-if`` prints it."""
        return printable(answer_text(self.document, why=True))

    def __repr__(self) -> str:
        short = one_line(self.refused.what) if self.refused else _in_short(self.best)
        return f"<WhatIfResult {_title(self.document)}: {short}>"

    def _repr_html_(self) -> str:
        caption = "\n".join([_title(self.document), *(f"WARNING: {text}" for text in self.warnings)])
        if self.best is None:
            caption += "\n" + "\n".join([*([] if self.refused else ["no plan fits"]), *self.why])
        return html_table(caption, _HEADS, [_cells(rank, plan) for rank, plan in enumerate(self.plans, start=1)])


@dataclass(frozen=True, repr=False)
class LongestResult:
    """The answer of ``longest``; ``at_longest`` is the answer of ``what_if`` there, None when no length fits."""

    document: Longest
    at_longest: WhatIfResult | None

    @property
    def seq_tokens(self) -> int:
        """The longest sequence that fits, in tokens; 0 when none fits."""
        return self.document.seq_tokens

    @property
    def best(self) -> PlanRow | None:
        """The fastest plan at that length, or None."""
        return self.document.best

    @property
    def summary(self) -> Summary | None:
        """The verdict about that plan in numbers, with what it assumes."""
        return self.document.summary

    @property
    def why(self) -> list[str]:
        """What limits the length, and why the plan is best; one sentence each."""
        return self.document.why

    @property
    def warnings(self) -> list[str]:
        """Why the figures cannot be right."""
        return self.document.warnings

    def table(self) -> list[Row]:
        """Return rows for ``pandas.DataFrame``: every length that was tried."""
        return length_rows(self.document)

    def plot(self, path: PathLike | None = None) -> Picture:
        """Draw the timeline of the best plan at the longest length (``WhatIfResult.plot``)."""
        return self._fitting().plot(path)

    def save(self, path: PathLike) -> None:
        """Write the best plan at the longest length (``WhatIfResult.save``)."""
        self._fitting().save(path)

    def to_json(self) -> str:
        """Return the document ``memo.longest/2``."""
        return codec.encode(self.document).decode()

    def _fitting(self) -> WhatIfResult:
        if self.at_longest is None:
            raise Infeasible("no length fits", hint="see .why")
        return self.at_longest

    def __str__(self) -> str:
        """Return the answer as ``memo-sim longest`` prints it."""
        return printable(longest_text(self.document, why=True))

    def __repr__(self) -> str:
        document = self.document
        longest = format_tokens(document.seq_tokens)
        return f"<LongestResult {one_line(document.model)} on {one_line(document.cluster)}: {longest} tokens>"

    def _repr_html_(self) -> str:
        rows = [
            [
                format_tokens(tried.seq_tokens),
                "fits" if tried.fits else "does not fit",
                None if tried.step_s is None else format_seconds(tried.step_s),
                tried.bound,
            ]
            for tried in self.document.tried
        ]
        head = f"{self.document.model} on {self.document.cluster}: {format_tokens(self.seq_tokens)} tokens at most"
        return html_table(head, ["tokens", "", "a plan's step", "limited by"], rows)


@dataclass(frozen=True, repr=False)
class MemoryResult:
    """The answer of ``plan_memory``: the report, and the placement with an address for every buffer."""

    made: memory_answer.MemoryPlan

    @property
    def document(self) -> MemoryReport:
        """The figures."""
        return self.made.report

    @property
    def placement(self) -> Placement:
        """The addresses."""
        return self.made.placement

    def table(self) -> list[Row]:
        """Return rows for ``pandas.DataFrame``: every buffer with its class, life, size and address."""
        return buffer_rows(self.made.placement)

    def plot(self, path: PathLike | None = None) -> Picture:
        """Draw addresses over time, into ``path`` (.png, .svg, .pdf) where one is given.

        Raises:
            UsageError: when the file cannot be written.
            CannotRun: when matplotlib is not installed.
        """
        return picture_in(lambda file: memory_answer.write_files(self.made, None, file), path)

    def save(self, path: PathLike) -> None:
        """Write the placement: .json, .csv, or .pickle for PyTorch's memory viewer.

        Raises:
            UsageError: when the file cannot be written.
        """
        memory_answer.write_files(self.made, Path(path), None)

    def to_json(self) -> str:
        """Return the document ``memo.memory/2``."""
        return codec.encode(self.document).decode()

    def __str__(self) -> str:
        """Return the report as ``memo-sim plan-memory`` prints it."""
        return printable(placement_report(self.document))

    def __repr__(self) -> str:
        peak = format_bytes(self.document.peak_bytes)
        return f"<MemoryResult {one_line(self.document.input)}: {self.document.buffers} buffers in {peak}>"

    def _repr_html_(self) -> str:
        document, cached = self.document, self.document.reserved_caching_bytes
        rows: list[list[str | None]] = [
            ["live bytes", format_bytes(document.live_bytes)],
            ["planned arena", format_bytes(document.peak_bytes)],
            ["lower bound", format_bytes(document.lower_bound_bytes)],
            ["reserved by PyTorch's caching allocator", None if cached is None else format_bytes(cached)],
        ]
        return html_table(f"{document.input}: {document.buffers} buffers", ["memory", "size"], rows)


@dataclass(frozen=True, repr=False)
class SweepResult:
    """The answers of ``sweep``, in the order of the questions."""

    lines: list[SweepLine]

    @property
    def failed(self) -> list[SweepLine]:
        """The questions without an answer; that no plan fits is an answer."""
        return [line for line in self.lines if line.failure is not None]

    @property
    def front(self) -> list[SweepLine]:
        """The answers that no other about the same model and length beats in speed and device memory."""
        return front(self.lines)

    def table(self) -> list[Row]:
        """Return rows for ``pandas.DataFrame``: what was asked, and the best plan's figures as in ``WhatIfResult``."""
        return sweep_rows(self.lines)

    def plot(self, path: PathLike | None = None) -> Picture:
        """Draw length against MFU, speed and memory, into ``path`` (.png, .svg, .pdf) where one is given.

        Raises:
            UsageError: when the file cannot be written.
            CannotRun: when matplotlib is not installed.
        """
        return picture_in(lambda file: draw_sweep(self.lines, file), path)

    def save(self, path: PathLike) -> None:
        """Write the rows (.csv), or the answers as they are (.jsonl).

        Raises:
            UsageError: when the file's kind is unknown or it cannot be written.
        """
        path = Path(path)
        if path.suffix not in (".csv", ".jsonl"):
            raise UsageError("not a kind of file", got=str(path), wanted=".csv, .jsonl")
        lines = b"".join(map(sweep_file.encoded, self.lines))
        codec.write_bytes(path, sweep_csv(self.lines).encode() if path.suffix == ".csv" else lines)

    def __str__(self) -> str:
        """Return the table that ``memo-sim sweep`` prints."""
        return printable(sweep_table(self.lines))

    def __repr__(self) -> str:
        return f"<SweepResult: {len(self.lines)} questions, {len(self.failed)} failed>"

    def _repr_html_(self) -> str:
        return html_table(repr(self)[1:-1], HEADS, sweep_cells(self.lines))


@dataclass(frozen=True, repr=False)
class CompareResult:
    """The answer of ``compare``: sides are named A, B, ... in their order."""

    document: Difference

    @property
    def verdict(self) -> list[str]:
        """One sentence for each side but the first."""
        return self.document.verdict

    def table(self) -> list[Row]:
        """Return rows for ``pandas.DataFrame``: each part of the step, its seconds on each side and their difference.

        The seconds of a side sum to its step.
        """
        return difference_rows(self.document)

    def plot(self, path: PathLike | None = None) -> Picture:
        """Draw step and memory side by side, into ``path`` (.png, .svg, .pdf) where one is given.

        Raises:
            UsageError: when the file cannot be written.
            CannotRun: when matplotlib is not installed.
        """
        return picture_in(lambda file: draw_difference(self.document, file), path)

    def save(self, path: PathLike) -> None:
        """Write the document ``memo.difference/1``.

        Raises:
            UsageError: when the file cannot be written.
        """
        codec.write(Path(path), self.document)

    def to_json(self) -> str:
        """Return the document ``memo.difference/1``."""
        return codec.encode(self.document).decode()

    def __str__(self) -> str:
        """Return the table that ``memo-sim compare`` prints."""
        return printable(difference_table(self.document))

    def __repr__(self) -> str:
        return f"<CompareResult: {' | '.join(one_line(side.name) for side in self.document.sides)}>"

    def _repr_html_(self) -> str:
        rows = self.table()
        cells = [[f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in row.values()] for row in rows]
        return html_table("\n".join(self.verdict), list(rows[0]) if rows else [], cells)


@with_names_checked(others=ARGUMENTS)
def what_if(
    model: PathLike | Model,
    *,
    seq_len: int | str,
    cluster: PathLike | None = None,
    from_datasheet: str | None = None,
    system: str = "any",
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    safety_gib: float | None = None,
    power_w: float | None = None,
    top: int = 10,
    pareto: bool = False,
    one_more_gib: bool = False,
    price_per_gpu_hour: float | None = None,
    progress: Progress | None = None,
    **knobs: Unpack[Knobs],
) -> WhatIfResult:
    """Search every knob that is not pinned, and rank the plans, as ``memo-sim what-if`` does.

    ``model`` is a preset's name, a file or a ``Model``; ``seq_len`` a number of tokens or text such as ``"64k"``;
    ``cluster`` a name or a file, and ``from_datasheet`` a GPU in its place, as the option describes it.
    ``price_per_gpu_hour`` is in any currency, and adds prices to ``summary``. ``progress`` receives (plans done, plans
    in all).

    Raises:
        UsageError: when a name or a value is wrong, or knobs contradict each other or the cluster.
        BadInput: when a file cannot be read.
    """
    values = {"model": model, "cluster": cluster, "seq_len": seq_len, "system": system, **knobs}
    values |= {"device_memory_gib": device_memory_gib, "host_memory_gib": host_memory_gib, "safety_gib": safety_gib}
    values |= {"from_datasheet": from_datasheet, "power_w": power_w}
    question = named_values.question_of(values)
    return answered(
        question,
        top=top,
        pareto=pareto,
        one_more_gib=one_more_gib,
        price_per_gpu_hour=price_per_gpu_hour,
        progress=progress,
        command=_call("what_if", values),
    )


@with_names_checked(others=ARGUMENTS)
def longest(
    model: PathLike | Model,
    *,
    cluster: PathLike | None = None,
    from_datasheet: str | None = None,
    step: int | str = "64k",
    max_step_s: float | None = None,
    system: str = "any",
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    safety_gib: float | None = None,
    power_w: float | None = None,
    one_more_gib: bool = False,
    price_per_gpu_hour: float | None = None,
    progress: Progress | None = None,
    **knobs: Unpack[Knobs],
) -> LongestResult:
    """Find the longest sequence that fits, to a multiple of ``step`` tokens, as ``memo-sim longest`` does.

    Raises:
        UsageError: as in ``what_if``.
        BadInput: when a file cannot be read.
    """
    parse_tokens(str(step), option="--step")
    values = {"model": model, "cluster": cluster, "seq_len": step, "system": system, **knobs}
    values |= {"device_memory_gib": device_memory_gib, "host_memory_gib": host_memory_gib, "safety_gib": safety_gib}
    values |= {"from_datasheet": from_datasheet, "power_w": power_w}
    question = named_values.question_of(values, fill=False)
    named = {("step" if name == "seq_len" else name): value for name, value in values.items()}
    return longest_of(
        question,
        step=step,
        max_step_s=max_step_s,
        one_more_gib=one_more_gib,
        price_per_gpu_hour=price_per_gpu_hour,
        progress=progress,
        command=_call("longest", named | {"max_step_s": max_step_s}),
    )


@with_names_checked()
def simulate(
    plan: Plan | PathLike,
    *,
    cluster: PathLike | None = None,
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    safety_gib: float | None = None,
    power_w: float | None = None,
    price_per_gpu_hour: float | None = None,
    attention: str | None = None,
    rowwise: str | None = None,
) -> WhatIfResult:
    """Play a plan that you already have, as ``memo-sim what-if --plan`` does.

    Without ``cluster`` it is the one that the plan names as its own. ``attention`` and ``rowwise`` are kernels in place
    of the plan's; kernels that the machine's profile has no rates of are replaced, and the summary says so.

    Raises:
        UsageError: when a value is wrong, or the plan names no cluster that can be found.
        BadInput: when a file cannot be read, or the plan cannot be played.
    """
    document = plan if isinstance(plan, Plan) else load_plan(plan)
    values = {"cluster": cluster, "power_w": power_w, "attention": attention, "rowwise": rowwise}
    values |= {"device_memory_gib": device_memory_gib, "host_memory_gib": host_memory_gib, "safety_gib": safety_gib}
    question = named_values.question_about(document, values)
    call = _call("simulate", {"plan": plan, **values})
    return priced(document, question, where=plan, price_per_gpu_hour=price_per_gpu_hour, command=call)


@with_names_checked()
def load_plan(path: PathLike) -> Plan:
    """Return the plan in a file; plans of earlier versions are read too.

    Raises:
        BadInput: when the file cannot be read or does not hold a plan.
    """
    return codec.read(path if isinstance(path, str) else Path(path), Plan)


@with_names_checked()
def plan_memory(
    path: PathLike,
    *,
    solver: Solver = "portfolio",
    time_limit: float = 60.0,
    device: int | None = None,
    device_memory_gib: float | None = None,
) -> MemoryResult:
    """Place every buffer of a file in one arena, as ``memo-sim plan-memory`` does.

    The file is a plan, memo.requests/1, a CSV, a log of malloc and free lines, or a PyTorch memory snapshot.
    ``time_limit`` is in seconds; ``device_memory_gib`` is what PyTorch's caching allocator may reserve.

    Raises:
        UsageError: for an unknown solver, or a device that is not there.
        BadInput: when the file holds no requests that can be read.
    """
    named_values.number("time_limit", time_limit, *SECONDS)
    capacity_bytes = named_values.bytes_of("device_memory_gib", device_memory_gib)
    made = memory_answer.plan_memory(
        os.fspath(path), solver=solver, time_limit_s=time_limit, device=device, capacity_bytes=capacity_bytes
    )
    return MemoryResult(made)


@with_names_checked()
def compare(
    *compared: PathLike | WhatIfResult | Plan | Result | Comparison | Trace,
    cluster: PathLike | None = None,
    progress: Progress | None = None,
) -> CompareResult:
    """Say what differs between plans, answers and measured runs, as ``memo-sim compare`` does.

    Each is a file, a document, or an answer of ``what_if`` or ``simulate`` (its best plan, as it was simulated). A plan
    without its trace beside it is simulated on ``cluster``, or on the cluster that it names.

    Raises:
        UsageError: with fewer than two of them, or when a plan's cluster is not known.
        BadInput: when a file cannot be read, or a plan does not fit.
        Infeasible: when no plan of an answer fits.
    """
    sides: list[str | Path | difference_answer.Compared] = []
    for number, one in enumerate(compared, start=1):
        match one:
            case WhatIfResult():
                sides.append(one.as_given(f"number {number}") if cluster is None else one.plan)
            case os.PathLike():
                sides.append(Path(one))
            case _:
                sides.append(one)
    named = None if cluster is None else os.fspath(cluster)
    return CompareResult(difference_answer.compare(sides, cluster=named, progress=progress))


@with_names_checked()
def sweep(
    questions: Iterable[Mapping[str, Any]],
    path: PathLike | None = None,
    *,
    executor: Executor | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> SweepResult:
    """Answer many questions, each a mapping of the arguments of ``what_if``; ``grid`` makes them.

    Answers go to ``path`` (JSON lines) as they come; a question that the file has an answer to is not asked again.
    ``jobs`` processes share the questions, by default one for each CPU; ``executor`` takes them instead: any
    ``concurrent.futures.Executor``, such as dask's. ``progress`` receives (questions done, all).

    Raises:
        UsageError: when a value of a question is wrong, before anything is asked; or another sweep writes the file.
        BadInput: when a file cannot be read, or ``path`` holds something else than answers.
        CannotRun: when the executor takes no more questions.
    """
    file = None if path is None else Path(path)
    return SweepResult(sweep_answer.sweep(questions, file, executor=executor, jobs=jobs, progress=progress))


def grid(**values: Any) -> list[dict[str, Any]]:
    """Return a question for every combination of the values that are lists.

    The names are those of ``what_if``, for example ``grid(model="llama3-8b", cluster=["h100-1x8", "a800-1x8"],
    seq_len=["64k", "128k"], tp=[4, 8])``.

    Raises:
        UsageError: when a name is wrong.
    """
    named_values.check_names(values)
    return sweep_answer.grid(**values)


@with_names_checked()
def load_sweep(*paths: PathLike) -> SweepResult:
    """Return the answers in files of sweeps; of several answers to one question the last one counts.

    Raises:
        BadInput: when a file cannot be read or holds something else.
    """
    lines = [line for path in paths for line in sweep_file.read_lines(Path(path))]
    return SweepResult(list({line.key: line for line in lines}.values()))


def answered(
    question: Question,
    *,
    top: int = 10,
    pareto: bool = False,
    one_more_gib: bool = False,
    price_per_gpu_hour: float | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> WhatIfResult:
    """Return the answer to a question; ``command`` is what the plan's file says that made it.

    Raises:
        UsageError: when pinned knobs contradict each other or the cluster.
    """
    if top < 1:
        raise UsageError("not a number of plans", got=top, wanted="from 1")
    named_values.number("price_per_gpu_hour", price_per_gpu_hour, *PRICES)
    try:
        answer = what_if_answer.what_if(
            question, top=top, pareto=pareto, price_per_device_hour=price_per_gpu_hour, progress=progress
        )
    except Infeasible as error:
        return WhatIfResult(question, what_if_answer.without_answer(question, error), None, command, error)
    if one_more_gib:
        answer = more_memory.with_what_more_buys(question, answer)
    return WhatIfResult(question, answer.result, answer, command)


def priced(
    plan: Plan,
    question: Question,
    *,
    where: Plan | PathLike,
    price_per_gpu_hour: float | None = None,
    command: str = "",
) -> WhatIfResult:
    """Return the answer for a plan as the only candidate; ``where`` names its file.

    Raises:
        BadInput: when the plan cannot be played.
    """
    named_values.number("price_per_gpu_hour", price_per_gpu_hour, *PRICES)
    try:
        with codec.of_file("the plan" if isinstance(where, Plan) else Path(where)):
            answer = what_if_answer.price(plan, question, price_per_device_hour=price_per_gpu_hour)
    except Infeasible as error:
        return WhatIfResult(question, what_if_answer.without_answer(question, error), None, command, error)
    return WhatIfResult(question, answer.result, answer, command)


def longest_of(
    question: Question,
    *,
    step: int | str,
    max_step_s: float | None = None,
    one_more_gib: bool = False,
    price_per_gpu_hour: float | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> LongestResult:
    """Return the longest sequence of a question, whose own length does not matter.

    Raises:
        UsageError: when the step is wrong, or pinned knobs contradict each other or the cluster.
    """
    tokens = parse_tokens(str(step), option="--step")
    named_values.number("max_step_s", max_step_s, *SECONDS)
    named_values.number("price_per_gpu_hour", price_per_gpu_hour, *PRICES)
    limits = {"most_step_s": max_step_s, "price_per_device_hour": price_per_gpu_hour}
    found = longest_answer.longest(question, step_tokens=tokens, **limits, progress=progress)
    if one_more_gib:
        found = more_memory.with_what_more_holds(question, found, step_tokens=tokens, most_step_s=max_step_s)
    if found.answer is None:
        return LongestResult(found.document, None)
    return LongestResult(found.document, WhatIfResult(found.question, found.answer.result, found.answer, command))


_HEADS = (
    "",
    "status",
    "system",
    "layout",
    "alpha",
    "recompute",
    "step",
    "MFU %",
    "tokens/GPU/s",
    "device GiB",
    "host GiB/node",
)


def _cells(rank: int, plan: PlanRow) -> list[str | None]:
    return [
        str(rank),
        plan.status,
        plan.system,
        layout_label(plan.layout),
        f"{plan.alpha:.3f}",
        plan.recompute,
        None if plan.step_s is None else format_seconds(plan.step_s),
        None if plan.mfu is None else f"{100 * plan.mfu:.2f}",
        None if plan.tgs is None else f"{plan.tgs:.1f}",
        f"{plan.peak_device_bytes / GIB:.2f}",
        f"{plan.peak_host_bytes_per_node / GIB:.2f}",
    ]


def _title(document: Result) -> str:
    return f"{one_line(document.model)} on {one_line(document.cluster)}, {format_tokens(document.seq_tokens)} tokens"


def _in_short(best: PlanRow | None) -> str:
    if best is None or best.step_s is None:
        return "no plan fits"
    return f"{layout_label(best.layout)}, {format_seconds(best.step_s)}"


def _call(function: str, values: Mapping[str, object]) -> str:
    """Return the call as a plan's file names what made it, without the values that were not given."""
    shown = {name: _named(value) for name, value in values.items()}
    plain = {n: str(v) if isinstance(v, os.PathLike) else v for n, v in shown.items() if v is not None}
    given = {n: v for n, v in plain.items() if v is not False and (n, v) != ("system", "any")}
    return one_line(f"memo_sim.{function}({', '.join(f'{name}={value!r}' for name, value in given.items())})")


def _named(value: object) -> object:
    """Return a name for a document."""
    if isinstance(value, Plan):
        return f"plan {value.program_sha256[:12]}"
    return value.name if isinstance(value, Model) else value
