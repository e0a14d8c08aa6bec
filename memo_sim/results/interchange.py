"""Results about other frameworks: a plan handed to one, a job read from one, a recorded step of one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from memo_sim.contract import codec
from memo_sim.contract.errors import UsageError
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.interchange import Export, ImportedJob, LostDecision
from memo_sim.contract.named_arguments import with_names_checked
from memo_sim.contract.plain_text import one_line, printable
from memo_sim.contract.plan import PlanRow
from memo_sim.contract.recorded_step import RecordedStep
from memo_sim.contract.result import Result
from memo_sim.views.export_page import export_summary, verdict
from memo_sim.views.html_table import rows_as_html
from memo_sim.views.import_page import import_head, import_summary
from memo_sim.views.recorded_table import diagnosis_text, recorded_head
from memo_sim.views.rows import Row, job_rows, option_rows, struct_rows
from memo_sim.views.typed_result import PathLike, TypedResult

if TYPE_CHECKING:
    from memo_sim.answers.doctor import Diagnosis
    from memo_sim.answers.export_plan import Exported


@dataclass(frozen=True, repr=False, eq=False)
class ExportResult(TypedResult):
    """The answer of ``export``: the files by which a framework runs a plan, and what is lost on the way."""

    made: Exported
    directory: Path | None = None
    """The folder that holds the files; None where they were not written."""

    @property
    def document(self) -> Export:
        """What was exported, what was lost, and what that costs."""
        return self.made.document

    @property
    def fits(self) -> bool:
        """Whether the plan fits as the framework would run it."""
        return self.made.fits

    @property
    def lost(self) -> list[LostDecision]:
        """The decisions of the plan that the framework does not keep."""
        return self.document.lost

    @property
    def files(self) -> dict[str, bytes]:
        """The files by their names in the folder."""
        return self.made.files

    @property
    def search_command(self) -> str:
        """The command that finds a plan that the framework can run whole."""
        return self.made.search_command(str(self.directory or "."))

    @with_names_checked()
    def table(self) -> list[Row]:
        """Return rows for ``pandas.DataFrame``: every decision that is lost, and what the framework does instead."""
        return struct_rows(self.lost)

    @with_names_checked()
    def save(self, path: PathLike) -> None:
        """Write the files into a new folder, or an empty one.

        Raises:
            UsageError: when the folder cannot be written, or holds something.
        """
        codec.write_folder(Path(path), self.files)

    def __str__(self) -> str:
        """Return the summary that ``memo-sim export`` prints."""
        return printable(export_summary(self.document, str(self.directory or "not written")))

    def __repr__(self) -> str:
        return f"<ExportResult {printable(verdict(self.document))}>"

    def _repr_html_(self) -> str:
        return rows_as_html(verdict(self.document), self.table())


@dataclass(frozen=True, repr=False, eq=False)
class ImportResult(TypedResult):
    """The answer of ``import_job``: what a job's files say; with a cluster what it costs, and what would be better."""

    document: ImportedJob

    @property
    def job(self) -> PlanRow | None:
        """The job, predicted; None without a cluster."""
        return self.document.job

    @property
    def better(self) -> list[Result]:
        """Answers to the job's question with its plan left open: in the same framework, then in memo."""
        return self.document.better

    @with_names_checked()
    def table(self, of: Literal["plans", "options"] = "plans") -> list[Row]:
        """Return rows for ``pandas.DataFrame``: the job and the plans that are better, or every option of its files.

        Raises:
            UsageError: when ``of`` is another word.
        """
        return job_rows(self.document) if of == "plans" else option_rows(self.document)

    def __str__(self) -> str:
        """Return the summary that ``memo-sim import`` prints."""
        return printable(import_summary(self.document))

    def __repr__(self) -> str:
        names = ", ".join(one_line(name) for name in self.document.files)
        return f"<ImportResult {one_line(self.document.framework)}: {names}>"

    def _repr_html_(self) -> str:
        head = "\n".join(import_head(self.document))
        plans = rows_as_html(head, self.table(), PLANS) if self.job is not None else ""
        return plans + rows_as_html(head if not plans else "options", self.table("options"))


