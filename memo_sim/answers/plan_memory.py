"""Plans memory for requests from a file: makes a placement, reports its figures, and writes both to files."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec

from memo_sim.contract.codec import check_distinct, check_not_read, check_writable, encode, of_file, write_bytes
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.knobs import MemoryPolicy
from memo_sim.contract.memory_report import MemoryReport, OtherPlacement
from memo_sim.contract.placement import Placement
from memo_sim.contract.plain_text import encodable, in_csv
from memo_sim.contract.requests import Requests
from memo_sim.contract.units import counted, format_bytes, format_seconds
from memo_sim.memory.bilevel import BilevelPlan
from memo_sim.memory.place import place, place_bilevel
from memo_sim.memory.problem import Clock
from memo_sim.memory.read_requests import read_requests
from memo_sim.memory.replay import Replay, replay
from memo_sim.memory.request_table import column_name
from memo_sim.memory.source import Source
from memo_sim.program.arena.folded import folded
from memo_sim.views.pictures import FORMATS

TABLE, SNAPSHOTS, DOCUMENTS = (".csv",), (".pickle", ".pkl"), (".json",)
OUTPUTS = (*DOCUMENTS, *TABLE, *SNAPSHOTS)

LEAST_REPLAY_S = 1.0
"""Seconds that the caching allocator's replay gets, even with a shorter time limit."""

BESIDE_S = 5.0
"""The most seconds for what is shown beside the chosen solver's placement; on our programs it takes less than one."""


@dataclass(frozen=True)
class MemoryPlan:
    """The requests of a file, their placement, their replay on the caching allocator, and the report."""

    source: Source
    placement: Placement
    caching: Replay
    report: MemoryReport


def plan_memory(
    path: str,
    *,
    solver: str = "portfolio",
    time_limit_s: float = 60.0,
    device: int | None = None,
    capacity_bytes: int | None = None,
) -> MemoryPlan:
    """Return the placement of the requests in a file, with its figures.

    ``device`` chooses one of a snapshot's, ``capacity_bytes`` limits what the caching allocator may reserve.

    Raises:
        BadInput: when the file holds no requests that can be read.
        UsageError: for an unknown solver, a device that is not there, or a memory policy in place of a file.
        ModuleNotFoundError: when the solver's package is missing.
    """
    _check_names_no_policy(path)
    source = read_requests(path, device=device)
    requests, chosen = source.requests, None
    if solver == "bilevel-mip" and time_limit_s > 0:
        with of_file(path):
            chosen = place_bilevel(requests, Clock(time_limit_s))
        solver = "greedy"  # where no bi-level plan was found in time
    placement = place(requests, solver=solver, time_limit_s=time_limit_s) if chosen is None else chosen[0]
    beside_s = min(BESIDE_S, time_limit_s)
    bilevel, bilevel_notes = (chosen, []) if chosen is not None else _bilevel(requests, beside_s)
    others = []
    if chosen is not None:
        others.append(place(requests, time_limit_s=beside_s))
    elif bilevel is not None:
        others.append(bilevel[0])
    caching = replay(source.requests, capacity_bytes=capacity_bytes, most_s=max(time_limit_s, LEAST_REPLAY_S))
    notes = [*source.notes, *bilevel_notes, *_caching_notes(caching)]
    report = _report(path, source, placement)
    report = msgspec.structs.replace(
        report,
        notes=notes,
        bilevel_peak_bytes=None if bilevel is None else bilevel[0].arena_bytes,
        bilevel_proven=None if bilevel is None else bilevel[1].proven,
        others=[
            OtherPlacement(
                solver=other.solver,
                peak_bytes=other.arena_bytes,
                elapsed_s=other.elapsed_s,
                proven=other.arena_bytes == other.lower_bound_bytes
                or (chosen is None and bilevel is not None and bilevel[1].proven),
            )
            for other in others
        ],
        capacity_bytes=capacity_bytes,
        caching_replayed=not caching.out_of_time,
        reserved_caching_bytes=None if _unknown(caching) else caching.reserved_peak_bytes,
        allocation_retries=None if _unknown(caching) else caching.steady.allocation_retries,
        reserved_eager_bytes=source.reserved_eager_bytes,
    )
    return MemoryPlan(source, placement, caching, report)


def _check_names_no_policy(path: str) -> None:
    if path in get_args(MemoryPolicy) and not Path(path).exists():
        raise UsageError(
            "INPUT is a file, not a memory policy",
            got=path,
            wanted="a plan, requests, a table, a log or a snapshot",
            hint=f"memo-sim what-if MODEL ... --memory-policy {path} -o plan.json, then memo-sim plan-memory plan.json",
        )


def _bilevel(requests: Requests, time_limit_s: float) -> tuple[tuple[Placement, BilevelPlan] | None, list[str]]:
    """Return the bi-level MIP's placement and plan (None: no phases, no solver, or no time), and what to say."""
    if not requests.phases:
        return None, []
    try:
        found = place_bilevel(requests, Clock(time_limit_s))
    except BadInput as error:  # about the phases, which the chosen placement did not need
        return None, [f"no bi-level plan: {error.what} ({error.got})"]
    except ModuleNotFoundError as error:
        return None, [f"no bi-level plan: the package {error.name} is not installed"]
    if found is None:
        within = f"the bi-level MIP found no plan in {format_seconds(time_limit_s)}"
        return None, [f"{within}: --solver bilevel-mip gives it the whole --time-limit"]
    return found, []


def _unknown(caching: Replay) -> bool:
    """Return whether the caching allocator ran out of memory, or its replay out of time."""
    return caching.out_of_memory is not None or caching.out_of_time


