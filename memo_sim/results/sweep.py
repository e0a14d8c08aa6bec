"""The result of a sweep: the answers to many questions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memo_sim.answers import sweep_file
from memo_sim.contract import codec
from memo_sim.contract.errors import UsageError
from memo_sim.contract.named_arguments import with_names_checked
from memo_sim.contract.plain_text import printable
from memo_sim.contract.sweep import SweepLine
from memo_sim.views.html_table import html_table
from memo_sim.views.pictures import Picture, picture_in
from memo_sim.views.rows import Row
from memo_sim.views.sweep_chart import draw_sweep, front
from memo_sim.views.sweep_table import sweep_cells, sweep_csv, sweep_headers, sweep_rows, sweep_table
from memo_sim.views.typed_result import PathLike, TypedResult


@dataclass(frozen=True, repr=False, eq=False)
class SweepResult(TypedResult):
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

    def to_json(self) -> str:
        """Return the documents ``memo.sweep/1``, one a line."""
        return b"".join(map(sweep_file.encoded, self.lines)).decode()

    @with_names_checked()
    def table(self) -> list[Row]:
        """Return rows for ``pandas.DataFrame``: what was asked, and the best plan's figures as in ``WhatIfResult``."""
        return sweep_rows(self.lines)

    @with_names_checked()
    def plot(self, path: PathLike | None = None) -> Picture:
        """Draw length against MFU, speed and memory, into ``path`` (.png, .svg, .pdf) where one is given.

        Raises:
            UsageError: when the file cannot be written.
            CannotRun: when matplotlib is not installed.
        """
        return picture_in(lambda file: draw_sweep(self.lines, file), path)

    @with_names_checked()
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

    def _compared(self) -> object:
        return self.lines

    def __str__(self) -> str:
        """Return the table that ``memo-sim sweep`` prints."""
        return printable(sweep_table(self.lines))

    def __repr__(self) -> str:
        return f"<SweepResult: {len(self.lines)} questions, {len(self.failed)} failed>"

    def _repr_html_(self) -> str:
        return html_table(repr(self)[1:-1], sweep_headers(self.lines), sweep_cells(self.lines))
