"""The folder that results go to, and the list of rows in it, written anew and in one piece with every row."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.gpu.case import Part
from benchmarks.gpu.row import Row
from memo_sim.contract.errors import BadInput, UsageError

VARIABLE = "MEMO_RESULTS"
DEFAULT = "results"


class Results:
    """Rows so far, those of earlier parts in the same folder included."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "tries").mkdir(exist_ok=True)
            (folder / "plans").mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(
                "the results folder cannot be made", where=str(folder), got=error.strerror, hint=f"set {VARIABLE}"
            ) from None
        self.rows = list(self._read())

    def forget(self, parts: list[Part], lengths: tuple[int, ...] | None) -> None:
        """Drop the rows that are about to be measured again: of these parts, and of these lengths (None: of all)."""
        self.rows = [r for r in self.rows if r.part not in parts or (lengths and r.sequence not in lengths)]

    def add(self, row: Row) -> None:
        """Append a row and write the file, so that nothing is lost when the run ends here."""
        self.rows.append(row)
        self.write()

    def replace(self, old: Row, new: Row) -> None:
        """Put ``new`` in the place of ``old``."""
        self.rows[self.rows.index(old)] = new
        self.write()

    def write(self) -> None:
        """Write all rows in one piece."""
        fresh = self.path.with_suffix(".json.new")
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(self.rows), indent=1) + b"\n")
        os.replace(fresh, self.path)

    @property
    def path(self) -> Path:
        """The list of rows."""
        return self.folder / "rows.json"

    @property
    def profile(self) -> Path:
        """The profile that a calibration wrote here."""
        return self.folder / "profile.json"

    @property
    def plans(self) -> Path:
        """Where plans lie."""
        return self.folder / "plans"

    def of(self, part: str) -> Iterator[Row]:
        """Yield the rows of one part."""
        return (row for row in self.rows if row.part == part)

    def _read(self) -> list[Row]:
        if not self.path.is_file():
            return []
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=list[Row])
        except (msgspec.MsgspecError, OSError) as error:
            raise BadInput(
                "the rows of an earlier run cannot be read", where=str(self.path), got=str(error), hint="move it away"
            ) from None


def results_folder() -> Path:
    """Return where results go: what the environment says, else ``results`` here."""
    return Path(os.environ.get(VARIABLE) or DEFAULT)
