"""Reads case files: published measurements, one row per case; a cell is blank where the source printed nothing.

A row has three separate parts: labels (case, source, system, note), the question, and the measurements. A prediction
sees only ``Case.question``.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, get_args

import msgspec

from memo_sim.contract.attention_kernels import AttentionName, Libraries
from memo_sim.contract.catalog import DATA
from memo_sim.contract.codec import decode_object, read_raw
from memo_sim.contract.errors import BadInput, UsageError, did_you_mean
from memo_sim.contract.knobs import (
    AdamwKernels,
    Fp8Recipe,
    GradSums,
    Loss,
    MlpRebuild,
    Modules,
    Recompute,
    ReduceDtype,
    RowwiseKernel,
    Schedule,
    Sharding,
    States,
    TpOverlap,
    ZeroParams,
)
from memo_sim.contract.plan import Status
from memo_sim.contract.units import (
    MOST_TOKENS,
    Degree,
    Layers,
    SequenceTokens,
    Width,
    ZeroLevel,
    format_tokens,
    parse_layer_choice,
    parse_numbers,
)
from memo_sim.contract.validation import Expectation

SHIPPED = DATA / "cases"
Parsed_co = TypeVar("Parsed_co", covariant=True)

QUESTION_COLUMNS = [
    *("system", "model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "cluster", "seq_tokens"),
    *("global_batch", "micro_batch", "tp", "sp", "pp", "dp", "cp", "ulysses", "zero", "alpha", "recompute"),
    *("memory_plan", "attention", "schedule", "overlap", "precision"),
]
EXPECTED_COLUMNS = [f"expected_{name}" for name in ("status", "mfu", "tgs", "step_ms", "allocated_gib", "reserved_gib")]
COLUMNS = ["case", "source", *QUESTION_COLUMNS, *EXPECTED_COLUMNS, "note"]
OPTIONAL_COLUMNS = [
    *("virtual_stages", "pp_layers", "uneven_heads", "zero_ranks", "rowwise", "power_w", "cuda_graphs", "libraries"),
    *("loss", "loss_chunk", "mlp_chunk", "mlp_rebuild", "states", "offload_inputs", "max_positions", "tp_overlap"),
    *("recompute_layers", "early_stop", "zero_params", "loss_metrics", "sharding", "reduce_dtype", "adamw"),
    *("grad_sums", "modules", "rounding_buffers", "fp8", "fp8_params", "expected_allocation_retries"),
]
"""Columns that a file may leave out, because few sources report them."""
SIZES = frozenset({"layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "max_positions"})
"""Columns that describe a model by its sizes instead of a preset's name."""

PINNED_COLUMNS = ("tp", "pp", "dp", "cp", "ulysses", "zero", "alpha", "recompute", "attention", "schedule")
PINNED_OPTIONAL_COLUMNS = (
    *("virtual_stages", "pp_layers", "zero_ranks", "rowwise", "libraries", "tp_overlap", "recompute_layers"),
    *("sharding", "reduce_dtype", "adamw"),
)
"""Columns that pin the knob of their name (``contract/knobs.py``); blank leaves it open."""

