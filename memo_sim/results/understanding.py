"""Results about plans that there are: what differs between them, what binds one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec

from memo_sim.contract.difference import Difference
from memo_sim.contract.explanation import Explanation
from memo_sim.contract.named_arguments import with_names_checked
from memo_sim.contract.plain_text import one_line, printable
from memo_sim.views.difference_chart import draw_difference
from memo_sim.views.difference_table import difference_table
from memo_sim.views.explanation_table import explanation_text, explanation_verdict
from memo_sim.views.html_table import rows_as_html
from memo_sim.views.pictures import Picture, picture_in
from memo_sim.views.report.difference import difference_page
from memo_sim.views.report.page import save_page
from memo_sim.views.rows import Row, difference_rows, struct_rows
from memo_sim.views.typed_result import PathLike, TypedResult


@dataclass(frozen=True, repr=False, eq=False)
class CompareResult(TypedResult):
    """The answer of ``compare``: sides are named A, B, ... in their order."""

    document: Difference
    command: str = ""

    @property
    def verdict(self) -> list[str]:
        """One sentence for each side but the first."""
        return self.document.verdict

    @with_names_checked()
    def table(self) -> list[Row]:
        """Return rows for ``pandas.DataFrame``: each part of the step, its seconds on each side and their difference.

        The seconds of a side sum to its step.
        """
        return difference_rows(self.document)

    @with_names_checked()
    def plot(self, path: PathLike | None = None) -> Picture:
        """Draw step and memory side by side, into ``path`` (.png, .svg, .pdf) where one is given.

        Raises:
            UsageError: when the file cannot be written.
            CannotRun: when matplotlib is not installed.
        """
        return picture_in(lambda file: draw_difference(self.document, file), path)

    @with_names_checked()
    def save_report(self, path: PathLike) -> None:
        """Write the answer as one HTML page that opens offline.

        Raises:
            UsageError: when the file cannot be written.
            CannotRun: when a package that draws the page is missing.
        """
        save_page(partial(difference_page, self.document), path, self.command)

    def __str__(self) -> str:
        """Return the table that ``memo-sim compare`` prints."""
        return printable(difference_table(self.document))

    def __repr__(self) -> str:
        return f"<CompareResult: {' | '.join(one_line(side.name) for side in self.document.sides)}>"

    def _repr_html_(self) -> str:
        return rows_as_html("\n".join(self.verdict), self.table())


@dataclass(frozen=True, repr=False, eq=False)
class ExplainResult(TypedResult):
    """The answer of ``explain``: what binds a plan, what would help most, and why each rival loses."""

    document: Explanation

    @property
    def verdict(self) -> list[str]:
        """What binds, what would help most, and a rival that is faster; one sentence each."""
        return explanation_verdict(self.document)

    @with_names_checked()
    def table(self, of: Literal["resources", "rivals", "lanes", "memories"] = "resources") -> list[Row]:
        """Return rows for ``pandas.DataFrame``: the gain of more of each resource, the rivals, lanes or memories.

        Raises:
            UsageError: when ``of`` is another word.
        """
        found = self.document
        parts: dict[str, Sequence[msgspec.Struct]] = {
            "resources": found.sensitivities,
            "rivals": found.rivals,
            "lanes": found.uses,
            "memories": found.rooms,
        }
        return struct_rows(parts[of])

    def __str__(self) -> str:
        """Return the answer as ``memo-sim explain`` prints it."""
        return printable(explanation_text(self.document))

    def __repr__(self) -> str:
        return f"<ExplainResult {one_line(self.document.name)} on {one_line(self.document.cluster)}>"

    def _repr_html_(self) -> str:
        resources = rows_as_html("\n".join(self.verdict), self.table(), RESOURCES)
        return resources + rows_as_html(f"rivals: {self.document.rivals_are}", self.table("rivals"), RIVALS)


RESOURCES = ("resource", "change", "decisions", "status", "step_s", "tgs", "gain", "reason")
RIVALS = ("options", "plan", "status", "step_s", "slower_s", "waits_for", "peak_device_bytes")
"""Columns that a notebook shows."""
