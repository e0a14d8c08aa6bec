"""Writes a measured step beside its prediction as one HTML page, for ``memo-exec run`` and ``compare``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from memo_sim import __version__
from memo_sim.contract import codec
from memo_sim.contract.comparison import Comparison
from memo_sim.contract.plan import Plan
from memo_sim.contract.trace import Trace
from memo_sim.views.report.page import Page, write_page
from memo_sim.views.report.run import run_page, run_title


def write_report(
    comparison: Comparison, traces: Sequence[Trace | None], path: Path, *, plan: Path | None, command: str
) -> None:
    """Write the page (``report_page``).

    Raises:
        UsageError: when the page cannot be written.
        ModuleNotFoundError: when jinja2 is not installed.
    """
    write_page(report_page(comparison, traces, plan=plan, command=command), path)


def report_page(comparison: Comparison, traces: Sequence[Trace | None], *, plan: Path | None, command: str) -> Page:
    """Return the page; ``traces`` are the predicted one, where known, and the measured one.

    ``plan`` is a plan's file, whose model the heading names; None stands for a trace.

    Raises:
        BadInput: when the plan cannot be read.
    """
    title = "Predicted and measured step"
    if plan is not None and codec.schema_of(codec.read_raw(plan), where=str(plan)) == Plan.__struct_config__.tag:
        decisions = codec.read(plan, Plan).decisions
        title = run_title(decisions.model.name, decisions.seq_tokens)
    return run_page(
        comparison,
        [trace for trace in traces if trace is not None],
        title=title,
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
    )