COLUMN_TEXTS = {
    "case": "name of the row, unique in the file",
    "source": "the table or paper that the row is from",
    "system": "a preset of `memo-sim list systems`: knobs that the row leaves open are searched under its rules",
    "model": "a preset of `memo-sim list models`, or gpt or llama with layers, hidden, heads and vocab",
    "layers": "transformer layers, if the row gives the whole model",
    "hidden": "features of a token",
    "heads": "query heads",
    "kv_heads": "key/value heads; the same as heads when blank",
    "ffn": "features inside the MLP; 4 x hidden when blank",
    "vocab": "rows of the vocabulary",
    "cluster": "a cluster's name or file: a100-8x8-hdr4",
    "seq_tokens": "tokens of one sequence",
    "global_batch": "sequences per step; 1 when blank",
    "micro_batch": "sequences per micro-batch; 1 when blank",
    "tp": "degree of tensor parallelism; searched when blank, as are dp, cp, ulysses and zero",
    "sp": "sequence parallelism together with tensor parallelism",
    "pp": "pipeline stages; when blank, searched if the system searches them, else 1",
    "dp": "degree of data parallelism",
    "cp": "degree of context parallelism",
    "ulysses": "degree of Ulysses",
    "zero": "level of ZeRO",
    "alpha": "fraction of tokens swapped, 0 to 1",
    "recompute": "what backward recomputes",
    "memory_plan": "yes: one planned arena; no: PyTorch's caching allocator under an eager framework",
    "attention": "a generation, flash for the newest that GPU and libraries have, or a kernel; blank: the fastest",
    "schedule": "pipeline schedule; interleaved needs virtual_stages",
    "overlap": "whether collectives of replicas and p2p sends between stages overlap compute; gradients: only the "
    "reductions of gradients do, p2p as the system has it",
    "precision": "dtype of parameters and activations; products of layers are in it too, or in `fp8`",
    "expected_status": "whether the measured run fitted",
    "expected_mfu": "measured MFU, a fraction (MEMO 5.1's convention)",
    "expected_tgs": "measured tokens per GPU per second",
    "expected_step_ms": "measured step time, ms",
    "expected_allocated_gib": "measured peak of allocated device memory, GiB",
    "expected_reserved_gib": "measured peak of reserved device memory, GiB",
    "note": "free text; not read",
    "virtual_stages": "chunks of layers per stage, for the interleaved schedule",
    "pp_layers": "layers of each pipeline stage (of each chunk), joined by commas; nearly equal numbers when blank",
    "uneven_heads": "yes: Ulysses' ranks may have unequal numbers of heads",
    "zero_ranks": "consecutive replicas that ZeRO divides over; all when blank",
    "rowwise": "kernels of row-wise operators, as the framework has them (`--rowwise`); else memo-exec's",
    "power_w": "power limit of a GPU in watts; its board's when blank",
    "libraries": "year of PyTorch, flash-attn and Transformer Engine; the profile's when blank",
    "max_positions": "learned positions of a gpt model that the row describes; rotary ones when blank",
    "loss": "how the loss is computed (`--loss`); auto when blank",
    "loss_chunk": "tokens whose logits exist at once, 0 for all; the system's own when blank",
    "mlp_chunk": "tokens whose MLP exists at once under full recompute, 0 for all; the system's own when blank",
    "mlp_rebuild": "what full recompute repeats of an MLP in row blocks (`--mlp-rebuild`); the system's own when blank",
    "states": "dtype and place of gradients and optimizer states (`--states`); fp32 when blank",
    "offload_inputs": "whether the inputs of full recompute wait in host memory; the system's own when blank",
    "tp_overlap": "whether a layer's products overlap with collectives of tensor parallelism; none when blank",
    "recompute_layers": "layers of full recompute: all (when blank), every-N, first-K or groups-N",
    "early_stop": "whether full recompute leaves out the MLP's second product; the system's own when blank",
    "zero_params": "what ZeRO 3 gathers parameters from (`--zero-params`); the system's own when blank",
    "loss_metrics": "times that the trainer computes cross entropy again as a metric (`--loss-metrics`); 0 when blank",
    "cuda_graphs": "yes: the framework replays its kernels from CUDA graphs, without launches by the host",
    "sharding": "whose ZeRO 2 and 3: memo, fsdp1 or fsdp2 (`--sharding`); the system's own when blank",
    "reduce_dtype": "dtype in which FSDP reduces gradients over ranks (`--reduce-dtype`); auto when blank",
    "grad_sums": "dtype in which gradients are summed (`--grad-sums`); auto when blank",
    "adamw": "AdamW's kernels under eager or compiled row-wise kernels: foreach or fused; the system's own when blank",
    "modules": "whose modules an eager framework trains (`--modules`); the system's own when blank",
    "fp8": "scales of the layers' products in FP8 (`--fp8`); products in `precision` when blank",
    "fp8_params": "yes: the weights of these products are kept in FP8 alone (`--fp8-params`)",
    "rounding_buffers": "whether full recompute is played in the two rounding buffers; the system's own when blank",
    "expected_allocation_retries": "measured allocation retries per micro-batch (MEMO: reorganisations)",
}
"""What each column holds. A blank cell is an open knob or a quantity that was not measured."""

_WORDS = {
    "sp": ("yes", "no"),
    "cuda_graphs": ("yes", "no"),
    "recompute": get_args(Recompute),
    "rowwise": get_args(RowwiseKernel),
    "memory_plan": ("yes", "no"),
    "attention": get_args(AttentionName),
    "libraries": get_args(Libraries),
    "schedule": get_args(Schedule),
    "overlap": ("yes", "no", "gradients"),
    "uneven_heads": ("yes", "no"),
    "precision": ("bf16", "fp16"),
    "expected_status": get_args(Status),
    "loss": get_args(Loss),
    "mlp_rebuild": get_args(MlpRebuild),
    "states": get_args(States),
    "offload_inputs": ("yes", "no"),
    "tp_overlap": get_args(TpOverlap),
    "early_stop": ("yes", "no"),
    "zero_params": get_args(ZeroParams),
    "sharding": get_args(Sharding),
    "reduce_dtype": get_args(ReduceDtype),
    "grad_sums": get_args(GradSums),
    "adamw": get_args(AdamwKernels),
    "modules": get_args(Modules),
    "rounding_buffers": ("yes", "no"),
    "fp8": get_args(Fp8Recipe),
    "fp8_params": ("yes", "no"),
}
_INTEGERS: dict[str, Any] = {
    "layers": Layers,
    **dict.fromkeys(("hidden", "heads", "kv_heads", "ffn", "vocab", "max_positions"), Width),
    "seq_tokens": SequenceTokens,
    **dict.fromkeys(("global_batch", "micro_batch", "tp", "pp", "dp", "cp", "ulysses"), Degree),
    **dict.fromkeys(("virtual_stages", "zero_ranks", "power_w"), Degree),
    "zero": ZeroLevel,
    **dict.fromkeys(("loss_chunk", "mlp_chunk", "loss_metrics"), Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]),
}
"""Columns of whole numbers, and the type with the limits of the same field in a model or a plan."""


