"""Results about memory: where every buffer lies, and why a run has too little."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from memo_sim.answers import plan_memory as memory_answer
from memo_sim.contract.memory_report import MemoryReport
from memo_sim.contract.named_arguments import with_names_checked
from memo_sim.contract.placement import Placement
from memo_sim.contract.plain_text import one_line, printable
from memo_sim.contract.shortage import Shortage, WayOut
from memo_sim.contract.units import format_bytes
from memo_sim.views.html_table import html_table, rows_as_html
from memo_sim.views.pictures import Picture, picture_in
from memo_sim.views.placement_table import placement_report
from memo_sim.views.report.page import save_page
from memo_sim.views.report.shortage import shortage_page
from memo_sim.views.rows import Row, buffer_rows, class_rows, struct_rows
from memo_sim.views.shortage_table import peak_sizes, peak_title, shortage_text, shortage_verdict
from memo_sim.views.typed_result import PathLike, TypedResult


@dataclass(frozen=True, repr=False, eq=False)
class MemoryResult(TypedResult):
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

    @with_names_checked()
    def table(self) -> list[Row]:
        """Return rows for ``pandas.DataFrame``: every buffer with its class, life, size and address."""
        return buffer_rows(self.made.placement)

    @with_names_checked()
    def plot(self, path: PathLike | None = None) -> Picture:
        """Draw addresses over time, into ``path`` (.png, .svg, .pdf) where one is given.

        Raises:
            UsageError: when the file cannot be written.
            CannotRun: when matplotlib is not installed.
        """
        return picture_in(lambda file: memory_answer.write_files(self.made, None, file), path)

    @with_names_checked()
    def save(self, path: PathLike) -> None:
        """Write the placement: .json, .csv, or .pickle for PyTorch's memory viewer.

        Raises:
            UsageError: when the file cannot be written.
        """
        memory_answer.write_files(self.made, Path(path), None)

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


@dataclass(frozen=True, repr=False, eq=False)
class OomResult(TypedResult):
    """The answer of ``oom``: what fills the memory of a run at its peak, and the single changes that make it fit."""

    document: Shortage
    command: str = ""

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return self.document.fits

    @property
    def ways(self) -> list[WayOut]:
        """The changes that make the run fit, the fastest first: single ones, or pairs where no single one does."""
        return self.document.ways or self.document.pairs

    @with_names_checked()
    def table(self, of: Literal["ways", "classes", "tensors"] = "ways") -> list[Row]:
        """Return rows for ``pandas.DataFrame``: the changes, or what is alive at the peak by class or by tensor.

        Changes that help and still do not fit come last.

        Raises:
            UsageError: when ``of`` is another word.
        """
        if of == "ways":
            return struct_rows([*self.document.ways, *self.document.pairs, *self.document.too_little])
        return class_rows(self.document) if of == "classes" else struct_rows(self.document.tensors)

    @with_names_checked()
    def save_report(self, path: PathLike) -> None:
        """Write the answer as one HTML page that opens offline.

        Raises:
            UsageError: when the file cannot be written.
            CannotRun: when a package that draws the page is missing.
        """
        save_page(partial(shortage_page, self.document), path, self.command)

    def __str__(self) -> str:
        """Return the answer as ``memo-sim oom`` prints it."""
        return printable(shortage_text(self.document))

    def __repr__(self) -> str:
        return f"<OomResult {printable(shortage_verdict(self.document))}>"

    def _repr_html_(self) -> str:
        sizes = [[name, format_bytes(size)] for name, size in peak_sizes(self.document).items()]
        filled = html_table(f"{shortage_verdict(self.document)}\n{peak_title(self.document)}", ["class", "size"], sizes)
        ways = rows_as_html("ways out", self.table(), WAYS) if self.table() else ""
        return filled + ways


WAYS = ("options", "plan", "fits", "step_s", "needed_bytes", "shortfall_bytes")
"""Columns that a notebook shows."""