def _caching_notes(caching: Replay) -> list[str]:
    """Return a note if the caching allocator runs out of memory."""
    failed = caching.out_of_memory
    if failed is None:
        return []
    asked = f"{failed.buffer} wants {format_bytes(failed.requested_bytes)} at instant {failed.instant}"
    held = f"{format_bytes(failed.allocated_bytes)} of the {format_bytes(failed.reserved_bytes)} reserved are in use"
    return [f"the caching allocator runs out of memory: {asked}, {held}"]


def _report(path: str, source: Source, placement: Placement) -> MemoryReport:
    requests = source.requests
    instant, by_class = worst_instant(requests)
    bound = placement.lower_bound_bytes
    return MemoryReport(
        input=encodable(path, "utf-8"),
        input_kind=source.kind,
        buffers=len(requests.ids),
        alignment_bytes=requests.alignment_bytes,
        live_bytes=sum(by_class.values()),
        worst_instant=instant,
        worst_phase=next((p.name for p in requests.phases if p.lower <= instant < p.upper), ""),
        live_by_class=by_class if requests.classes else {},
        peak_bytes=placement.arena_bytes,
        lower_bound_bytes=bound,
        gap=placement.arena_bytes / bound - 1 if bound else 0.0,
        optimal=placement.arena_bytes == bound,
        solver=placement.solver,
        elapsed_s=placement.elapsed_s,
    )


def worst_instant(requests: Requests) -> tuple[int, dict[str, int]]:
    """Return the first instant at which most bytes live, and how many of each class (one class "" when unknown)."""
    classes = requests.classes or [""] * len(requests.ids)
    changes = sorted(
        [(upper, -size) for upper, size in zip(requests.upper, requests.size_bytes, strict=True)]
        + [(lower, size) for lower, size in zip(requests.lower, requests.size_bytes, strict=True)]
    )
    live = most = 0
    worst = min(requests.lower)
    for instant, change in changes:
        live += change
        if live > most:
            most, worst = live, instant
    by_class: dict[str, int] = {}
    for lower, upper, size, name in zip(requests.lower, requests.upper, requests.size_bytes, classes, strict=True):
        if lower <= worst < upper:
            by_class[name] = by_class.get(name, 0) + size
    return worst, by_class


def check_outputs(output: Path | None, picture: Path | None, *, read: Path) -> None:
    """Refuse early what could not be written, or would replace the file that is ``read``; a table may gain a column.

    Raises:
        UsageError: when a file's kind is unknown, it cannot be written there, is read, or both are one file.
    """
    written = [path for path in (output, picture) if path is not None]
    check_not_read([path for path in written if path.suffix.lower() != ".csv"], (read,))
    for path, kinds in ((output, OUTPUTS), (picture, FORMATS)):
        if path is not None:
            if path.suffix.lower() not in kinds:
                raise UsageError("not a kind of file", got=str(path), wanted=", ".join(kinds))
            check_writable(path)
    check_distinct(written)


def write_files(plan: MemoryPlan, output: Path | None, picture: Path | None) -> None:
    """Write the placement and its picture atomically, the picture first: a drawing that fails leaves nothing behind.

    The placement's suffix decides: ``.json`` is memo.placement/1, ``.csv`` a table, ``.pickle`` for PyTorch's viewer.

    Raises:
        UsageError: when a file's kind is unknown or it cannot be written; what was there stays.
        CannotRun: when a picture is asked for and matplotlib is missing.
    """
    check_outputs(output, picture, read=Path(plan.report.input))
    if picture is not None:
        from memo_sim.views.memory_map import draw_memory_map

        draw_memory_map(
            plan.placement,
            picture,
            title=f"{Path(plan.report.input).name}: {counted(plan.report.buffers, 'buffer')}",
            phases=plan.source.requests.phases,
            reserved=_reserved(plan.caching),
        )
    if output is not None:
        write_bytes(output, _content(plan, output.suffix.lower()))


def _reserved(caching: Replay) -> tuple[list[int], list[int]]:
    """Return the instants and bytes of what is reserved in a steady iteration; nothing when memory runs out."""
    if _unknown(caching):
        return [], []
    if not len(caching.steady.instants):  # everything lives all the time
        return [0], [caching.reserved_peak_bytes]
    return caching.steady.instants.tolist(), caching.steady.reserved_bytes.tolist()


def _content(plan: MemoryPlan, suffix: str) -> bytes:
    if suffix in TABLE:
        return placement_table(plan).encode()
    if suffix in SNAPSHOTS:
        from memo_sim.views.torch_snapshot import torch_snapshot

        return torch_snapshot(plan.placement)
    return encode(folded(plan.placement))


def placement_table(plan: MemoryPlan) -> str:
    """Return a CSV: the input's columns and rows as they were and ``offset``; of other inputs id, life and size.

    An ``offset`` column that the input has already is replaced. A cell that a spreadsheet would compute is quoted
    (``plain_text.in_csv``).
    """
    placement, source = plan.placement, plan.source
    offset_of = dict(zip(placement.ids, placement.offset_bytes, strict=True))
    offsets = [offset_of[name] for name in source.requests.ids]
    header = source.header or ["id", "lower", "upper", "size", *(["class"] if placement.classes else [])]
    rows = source.rows or [list(row) for row in zip(*_columns(source.requests), strict=True)]
    kept = [index for index, name in enumerate(header) if column_name(name) != "offset"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*(in_csv(header[i]) for i in kept), "offset"])
    writer.writerows([*(in_csv(row[i]) for i in kept), offset] for row, offset in zip(rows, offsets, strict=True))
    return text.getvalue()


def _columns(requests: Requests) -> list[list[str]]:
    numbers = [[str(cell) for cell in column] for column in (requests.lower, requests.upper, requests.size_bytes)]
    return [requests.ids, *numbers, *([requests.classes] if requests.classes else [])]
