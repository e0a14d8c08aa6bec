"""Shows a memory plan as text: live, reserved and planned bytes, and the classes at the fullest instant."""

from __future__ import annotations

from memo_sim.contract.memory_report import MemoryReport
from memo_sim.contract.plain_text import one_line
from memo_sim.contract.units import counted, format_bytes, format_seconds
from memo_sim.views.plan_table import peak_table
from memo_sim.views.text_table import percent, text_table


def placement_report(report: MemoryReport) -> str:
    """Return the figures of ``report`` as a table, how far they are from optimal, and the fullest instant's classes."""
    blocks = [_figures(report), _verdict(report)]
    if report.live_by_class:
        where = f" ({one_line(report.worst_phase)})" if report.worst_phase else ""
        blocks.append(f"Most bytes live at instant {report.worst_instant}{where}:\n{peak_table(report.live_by_class)}")
    blocks += [f"note: {one_line(note)}" for note in report.notes]
    return "\n\n".join(blocks[:3]) + "".join(f"\n{block}" for block in blocks[3:])


def _figures(report: MemoryReport) -> str:
    live = report.live_bytes
    chosen = "yes" if report.optimal or (_is_bilevel(report.solver) and report.bilevel_proven) else "no"
    rows: list[list[str | None]] = [
        ["live", _size(live), None, None, None, "sum of the buffers at the fullest instant"],
        [
            "caching",
            _size(report.reserved_caching_bytes),
            _above(report.reserved_caching_bytes, live),
            None,
            None,
            _caching(report),
        ],
    ]
    if (eager := report.reserved_eager_bytes) is not None:
        what = "reserved under an eager framework, on the stage with most: the plan's prediction"
        rows.append(["eager", _size(eager), _above(eager, live), None, None, what])
    for other in report.others:
        name = "bi-level" if _is_bilevel(other.solver) else "flat"
        proven = "yes" if other.proven else "no"
        rows.append([name, *_costs(other.peak_bytes, live, other.elapsed_s), proven, _how(other.solver)])
    rows.append(["planned", *_costs(report.peak_bytes, live, report.elapsed_s), chosen, _how(report.solver)])
    return text_table(["memory", "size", "above live", "time", "proven", ""], rows, "lrrrll")


def _costs(peak_bytes: int, live_bytes: int, elapsed_s: float) -> tuple[str | None, str | None, str]:
    return _size(peak_bytes), _above(peak_bytes, live_bytes), format_seconds(elapsed_s)


def _is_bilevel(solver: str) -> bool:
    return solver == "bilevel-mip"


def _how(solver: str) -> str:
    if _is_bilevel(solver):
        return f"every phase placed separately, then phases as blocks, by {solver}"
    return f"one arena, by {solver}"


def _caching(report: MemoryReport) -> str:
    limit = "" if report.capacity_bytes is None else f" of {format_bytes(report.capacity_bytes)}"
    if not report.caching_replayed:
        return "not replayed in time: more --time-limit"
    if report.reserved_caching_bytes is None:
        return f"PyTorch's allocator runs out of memory{limit}"
    count = report.allocation_retries or 0
    retries = f"{count} allocation {'retry' if count == 1 else 'retries'} per iteration"
    return f"reserved by PyTorch's allocator{limit}; {retries}"


def _verdict(report: MemoryReport) -> str:
    buffers = f"{counted(report.buffers, 'buffer')} placed in {format_seconds(report.elapsed_s)}"
    if report.optimal:
        return f"{buffers}: optimal, the arena is equal to the lower bound."
    above = f"{percent(report.gap, digits=2)} above the lower bound {format_bytes(report.lower_bound_bytes)}"
    if _is_bilevel(report.solver) and report.bilevel_proven:
        return f"{buffers}: {above}; no other bi-level plan is smaller."
    return f"{buffers}: {above}, not proven optimal."


def _size(size_bytes: int | None) -> str | None:
    return None if size_bytes is None else format_bytes(size_bytes)


def _above(size_bytes: int | None, live_bytes: int) -> str | None:
    if size_bytes is None or not live_bytes:
        return None
    return percent(size_bytes / live_bytes - 1, signed=True)