PLANS = ("plan", "status", "system", "layout", "recompute", "alpha", "step_s", "mfu", "tokens_per_device_s")
"""Columns that a notebook shows."""


@dataclass(frozen=True, repr=False, eq=False)
class DoctorResult(TypedResult):
    """The answer of ``doctor``: a recorded step beside its prediction, and a profile with what was measured."""

    made: Diagnosis

    @property
    def document(self) -> RecordedStep:
        """The recorded step.

        Raises:
            UsageError: when no trace was given.
        """
        if self.made.job is None:
            raise UsageError("without a trace there is no recorded step", wanted='doctor(trace="trace.json")')
        return self.made.job

    @property
    def profile(self) -> Hardware:
        """The profile, corrected by what was measured."""
        return self.made.hardware

    @property
    def changes(self) -> list[str]:
        """What was changed in the profile; one sentence each."""
        return self.made.changes

    @property
    def imported(self) -> ImportedJob | None:
        """The job of ``config`` with the measured rates, and what would be better; None without its files."""
        return self.made.imported

    @with_names_checked()
    def export(self, directory: PathLike | None = None) -> ExportResult:
        """Return the best plan of the job's own framework as its files, written into ``directory`` where one is given.

        Raises:
            UsageError: when no job was given, or the folder cannot be written.
            Infeasible: when no plan is faster than the job.
        """
        folder = None if directory is None else Path(directory)
        found = ExportResult(self.made.export(), folder)
        if folder is not None:
            found.save(folder)
        return found

    @with_names_checked()
    def table(self, of: Literal["kinds", "shapes", "memory"] = "kinds") -> list[Row]:
        """Return rows for ``pandas.DataFrame``: seconds by kind of work or by size, or what is alive at the peak.

        Raises:
            UsageError: when ``of`` is another word, or no trace was given.
        """
        job = self.document
        live = job.memory.live if job.memory is not None else []
        parts: dict[str, Sequence[msgspec.Struct]] = {"kinds": job.kinds, "shapes": job.shapes, "memory": live}
        return struct_rows(parts[of])

    @with_names_checked()
    def save(self, path: PathLike) -> None:
        """Write the corrected profile, for ``cluster=``.

        Raises:
            UsageError: when the file cannot be written.
        """
        codec.write(Path(path), self.profile)

    @with_names_checked()
    def save_cluster(self, path: PathLike, *, profile: PathLike) -> None:
        """Write the cluster with the corrected profile, for ``cluster=``; ``profile`` is the file that ``save`` wrote.

        Raises:
            UsageError: when the file cannot be written.
        """
        relative = os.path.relpath(profile, Path(path).parent)
        codec.write(Path(path), self.made.cluster_file(relative))

    def text(self, output: str | None = None, *, everything: bool = False) -> str:
        """Return what ``memo-sim doctor`` prints; ``output`` is the profile's file, where it is written.

        ``everything``: with each option of the job's configuration on a line of its own.
        """
        about = (self.made.job, self.profile.name, self.changes, self.imported)
        return diagnosis_text(*about, output=output, everything=everything)

    def __str__(self) -> str:
        """Return the answer as ``memo-sim doctor`` prints it."""
        return printable(self.text())

    def __repr__(self) -> str:
        about = one_line(self.made.job.trace) if self.made.job else f"{len(self.changes)} measurements"
        return f"<DoctorResult {about} and {one_line(self.profile.name)}>"

    def _repr_html_(self) -> str:
        if self.made.job is None:
            return rows_as_html(self.profile.name, [{"measured": text} for text in self.changes])
        return rows_as_html(recorded_head(self.made.job), self.table(), KINDS)

    def _compared(self) -> object:
        return self.made.job, self.profile, self.changes, self.imported


KINDS = ("kind", "calls", "measured_s", "compared_s", "predicted_s", "not_compared")
"""Columns that a notebook shows."""
