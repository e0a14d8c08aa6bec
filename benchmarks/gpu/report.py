"""Writes the rows as a Markdown report: the command, the machine, the results, and the reason for each missing one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.gpu.picture import draw
from benchmarks.gpu.results import Results
from benchmarks.gpu.row import Row
from memo_sim.contract.errors import missing_package
from memo_sim.contract.units import GIB, format_tokens

SHOWN_CHARACTERS = 110
LOWEST_FILLED = 0.005
"""Smallest share of a step for the table of instruction kinds; the rows contain the smaller ones too."""


def write_report(results: Results, command: str, tell: Callable[[str], None], *, quick: bool) -> None:
    """Write ``report.md`` and draw ``report.png`` beside the rows."""
    picture = results.folder / "report.png"
    try:
        draw(results.rows, picture)
        shown = f"![Rivals, and predicted over measured]({picture.name})"
    except ModuleNotFoundError as error:
        absent = missing_package(error)
        if absent is None:
            raise
        shown = f"There is no picture, because {absent.got} is not installed on this machine."
    path = results.folder / "report.md"
    path.write_text("\n\n".join([*_head(results, command, quick=quick), shown, *_parts(results)]) + "\n")
    tell(f"{len(results.rows)} rows in {results.path}, tables in {path}")


def _head(results: Results, command: str, *, quick: bool) -> list[str]:
    known = next((row for row in results.rows if row.device), None)
    versions = ", ".join(f"{name} {version}" for name, version in known.versions.items()) if known else "unknown"
    last = max((row.created for row in results.rows), default="")
    device = known.device if known else "unknown"
    warning = ["**Tiny shapes: this run only tests the script; its figures say nothing about memo's speed.**"]
    return [
        f"# memo on {device}",
        f"`{command}`, {last}. {versions}.",
        *(warning if quick else []),
        (
            "MFU follows MEMO 5.1 (causal mask counted, one embedding), relative to the datasheet's dense bf16 peak. "
            "Ratios are predicted / measured. Device memory is the peak of bytes allocated by torch; rivals have no "
            "figure on a CPU. A step is timed by the wall clock, from its batch to the end of its update. Spread is "
            "(slowest - fastest) / median."
        ),
    ]


def _parts(results: Results) -> list[str]:
    found = []
    for title, part, table in (
        ("Checks", "checks", _checks),
        ("Calibration", "calibrate", _checks),
        ("Measured against predicted", "suite", _suite),
        ("Side by side", "rivals", _rivals),
        ("Longest sequence", "longest", _longest),
    ):
        rows = list(results.of(part))
        if rows:
            found += [f"## {title}", *table(rows)]
    return found


def _checks(rows: list[Row]) -> list[str]:
    lines = [
        (r.rival, r.model, r.status, _percent(r.loss_error, 4), _percent(r.grad_norm_error, 4), _short(r.message))
        for r in rows
    ]
    return [_table(("check", "model", "status", "loss difference", "gradient norm difference", "message"), lines)]


def _suite(rows: list[Row]) -> list[str]:
    head = ("model", "tokens", "policy", "alpha", "status", "step", "MFU", "predicted MFU", "step ratio", "peak ratio")
    lines = [
        (
            *(r.model, format_tokens(r.sequence), r.policy, _number(r.alpha, 3), r.status),
            *(_number(r.median_step_s, 3), _percent(r.mfu), _percent(r.predicted_mfu)),
            *(_ratio(r, "step_s"), _peak_ratio(r)),
            *(_lane(r, "d2h"), _lane(r, "h2d"), _number(r.stalls_s, 3), _number(r.predicted_stalls_s, 3)),
            *(_gib(r.peak_device_bytes), _gib(r.host_bytes), _gib(r.predicted_host_bytes)),
            _short(r.message),
        )
        for r in rows
    ]
    more = ("d2h ratio", "h2d ratio", "stalls s", "predicted", "device GiB", "host GiB", "predicted", "message")
    return [_table((*head, *more), lines), *_kinds(rows)]


def _kinds(rows: list[Row]) -> list[str]:
    """Return the ratios by kind of instruction: smallest, median and largest over the points."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row.comparison is None or row.comparison.ratio is None:
            continue
        measured = row.comparison.measured
        for kind, ratio in row.comparison.ratio.ops.items():
            if measured.ops[kind] >= LOWEST_FILLED * measured.step_s:
                ratios.setdefault(kind, []).append(ratio)
    lines = [
        (kind, str(len(found)), *(f"{value:.3f}" for value in (min(found), sorted(found)[len(found) // 2], max(found))))
        for kind, found in sorted(ratios.items())
    ]
    return [_table(("kind of instruction", "points", "smallest ratio", "median", "largest"), lines)] if lines else []


def _rivals(rows: list[Row]) -> list[str]:
    head = ("model", "tokens", "system", "status", "step", "spread", "tokens/s", "MFU", "device GiB", "reserved")
    lines = [
        (
            *(r.model, format_tokens(r.sequence), r.rival, r.status, _number(r.median_step_s, 3), _percent(r.spread)),
            *(_number(r.tokens_per_s, 0), _percent(r.mfu), _gib(r.peak_device_bytes), _gib(r.peak_reserved_bytes)),
            *(_gib(r.host_bytes), _number(r.alpha, 3), r.backend, _agreement(r), _short(r.message)),
        )
        for r in rows
    ]
    return [_table((*head, "host GiB", "alpha", "attention", "same losses", "message"), lines), *_verdicts(rows)]


def _verdicts(rows: list[Row]) -> list[str]:
    """Return, for each length, memo's speed / the best rival's speed and memo's MFU / the ideal's MFU."""
    lines = []
    for tokens in sorted({row.sequence for row in rows}):
        ran = {row.rival: row for row in rows if row.sequence == tokens and row.status == "ok"}
        ours = ran.get("memo, planned alpha")
        if ours is None or ours.tokens_per_s is None:
            lines.append((format_tokens(tokens), "memo did not run", "-", "-"))
            continue
        theirs = [row for name, row in ran.items() if not name.startswith("memo") and row.tokens_per_s]
        best = max(theirs, key=lambda row: row.tokens_per_s or 0.0, default=None)
        over = f"{ours.tokens_per_s / best.tokens_per_s:.3f}" if best is not None and best.tokens_per_s else "-"
        ideal = ran.get("memo, ideal")
        share = f"{ours.mfu / ideal.mfu:.3f}" if ideal is not None and ideal.mfu and ours.mfu else "-"
        lines.append((format_tokens(tokens), best.rival if best else "no rival ran", over, share))
    return [_table(("tokens", "best rival that fits", "memo / best rival", "memo MFU / ideal MFU"), lines)]


def _longest(rows: list[Row]) -> list[str]:
    lines = [
        (
            *(r.rival, r.model, format_tokens(r.sequence) if r.status == "ok" else r.status),
            format_tokens(r.fails_at) if r.fails_at else "-",
            *("yes" if r.complete else "no", _gib(r.peak_device_bytes), _gib(r.host_bytes), _short(r.message)),
        )
        for r in rows
    ]
    head = ("system", "model", "longest that ran", "shortest that failed", "search complete")
    return [_table((*head, "device GiB", "host GiB", "message"), lines)]


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    titles = list(head)
    rows = [titles, ["---"] * len(titles), *(list(line) for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _ratio(row: Row, field: str) -> str:
    ratio: Any = row.comparison.ratio if row.comparison else None
    return "-" if ratio is None else f"{getattr(ratio, field):.3f}"


def _peak_ratio(row: Row) -> str:
    """Return predicted / measured device peak; measured by torch's allocator, because an arena's size is no peak."""
    if not row.predicted_device_bytes or not row.peak_device_bytes:
        return "-"
    return f"{row.predicted_device_bytes / row.peak_device_bytes:.3f}"


def _lane(row: Row, lane: str) -> str:
    ratio = row.comparison.ratio if row.comparison else None
    return "-" if ratio is None or lane not in ratio.lanes else f"{ratio.lanes[lane]:.3f}"


def _agreement(row: Row) -> str:
    return {True: "yes", False: "NO", None: "-"}[row.agrees]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / GIB:.2f}"


def _short(message: str) -> str:
    text = " ".join(message.split()).replace("|", "/")
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
