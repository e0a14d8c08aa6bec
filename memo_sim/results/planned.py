"""Results about a question: the plans of one cluster, of several, of the longest sequence, of a number of GPUs."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from memo_sim.answers import what_if as what_if_answer
from memo_sim.answers.given_plan import GivenPlan
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.gpus import Gpus, Sized
from memo_sim.contract.longest import Longest
from memo_sim.contract.named_arguments import with_names_checked
from memo_sim.contract.placement import Placement
from memo_sim.contract.plain_text import one_line, printable
from memo_sim.contract.plan import Plan, PlanRow
from memo_sim.contract.result import Result
from memo_sim.contract.results import Results
from memo_sim.contract.summary import Summary
from memo_sim.contract.trace import Trace
from memo_sim.contract.units import GIB, format_seconds, format_tokens
from memo_sim.engine.simulate import Simulation
from memo_sim.planning.question import Question
from memo_sim.program.arena.folded import unfolded
from memo_sim.views.answer_text import answer_text, longest_text
from memo_sim.views.gpus_table import ROLES, gpus_table, gpus_verdict
from memo_sim.views.html_table import html_table
from memo_sim.views.longest_table import tried_cells
from memo_sim.views.pictures import Picture, picture_in
from memo_sim.views.plan_table import layout_label
from memo_sim.views.results_table import results_table
from memo_sim.views.rows import Row, cluster_rows, kind_rows, length_rows, plan_rows, size_rows
from memo_sim.views.typed_result import PathLike, TypedResult

if TYPE_CHECKING:
    from memo_sim.views.report.page import Page

PlotOf = Literal["timeline", "front"]


@dataclass(frozen=True, repr=False, eq=False)
class WhatIfResult(TypedResult):
    """The answer of ``what_if`` and ``simulate``: ranked plans, reasons, and the best plan's simulation.

    ``refused`` says why no plan could be evaluated at all; it is None where plans were.
    """

    question: Question
    document: Result
    answer: what_if_answer.Answer | None
    command: str
    refused: Infeasible | None = None
    given: Plan | None = None
    """The plan that was priced; None where plans were searched."""

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
        found = self._plan_and_placement[1]
        return None if found is None else unfolded(found)

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

    @with_names_checked()
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
        return plan_rows(document.plans if of == "plans" else document.front, about)

    @with_names_checked()
    def plot(self, path: PathLike | None = None, *, of: PlotOf = "timeline") -> Picture:
        """Draw the best plan's timeline or the Pareto front, into ``path`` (.png, .svg, .pdf) where one is given.

        The front is that of ``front``: whole with ``pareto=True``, else of the plans that the search has evaluated.

        Raises:
            Infeasible: when no plan fits.
            UsageError: when the file cannot be written.
            CannotRun: when matplotlib is not installed.
        """
        self._fitting()
        outputs = what_if_answer.Outputs(pareto_picture=of == "front")
        return picture_in(lambda file: self.write(replace(outputs, picture=file)), path)

    @with_names_checked()
    def save(self, path: PathLike) -> None:
        """Write the best plan as ``memo-sim what-if -o`` does: its trace and placement beside it.

        Raises:
            Infeasible: when no plan fits.
            UsageError: when the file cannot be written, or its name does not end in .json.
        """
        self._fitting()
        self.write(what_if_answer.Outputs(plan=Path(path)))

    @with_names_checked()
    def save_timeline(self, path: PathLike) -> None:
        """Write the best plan's timeline for ui.perfetto.dev.

        Raises:
            Infeasible: when no plan fits.
            UsageError: when the file cannot be written.
        """
        self._fitting()
        self.write(what_if_answer.Outputs(timeline=Path(path)))

    @with_names_checked()
    def save_report(self, path: PathLike, *, plan: PathLike | None = None) -> None:
        """Write the answer as one HTML page that opens offline; one without a plan says why.

        ``plan`` is where the plan was saved, for the page's commands.

        Raises:
            UsageError: when the file cannot be written.
            CannotRun: when a package that draws the page is missing.
        """
        from memo_sim.views.report.page import save_page

        save_page(lambda **told: self.page(plan), path, self.command)

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

    def page(self, plan: PathLike | None = None) -> Page:
        """Return the report as ``save_report`` writes it."""
        from memo_sim.answers.report import report_page

        answer = self.answer or what_if_answer.Answer(self.document, None, None)
        best = None if answer.best is None else self.plan
        made = {"created": what_if_answer.now(), "command": self.command}
        return report_page(answer, self.question, plan=best, file=None if plan is None else Path(plan), **made)

    def _fitting(self) -> what_if_answer.Answer:
        if self.answer is None or self.answer.best is None:
            raise self.refused or Infeasible("no plan fits", hint="see .why")
        return self.answer

    def __str__(self) -> str:
        """Return the answer as ``memo-sim what-if`` prints it."""
        return printable(answer_text(self.document, why=True, searched=self.given is None))

    def __repr__(self) -> str:
        short = one_line(self.refused.what) if self.refused else _in_short(self.best)
        return f"<WhatIfResult {_title(self.document)}: {short}>"

    def _repr_html_(self) -> str:
        caption = "\n".join([_title(self.document), *(f"WARNING: {text}" for text in self.warnings)])
        if self.best is None:
            caption += "\n" + "\n".join([*([] if self.refused else ["no plan fits"]), *self.why])
        return html_table(caption, _HEADS, [_cells(rank, plan) for rank, plan in enumerate(self.plans, start=1)])


class _OfOneAnswer(TypedResult):
    """A result whose plan is that of one answer of ``what_if``."""

    @property
    @abstractmethod
    def _answer(self) -> WhatIfResult:
        """The answer.

        Raises:
            Infeasible: where there is none.
        """

    @property
    @abstractmethod
    def best(self) -> PlanRow | None:
        """The plan, or None when nothing fits."""

    @property
    @abstractmethod
    def command(self) -> str:
        """The command that asked."""

    @abstractmethod
    def _page(self, at_best: Page | None, **made: str) -> Page:
        """Return the report; ``at_best`` is the page of the one answer, ``made`` what ``save_page`` gives."""

    @with_names_checked()
    def save_report(self, path: PathLike, *, plan: PathLike | None = None) -> None:
        """Write the answer as one HTML page that opens offline; ``plan`` is where the plan was saved.

        Raises:
            UsageError: when the file cannot be written.
            CannotRun: when a package that draws the page is missing.
        """
        from memo_sim.views.report.page import save_page

        at_best = None if self.best is None else self._answer.page(plan)
        save_page(partial(self._page, at_best), path, self.command)

    @property
    def plan(self) -> Plan:
        """The best plan as its file holds it.

        Raises:
            Infeasible: when no plan fits.
        """
        return self._answer.plan

    @with_names_checked()
    def plot(self, path: PathLike | None = None) -> Picture:
        """Draw the best plan's timeline (``WhatIfResult.plot``)."""
        return self._answer.plot(path)

    @with_names_checked()
    def save(self, path: PathLike) -> None:
        """Write the best plan (``WhatIfResult.save``)."""
        self._answer.save(path)

    @with_names_checked()
    def save_timeline(self, path: PathLike) -> None:
        """Write the best plan's timeline (``WhatIfResult.save_timeline``)."""
        self._answer.save_timeline(path)


