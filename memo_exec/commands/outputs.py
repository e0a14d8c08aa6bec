"""The files that a command writes: refused early where they could not be, or would replace what the command reads.

Under torchrun every rank writes its own: trace.json, trace.rank1.json, ...
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from memo_sim.contract.codec import check_distinct, check_not_read, check_writable
from memo_sim.contract.errors import UsageError
from memo_sim.views.pictures import check_kind

if TYPE_CHECKING:
    from memo_sim.contract.trace import Trace


def rank() -> int:
    """Return this process's number among those that torchrun started, 0 when it has started none."""
    number = os.environ.get("RANK", "0")
    return int(number) if number.isascii() and number.isdigit() else 0


def of_rank(path: Path) -> Path:
    """Return where this rank writes: the first as it was told, others with their number before the suffix."""
    return path.with_name(f"{path.stem}.rank{rank()}{path.suffix}") if rank() > 0 else path


def check_outputs(*written: Path | None, read: tuple[Path | None, ...] = (), picture: Path | None = None) -> None:
    """Refuse now what could not be written after minutes of work, or would destroy what is read.

    With a plan its placement and predicted traces are read, with a folder the files in it; None stands for no file.

    Raises:
        UsageError: when a file cannot be written there, is read, or is given twice, or a picture is of no known kind.
    """
    if picture is not None:
        check_kind(picture)
    named = [path for path in (*written, picture) if path is not None]
    for path in named:
        check_writable(path)
    check_not_read(named, [each for path in read if path is not None for each in (path, *_with(path))])
    check_distinct(named)


def _with(path: Path) -> list[Path]:
    """Return the files in a folder, or those beside a plan that go with it."""
    if path.is_dir():
        return list(path.iterdir())
    beside = re.compile(re.escape(path.stem) + r"\.(placement|trace|trace\.stage\d+)\.json")
    return [each for each in path.parent.iterdir() if beside.fullmatch(each.name)] if path.parent.is_dir() else []


def draw_both(traces: list[Trace], path: Path) -> None:
    """Draw a predicted and a measured step on one time axis.

    Raises:
        UsageError: when there is no predicted trace, or the picture cannot be written.
    """
    from memo_sim.views.timeline import draw_comparison

    if len(traces) == 1:
        raise UsageError(
            "there is no predicted timeline to draw",
            where=str(path),
            wanted="the plan's trace beside it",
            hint="make the plan with memo-sim what-if -o, or leave --plot out",
        )
    predicted, measured = traces
    draw_comparison(predicted, measured, path)


def write_perfetto(traces: list[Trace], path: Path) -> None:
    """Write timelines for ui.perfetto.dev."""
    from memo_sim.views.chrome_trace import write_chrome_trace

    write_chrome_trace(traces, path)
