"""The result of ``validate``: predictions of published cases beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from memo_sim.contract.named_arguments import with_names_checked
from memo_sim.contract.plain_text import printable
from memo_sim.contract.units import counted
from memo_sim.contract.validation import Validation
from memo_sim.validation.accepted import accuracy_of
from memo_sim.validation.cases import load_notes
from memo_sim.validation.intervals import held_out, shipped_errors
from memo_sim.views.html_table import rows_as_html
from memo_sim.views.report.page import save_page
from memo_sim.views.report.validation import validation_page
from memo_sim.views.rows import Row, case_rows
from memo_sim.views.typed_result import PathLike, TypedResult
from memo_sim.views.validation_table import validation_table

SHOWN = ("case", "system", "status", "measured_status", "mfu", "measured_mfu", "error_mfu")


@dataclass(frozen=True, repr=False, eq=False)
class ValidationResult(TypedResult):
    """The answer of ``validate``: one report a case, in the order of the file."""

    document: Validation
    command: str = ""

    @with_names_checked()
    def table(self) -> list[Row]:
        """Return rows for ``pandas.DataFrame``: predictions, measurements, ``predicted / measured - 1``."""
        return case_rows(self.document)

    @with_names_checked()
    def save_report(self, path: PathLike) -> None:
        """Write accuracy, worst and all cases as one HTML page that opens offline.

        Raises:
            UsageError: when the file cannot be written.
            CannotRun: when a package that draws the page is missing.
        """
        tested = held_out(self.document, shipped_errors())
        page = partial(validation_page, self.document, accuracy_of(self.document).groups, tested, load_notes())
        save_page(page, path, self.command)

    def __str__(self) -> str:
        """Return the cases as ``memo-sim validate`` prints them."""
        tokens = [case.seq_tokens for case in self.document.cases]
        tested = held_out(self.document, shipped_errors())
        return printable(validation_table(self.document, seq_tokens=tokens, held_out=tested))

    def __repr__(self) -> str:
        return f"<ValidationResult: {counted(len(self.document.cases), 'case')}>"

    def _repr_html_(self) -> str:
        return rows_as_html(repr(self).strip("<>"), self.table(), SHOWN)
