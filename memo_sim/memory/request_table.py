"""Reads requests from a CSV file with the columns ``id,lower,upper,size``, in any order and case, and any others.

    id,lower,upper,size
    qkv,0,3,1048576

A buffer lives in [lower, upper). Sizes and instants may have any unit. This is the format of google/minimalloc. Its
``alignment`` column is used; its ``gaps``, ``hint`` and fixed ``offset`` columns are ignored, and a note says so.
"""

from __future__ import annotations

import csv
import io
import math

from memo_sim.contract.errors import BadInput, did_you_mean
from memo_sim.contract.requests import Requests
from memo_sim.contract.units import MOST_BYTES
from memo_sim.memory.source import Source

COLUMNS = ("id", "lower", "upper", "size")
ALIGNMENT = "alignment"
NOT_OBEYED = ("gaps", "hint", "offset")
MOST_DIGITS = 18


def is_request_table(text: str) -> bool:
    """Return whether the first line that is not empty looks like a table's header."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    cells = {column_name(cell).strip('"') for cell in first.split(",")}  # quotes do not change a cell
    return len(cells) > 1 and bool(cells & set(COLUMNS))


def column_name(cell: str) -> str:
    """Return the normalised column name of a header cell."""
    return cell.strip().lower()


def read_request_table(text: str, where: str) -> Source:
    """Return the requests in a CSV, in the order of its rows, with the rows themselves.

    Raises:
        BadInput: with file and line, when a column is missing, a cell is not a whole number, a row is shorter or longer
            than the header, a buffer never lives, or an id is missing or used twice.
    """
    lines = _rows(text, where)
    if not lines:
        raise BadInput("the table is empty", where=where, wanted=f"a header {','.join(COLUMNS)} and rows")
    line, header = lines[0]
    at = _columns(header, f"{where}: line {line}")
    ids: list[str] = []
    lower, upper, size, alignment = [], [], [], 1
    first_line: dict[str, int] = {}
    for line, row in lines[1:]:
        here = f"{where}: line {line}"
        if len(row) != len(header):
            raise BadInput("a row of another length", where=here, got=f"{len(row)} cells", wanted=f"{len(header)}")
        name = row[at["id"]].strip()
        if not name:
            raise BadInput("a buffer without an id", where=here)
        if name in first_line:
            raise BadInput("an id is used twice", where=here, got=name, hint=f"line {first_line[name]} has it too")
        first_line[name] = line
        born, dead = (_number(row[at[c]], c, here) for c in ("lower", "upper"))
        if born >= dead:
            raise BadInput("a buffer never lives", where=here, got=f"[{born}, {dead})", wanted="lower < upper")
        ids.append(name)
        lower.append(born)
        upper.append(dead)
        size.append(_number(row[at["size"]], "size", here))
        if ALIGNMENT in at and row[at[ALIGNMENT]].strip():
            alignment = math.lcm(alignment, max(1, _number(row[at[ALIGNMENT]], ALIGNMENT, here)))
            if alignment >= MOST_BYTES:
                raise BadInput(
                    "the alignments have no common multiple that can be used",
                    where=f"{here}, column {ALIGNMENT}",
                    got=row[at[ALIGNMENT]].strip(),
                    wanted="alignments that divide each other, such as powers of two",
                )
    requests = Requests(ids=ids, lower=lower, upper=upper, size_bytes=size, alignment_bytes=alignment)
    return Source(requests, "csv", _notes(at, requests), header, [row for _, row in lines[1:]])


def _rows(text: str, where: str) -> list[tuple[int, list[str]]]:
    """Return (line, cells) of every line that is not empty."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        return [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise BadInput("not a CSV table", where=f"{where}: line {reader.line_num}", got=str(error)) from None


def _columns(header: list[str], here: str) -> dict[str, int]:
    """Return the index of every column by its name."""
    names = [column_name(cell) for cell in header]
    for column in COLUMNS:
        if column not in names:
            raise BadInput(
                "a column is missing",
                where=here,
                got=", ".join(names),
                wanted=", ".join(COLUMNS),
                hint=did_you_mean(column, names) or f"add a column {column!r}",
            )
    for name in (*COLUMNS, ALIGNMENT):
        if names.count(name) > 1:
            raise BadInput("a column occurs twice", where=here, got=name)
    return {name: index for index, name in enumerate(names)}


def _number(cell: str, column: str, here: str) -> int:
    """Return the whole number in a cell, at least 0."""
    digits = cell.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MOST_DIGITS):
        wanted = f"a whole number from 0, at most {MOST_DIGITS} digits"
        raise BadInput("not a number", where=f"{here}, column {column}", got=repr(cell), wanted=wanted)
    return int(digits)


def _notes(at: dict[str, int], requests: Requests) -> list[str]:
    notes = [f"column {name!r} is kept in the output, but ignored" for name in NOT_OBEYED if name in at]
    if requests.alignment_bytes > 1:
        notes.append(
            f"every offset is a multiple of {requests.alignment_bytes}, the least common multiple of all alignments"
        )
    return notes