LEAST_MEASURED, MOST_MEASURED = 1e-12, 1e12
"""Any other number in a cell is a typo, and its ratio to a prediction could not be told from 0 or infinity."""


@dataclass(frozen=True, slots=True)
class CaseQuestion:
    """The cells that a prediction sees; None where the row leaves a knob open."""

    system: str
    model: str
    cluster: str
    seq_tokens: int
    words: dict[str, str]
    """The columns of words (sp, recompute, attention, loss ...), where given."""
    integers: dict[str, int]
    """Model sizes, batches and layout degrees, where given."""
    alpha: float | None
    pp_layers: tuple[int, ...] | None = None
    recompute_layers: str | None = None

    @property
    def pins(self) -> dict[str, Any]:
        """The knobs that the row pins by name."""
        apart = {name: getattr(self, name) for name in ("alpha", "pp_layers", "recompute_layers")}
        given: dict[str, Any] = {**self.integers, **self.words, **apart}
        return {name: given[name] for name in (*PINNED_COLUMNS, *PINNED_OPTIONAL_COLUMNS) if name in given}

    @property
    def subject(self) -> str:
        """What rows share that differ in their plan alone: model and its modules, machine, length and batch."""
        of_the_model = [f"{name} {self.integers[name]}" for name in sorted(SIZES & set(self.integers))]
        power = [f"{self.integers['power_w']} W"] if "power_w" in self.integers else []
        modules = [f"modules {self.words['modules']}"] if "modules" in self.words else []
        batch = f"{self.integers.get('global_batch', 1)} x {format_tokens(self.seq_tokens)}"
        return ", ".join([self.model, *of_the_model, self.cluster, *power, *modules, batch])


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a case file."""

    case: str
    source: str
    question: CaseQuestion
    expected: Expectation


def row_schema() -> dict[str, Any]:
    """Return the JSON Schema of a case file's row: each column with its description and its allowed words."""
    required = ["case", "source", "system", "model", "cluster", "seq_tokens"]
    columns = {}
    for name, text in COLUMN_TEXTS.items():
        column: dict[str, Any] = {"type": "string", "description": text}
        if name in _WORDS:
            column["enum"] = [*_WORDS[name], ""]
        elif name in _INTEGERS:
            least, most = _bounds(name)
            column |= {"pattern": "^[0-9]*$", "description": f"{text} ({least} to {most})"}
        columns[name] = column
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "a row of a case file (CSV in UTF-8, a header and one row per case)",
        "type": "object",
        "properties": columns,
        "required": [*COLUMNS],
        "x-may-not-be-blank": required,
        "additionalProperties": False,
    }


def load_notes() -> list[tuple[str, str]]:
    """Return the bundled notes on rows that stay wrong: (pattern of case names, text).

    Raises:
        BadInput: when the notes cannot be read.
    """
    path = SHIPPED / "notes.toml"
    notes = decode_object(read_raw(path), where=str(path))["notes"]
    return [(pattern, note["text"]) for note in notes for pattern in note["cases"]]


def list_case_files() -> list[str]:
    """Return the names of the bundled case files."""
    return sorted(p.stem for p in SHIPPED.glob("*.csv"))


def path_of(name_or_path: str) -> Path:
    """Return the path of a bundled case file (by name) or of a CSV file."""
    return SHIPPED / f"{name_or_path}.csv" if name_or_path in list_case_files() else Path(name_or_path)


