"""The results folder and its list of rows; the list is rewritten atomically after every row."""

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
    """All rows in a results folder, including those of earlier runs of the command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "tries").mkdir(exist_ok=True)
            (folder / "plans").mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(
                "the results folder cannot be created",
                where=str(folder),
                got=error.strerror,
                hint=f"set the environment variable {VARIABLE} to a folder that you may write to",
            ) from None
        self.rows = list(self._read())

    def forget(self, parts: list[Part], lengths: tuple[int, ...] | None) -> None:
        """Drop the rows of these parts and lengths, because they are measured again; None means all lengths."""
        self.rows = [r for r in self.rows if r.part not in parts or (lengths and r.sequence not in lengths)]

    def add(self, row: Row) -> None:
        """Append a row and write the file, so that a killed run loses nothing."""
        self.rows.append(row)
        self.write()

    def replace(self, old: Row, new: Row) -> None:
        """Replace ``old`` by ``new`` and write the file."""
        self.rows[self.rows.index(old)] = new
        self.write()

    def write(self) -> None:
        """Write all rows atomically."""
        fresh = self.path.with_suffix(".json.new")
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(self.rows), indent=1) + b"\n")
        os.replace(fresh, self.path)

    @property
    def path(self) -> Path:
        """Path of the list of rows."""
        return self.folder / "rows.json"

    @property
    def profile(self) -> Path:
        """Path of the profile that a calibration writes."""
        return self.folder / "profile.json"

    @property
    def plans(self) -> Path:
        """Path of the folder with the plans."""
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
                "the rows of an earlier run cannot be read",
                where=str(self.path),
                got=str(error),
                hint="move the file away",
            ) from None


def results_folder() -> Path:
    """Return the results folder: the value of the environment variable, else ``results``."""
    return Path(os.environ.get(VARIABLE) or DEFAULT)
