"""Finds a paper's figure by name and computes it again with the engine.

Each paper has its own module: ``memo`` (figures and tables), ``sppo`` and ``metp``.
"""

from __future__ import annotations

from collections.abc import Callable

from memo_sim.contract.errors import UsageError, did_you_mean
from memo_sim.contract.figure import Figure
from memo_sim.contract.progress import Progress
from memo_sim.papers import memo, metp, sppo

FIGURES: dict[str, Callable[[Progress], Figure]] = {**memo.FIGURES, **sppo.FIGURES, **metp.FIGURES}


def figure(name: str, *, progress: Progress | None = None) -> Figure:
    """Return the figure called ``name``.

    Raises:
        UsageError: when there is none.
    """
    if name not in FIGURES:
        known = (*FIGURES, *memo.TABLES)
        raise UsageError("no such figure", got=repr(name), wanted=", ".join(known), hint=did_you_mean(name, known))
    return FIGURES[name](progress or (lambda done, total: None))