def load_cases(name_or_path: str) -> list[Case]:
    """Return the cases of a bundled file (by name) or of a CSV file, in the file's order.

    Raises:
        UsageError: when it is neither a bundled name nor a file.
        BadInput: with line and column, when a column is missing or unknown, a cell cannot be read or is out of range,
            or two rows have the same name.
    """
    path = path_of(name_or_path)
    if path.parent != SHIPPED and not path.exists() and "/" not in name_or_path and path.suffix != ".csv":
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
        cases = list(_cases(reader, str(path)))
    except csv.Error as error:
        raise BadInput("not a CSV file", where=f"{path}:{reader.line_num}", got=str(error)) from None
    if not cases:
        raise BadInput("a case file has no rows", where=str(path), wanted="a header and one row per case")
    return cases


def _cases(reader: csv.DictReader[str], path: str) -> Iterator[Case]:
    lines: dict[str, int] = {}
    for row in reader:
        where = f"{path}:{reader.line_num}"
        case = _case(row, where)
        if (line := lines.setdefault(case.case, reader.line_num)) != reader.line_num:
            raise BadInput(
                "two rows have the same name",
                where=f"{where}, column case",
                got=repr(case.case),
                wanted=f"a unique name; line {line} has this one too",
            )
        yield case


def _check_header(header: list[str], where: str) -> None:
    missing = [c for c in COLUMNS if c not in header]
    unknown = [c for c in dict.fromkeys(header) if c not in (*COLUMNS, *OPTIONAL_COLUMNS)]
    twice = [c for c in dict.fromkeys(header) if header.count(c) > 1]
    if missing or unknown or twice:
        found = (("missing", missing), ("unknown", unknown), ("twice", twice))
        got = "; ".join(f"{what} {', '.join(map(str, names))}" for what, names in found if names)
        hint = did_you_mean(str(unknown[0]), [*COLUMNS, *OPTIONAL_COLUMNS]) if unknown else None
        raise BadInput(
            "wrong columns in a case file",
            where=where,
            got=got,
            wanted="the columns that `memo-sim schema cases` describes",
            hint=hint,
        )


def _case(row: dict[str, str], where: str) -> Case:
    if None in row or None in row.values():
        raise BadInput("a row has more or fewer cells than the header", where=where, wanted="one cell for each column")
    cells = {k: v.strip() for k, v in row.items()}
    for required in ("case", "source", "system", "model", "cluster", "seq_tokens"):
        if not cells[required]:
            raise BadInput("a required cell is empty", where=f"{where}, column {required}")
    integers = {c: _whole(cells[c], c, where) for c in _INTEGERS if cells.get(c)}
    asked = (*QUESTION_COLUMNS, *OPTIONAL_COLUMNS)
    words = {c: _word(cells[c], c, where) for c in asked if c in _WORDS and cells.get(c)}
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
        pp_layers=_parsed(parse_numbers, cells, "pp_layers", where, hint="7,8,8,7"),
        recompute_layers=_parsed(parse_layer_choice, cells, "recompute_layers", where, hint="every-2"),
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


def _bounds(column: str) -> tuple[int, int]:
    kind = msgspec.inspect.type_info(_INTEGERS[column])
    assert isinstance(kind, msgspec.inspect.IntType)
    assert kind.ge is not None
    assert kind.le is not None
    return kind.ge, kind.le


def _whole(text: str, column: str, where: str) -> int:
    least, most = _bounds(column)
    digits = text.isascii() and text.isdigit()
    number = text.lstrip("0") or "0"
    # Checked by length first: Python refuses to convert thousands of digits.
    if digits and len(number) <= len(str(most)) and least <= int(number) <= most:
        return int(number)
    raise BadInput(
        "a number is out of range" if digits else "not a whole number",
        where=f"{where}, column {column}",
        got=repr(text),
        wanted=f"an integer from {least} to {most}",
    )


class _Parse(Protocol[Parsed_co]):
    """Reads the text of an option; the message of its error names the option."""

    def __call__(self, text: str, *, option: str) -> Parsed_co:
        """Return the value."""


def _parsed(parse: _Parse[Parsed_co], cells: dict[str, str], column: str, where: str, *, hint: str) -> Parsed_co | None:
    """Return the value of a cell that is written like an option; None for a blank cell."""
    text = cells.get(column, "")
    try:
        return parse(text, option=column) if text else None
    except UsageError as error:
        raise BadInput(
            error.what, where=f"{where}, column {column}", got=error.got, wanted=error.wanted, hint=hint
        ) from None


def _number(text: str, where: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != 0 and not LEAST_MEASURED <= value <= MOST_MEASURED:
        wanted = f"0, or a number from {LEAST_MEASURED:g} to {MOST_MEASURED:g}"
        raise BadInput("not a number", where=where, got=repr(text), wanted=wanted)
    return value


def _word(text: str, column: str, where: str) -> str:
    if text not in _WORDS[column]:
        raise BadInput(
            "not a known word", where=f"{where}, column {column}", got=repr(text), wanted=", ".join(_WORDS[column])
        )
    return text
