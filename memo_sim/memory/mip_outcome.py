"""Holds a MIP solver's answer, and checks whether it can be true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memo_sim.memory.problem import Ints, Problem

Backend = Literal["cbc", "highs"]
Form = Literal["paper", "strengthened"]


@dataclass(frozen=True, eq=False)
class MipOutcome:
    """The result of a MIP solve; ``offsets`` is the best placement found, in units, or None."""

    offsets: Ints | None
    bound: int
    """The solver's lower bound on the peak, in units; 0 when it has none."""
    said_optimal: bool
    """Whether the solver ended before its time limit and called its answer optimal."""
    proved: bool
    """Whether the placement, rebuilt in whole numbers, reaches the solver's bound up to its tolerance.

    The tolerance is 1e-6 of the peak. A peak equal to the largest sum of live sizes is optimal without any tolerance.
    Above ``EXACT_UNITS`` only that counts as a proof, because solvers call placements optimal there that are not.
    """
    elapsed_s: float
    models: int = 1
    """The number of MIPs solved; 0 when nothing was left to solve."""
    fault: str = ""
    """A contradiction in the solver's answer: a bug in the solver or in this program."""


def contradiction(problem: Problem, outcome: MipOutcome, known: int | None) -> str:
    """Return what is impossible about ``outcome``; an empty text when nothing is.

    ``known`` is the peak of a placement from another solver, in units.
    """
    peaks = [known] if known is not None else []
    if outcome.offsets is not None:
        peak = problem.peak(outcome.offsets)
        largest_live = int(problem.live.max(initial=0))
        if peak < largest_live:
            return f"a peak of {peak} is below the largest live sum of {largest_live}"
        peaks.append(peak)
    if peaks and outcome.bound > max(min(peaks), problem.enough):
        return f"the solver says that {outcome.bound} is the least, but a placement needs {min(peaks)}"
    return ""