@dataclass(frozen=True, repr=False, eq=False)
class LongestResult(_OfOneAnswer):
    """The answer of ``longest``; ``at_longest`` is the answer of ``what_if`` there, None when no length fits."""

    document: Longest
    at_longest: WhatIfResult | None
    command: str = ""

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

    @with_names_checked()
    def table(self) -> list[Row]:
        """Return rows for ``pandas.DataFrame``: every length that was tried."""
        return length_rows(self.document)

    @property
    def _answer(self) -> WhatIfResult:
        if self.at_longest is None:
            raise Infeasible("no length fits", hint="see .why")
        return self.at_longest

    def _page(self, at_best: Page | None, **made: str) -> Page:
        from memo_sim.views.report.longest import longest_page

        return longest_page(self.document, at_best, **made)

    def __str__(self) -> str:
        """Return the answer as ``memo-sim longest`` prints it."""
        return printable(longest_text(self.document, why=True))

    def __repr__(self) -> str:
        document = self.document
        longest = format_tokens(document.seq_tokens)
        return f"<LongestResult {one_line(document.model)} on {one_line(document.cluster)}: {longest} tokens>"

    def _repr_html_(self) -> str:
        heads, rows, _ = tried_cells(self.document)
        head = f"{self.document.model} on {self.document.cluster}: {format_tokens(self.seq_tokens)} tokens at most"
        return html_table(head, heads, rows)


