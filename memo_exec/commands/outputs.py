"""Checks a command's output files before it starts: they must be writable and must not replace its input files.

Under torchrun every rank writes its own files: trace.json, trace.rank1.json, ...
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
    """Return this process's rank under torchrun; 0 without torchrun."""
    number = os.environ.get("RANK", "0")
    return int(number) if number.isascii() and number.isdigit() else 0


def of_rank(path: Path) -> Path:
    """Return this rank's output path: ``path`` for rank 0, and with the rank before the suffix for others."""
    return path.with_name(f"{path.stem}.rank{rank()}{path.suffix}") if rank() > 0 else path


def check_outputs(*written: Path | None, read: tuple[Path | None, ...] = (), picture: Path | None = None) -> None:
    """Refuse output files that cannot be written, before minutes of work, or that would replace an input file.

    The input files of a plan include its placement and predicted traces; those of a folder are the files in it. None
    stands for no file.

    Raises:
        UsageError: when an output file cannot be written, is an input file, or is given twice, or a picture has an
            unknown suffix.
    """
    if picture is not None:
        check_kind(picture)
    named = [path for path in (*written, picture) if path is not None]
    for path in named:
        check_writable(path)
    check_not_read(named, [each for path in read if path is not None for each in (path, *_belonging_to(path))])
    check_distinct(named)


def _belonging_to(path: Path) -> list[Path]:
    """Return the files in a folder, or the placement and the traces of a plan in the plan's folder."""
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
            wanted="the predicted trace in the plan's folder",
            hint="make the plan with memo-sim what-if -o, or leave --plot out",
        )
    predicted, measured = traces
    draw_comparison(predicted, measured, path)


def write_perfetto(traces: list[Trace], path: Path) -> None:
    """Write timelines as a Chrome trace, which ui.perfetto.dev can open."""
    from memo_sim.views.chrome_trace import write_chrome_trace

    write_chrome_trace(traces, path, full=True)
