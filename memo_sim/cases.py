"""Case files: published measurements, one row a case, blank cells where the source printed nothing.

A row has three parts that never mix: labels (case, source, system, note), the question, and what was measured.
``Case.question`` is all that a prediction is made from.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from memo_sim.contract.catalog import DATA
from memo_sim.contract.codec import read_raw
from memo_sim.contract.errors import BadInput, UsageError, did_you_mean
from memo_sim.contract.plan import Status
from memo_sim.contract.validation import Expectation

SHIPPED = DATA / "cases"

QUESTION_COLUMNS = [
    *("system", "model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "cluster", "seq_tokens"),
    *("global_batch", "micro_batch", "tp", "sp", "pp", "dp", "cp", "ulysses", "zero", "alpha", "recompute"),
    *("memory_plan", "attention", "schedule", "overlap", "precision"),
]
EXPECTED_COLUMNS = [f"expected_{name}" for name in ("status", "mfu", "tgs", "step_ms", "allocated_gib", "reserved_gib")]
COLUMNS = ["case", "source", *QUESTION_COLUMNS, *EXPECTED_COLUMNS, "note"]
OPTIONAL_COLUMNS = ["virtual_stages", "expected_reorganisations"]
"""Columns that few sources have a figure for, and a file may leave out."""
SIZES = frozenset({"layers", "hidden", "heads", "kv_heads", "ffn", "vocab"})
"""What gives a model by its sizes instead of a name."""

_WORDS = {
    "sp": ("yes", "no"),
    "recompute": ("none", "full", "selective", "tokenwise"),
    "memory_plan": ("yes", "no"),
    "attention": ("flash", "plain"),
    "schedule": ("gpipe", "1f1b", "interleaved", "zero-bubble"),
    "overlap": ("yes", "no"),
    "precision": ("bf16", "fp16"),
    "expected_status": ("ok", "gpu_oom", "host_oom", "invalid"),
}
_INTEGERS = {
    *("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_tokens", "global_batch", "micro_batch"),
    *("tp", "pp", "dp", "cp", "ulysses", "virtual_stages"),
}


@dataclass(frozen=True, slots=True)
class CaseQuestion:
    """The cells a prediction is made from; None where the row leaves a knob open."""

    system: str
    model: str
    cluster: str
    seq_tokens: int
    words: dict[str, str]
    """sp, recompute, memory_plan, attention, schedule, overlap, precision, where given."""
    integers: dict[str, int]
    """Model sizes, batches and layout degrees, where given."""
    alpha: float | None


@dataclass(frozen=True, slots=True)
class Case:
    """One row."""

    case: str
    source: str
    question: CaseQuestion
    expected: Expectation


def list_case_files() -> list[str]:
    """Return the names of the bundled case files."""
    return sorted(p.stem for p in SHIPPED.glob("*.csv"))


def load_cases(name_or_path: str) -> list[Case]:
    """Return the cases of a bundled file (by name) or of a CSV file, in the file's order.

    Raises:
        UsageError: when it is neither a bundled name nor a file.
        BadInput: when a column is missing or unknown, or a cell cannot be read (with its line and column).
    """
    shipped = SHIPPED / f"{name_or_path}.csv"
    path = shipped if name_or_path in list_case_files() else Path(name_or_path)
    if path is not shipped and not path.exists() and "/" not in name_or_path and path.suffix != ".csv":
        names = list_case_files()
        raise UsageError(
            "unknown case file", got=repr(name_or_path), wanted=", ".join(names), hint=did_you_mean(name_or_path, names)
        )
    try:
        text = read_raw(str(path)).decode("utf-8")
    except UnicodeDecodeError:
        raise BadInput("not a text file", where=str(path), wanted="CSV in UTF-8") from None
    reader = csv.DictReader(io.StringIO(text), strict=True)
    try:
        header = list(reader.fieldnames or [])
        _check_header(header, str(path))
        cases = [_case(row, f"{path}:{reader.line_num}") for row in reader]
    except csv.Error as error:
        raise BadInput("not a CSV file", where=f"{path}:{reader.line_num}", got=str(error)) from None
    if not cases:
        raise BadInput("a case file without a row", where=str(path), wanted="a header and one row a case")
    return cases


def _check_header(header: list[str], where: str) -> None:
    missing = [c for c in COLUMNS if c not in header]
    unknown = [c for c in header if c not in (*COLUMNS, *OPTIONAL_COLUMNS)]
    if missing or unknown or len(set(header)) != len(header):
        got = f"missing {', '.join(missing) or 'none'}; unknown {', '.join(map(str, unknown)) or 'none'}"
        raise BadInput("not the columns of a case file", where=where, got=got, wanted=",".join(COLUMNS))


def _case(row: dict[str, str], where: str) -> Case:
    if None in row or None in row.values():
        raise BadInput("a row has more or fewer cells than the header", where=where, wanted="one cell for each column")
    cells = {k: v.strip() for k, v in row.items()}
    for required in ("case", "source", "system", "model", "cluster", "seq_tokens"):
        if not cells[required]:
            raise BadInput("an empty cell that must be given", where=f"{where}, column {required}")
    integers = {c: _whole(cells[c], f"{where}, column {c}") for c in _INTEGERS if cells.get(c)}
    if cells["zero"]:
        integers["zero"] = _whole(cells["zero"], f"{where}, column zero", least=0)
    words = {c: _word(cells[c], c, where) for c in QUESTION_COLUMNS if c in _WORDS and cells[c]}
    alpha = _number(cells["alpha"], f"{where}, column alpha")
    if alpha is not None and not 0 <= alpha <= 1:
        raise BadInput("alpha is a fraction", where=f"{where}, column alpha", got=alpha, wanted="0 to 1")
    question = CaseQuestion(
        system=cells["system"],
        model=cells["model"],
        cluster=cells["cluster"],
        seq_tokens=integers.pop("seq_tokens"),
        words=words,
        integers=integers,
        alpha=alpha,
    )
    return Case(cells["case"], cells["source"], question, _expectation(cells, where))


def _expectation(cells: dict[str, str], where: str) -> Expectation:
    status: Status | None = None
    if cells["expected_status"]:
        status = _word(cells["expected_status"], "expected_status", where)  # type: ignore[assignment]
    numbers = {
        c.removeprefix("expected_"): _number(cells[c], f"{where}, column {c}")
        for c in (*EXPECTED_COLUMNS, *OPTIONAL_COLUMNS)
        if c.startswith("expected_") and c != "expected_status" and c in cells
    }
    if (mfu := numbers["mfu"]) is not None and mfu > 1:
        raise BadInput("MFU is a fraction", where=f"{where}, column expected_mfu", got=mfu, wanted="0 to 1")
    return Expectation(status=status, **numbers)


def _whole(text: str, where: str, *, least: int = 1) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise BadInput("not a whole number", where=where, got=repr(text), wanted=f"an integer of at least {least}")
    return value


def _number(text: str, where: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value < float("inf"):
        raise BadInput("not a number", where=where, got=repr(text), wanted="a finite number, not negative")
    return value


def _word(text: str, column: str, where: str) -> str:
    if text not in _WORDS[column]:
        raise BadInput(
            "not a known word", where=f"{where}, column {column}", got=repr(text), wanted=", ".join(_WORDS[column])
        )
    return text