@dataclass(frozen=True, repr=False, eq=False)
class ClustersResult(_OfOneAnswer):
    """The answers of ``what_if`` about several clusters, the best cluster first; where nothing fits comes last."""

    document: Results
    answers: list[WhatIfResult]
    """In the order of the document."""

    @property
    def command(self) -> str:
        """The command that asked."""
        return self.answers[0].command

    @property
    def best(self) -> PlanRow | None:
        """The best plan of the best cluster, or None when nothing fits on any."""
        return self.answers[0].best

    @property
    def summary(self) -> Summary | None:
        """The verdict about that plan in numbers, with what it assumes."""
        return self.answers[0].summary

    @with_names_checked()
    def table(self) -> list[Row]:
        """Return rows for ``pandas.DataFrame``: every cluster with its price and its best plan's figures."""
        return cluster_rows(self.document)

    @property
    def _answer(self) -> WhatIfResult:
        return self.answers[0]

    def _page(self, at_best: Page | None, **made: str) -> Page:
        from memo_sim.views.report.sizes import results_page

        return results_page(self.document, at_best, **made)

    def __str__(self) -> str:
        """Return the table that ``memo-sim what-if --cluster A,B`` prints."""
        return printable(results_table(self.document))

    def __repr__(self) -> str:
        names = ", ".join(one_line(each.cluster) for each in self.document.results)
        return f"<ClustersResult {one_line(self.document.model)} on {names}>"

    def _repr_html_(self) -> str:
        head = f"{self.document.model}, {format_tokens(self.document.seq_tokens)} tokens, by {self.document.ranked_by}"
        rows = [
            [str(rank), result.cluster, *_cells(rank, plan)[1:]]
            for rank, result in enumerate(self.document.results, start=1)
            if (plan := result.best or next(iter(result.plans), None))
        ]
        return html_table(head, ["", "cluster", *_HEADS[1:]], rows)


@dataclass(frozen=True, repr=False, eq=False)
class GpusResult(_OfOneAnswer):
    """The answer of ``gpus``; ``at_chosen`` is the answer of ``what_if`` for the chosen number, None without one."""

    document: Gpus
    at_chosen: WhatIfResult | None
    command: str = ""

    @property
    def chosen(self) -> Sized | None:
        """The number of GPUs that answers the question, with its kind and its best plan; None where none is enough."""
        return self.document.chosen

    @property
    def best(self) -> PlanRow | None:
        """The fastest plan on the chosen number of GPUs, or None."""
        return None if self.document.chosen is None else self.document.chosen.best

    @property
    def summary(self) -> Summary | None:
        """The verdict about that plan in numbers, with what it assumes."""
        return None if self.document.chosen is None else self.document.chosen.summary

    @property
    def why(self) -> list[str]:
        """What was assumed and how numbers of GPUs were searched; one sentence each."""
        return self.document.why

    @property
    def warnings(self) -> list[str]:
        """Why the figures cannot be right."""
        return self.document.warnings

    @with_names_checked()
    def table(self) -> list[Row]:
        """Return rows for ``pandas.DataFrame``: every number of GPUs worth knowing, with its price and its plan."""
        return size_rows(self.document)

    @property
    def _answer(self) -> WhatIfResult:
        if self.at_chosen is None:
            raise Infeasible("no number of GPUs is enough", hint="see .why")
        return self.at_chosen

    def _page(self, at_best: Page | None, **made: str) -> Page:
        from memo_sim.views.report.sizes import gpus_page

        return gpus_page(self.document, at_best, **made)

    def __str__(self) -> str:
        """Return the answer as ``memo-sim gpus`` prints it."""
        return printable("\n".join([gpus_table(self.document) + "\n", *map(one_line, self.why)]))

    def __repr__(self) -> str:
        return f"<GpusResult {printable(gpus_verdict(self.document))}>"

    def _repr_html_(self) -> str:
        caption = "\n".join([gpus_verdict(self.document), *(f"WARNING: {text}" for text in self.warnings)])
        rows = [
            [
                size.kind,
                str(size.summary.devices),
                ", ".join(ROLES[role] for role in size.roles),
                *_cells(0, size.best)[1:],
            ]
            for size in self.document.sizes
        ]
        return html_table(caption, ["kind", "GPUs", "", *_HEADS[1:]], rows)


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
