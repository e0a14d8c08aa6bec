"""What a MIP solver answered, and whether it may be believed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memo_sim.memory.problem import Ints, Problem

Backend = Literal["cbc", "highs"]
Form = Literal["paper", "strengthened"]


@dataclass(frozen=True, eq=False)
class MipOutcome:
    """The best placement that the solver found, in units, None when it found none in time."""

    offsets: Ints | None
    bound: int
    """No placement needs less, says the solver; in units. 0 when it does not know."""
    said_optimal: bool
    """The solver ended by itself and called its answer optimal."""
    proved: bool
    """The placement, rebuilt in whole numbers, needs no more than the solver's bound, up to the solver's tolerance.

    The tolerance is 1e-6 of the peak. Where the peak is the largest live sum, it is optimal beyond any tolerance; in
    numbers above ``EXACT_UNITS`` nothing else is a proof, because there solvers call optimal what is not.
    """
    elapsed_s: float
    models: int = 1
    """How many MIPs were solved; 0 when nothing was left to solve."""
    fault: str = ""
    """What contradicts the solver: a bug of it (or of this program), never an answer."""


def contradiction(problem: Problem, outcome: MipOutcome, known: int | None) -> str:
    """Return what is impossible about ``outcome``, empty when nothing is.

    ``known`` is the peak of a placement that someone else made, in units.
    """
    peaks = [known] if known is not None else []
    if outcome.offsets is not None:
        peak = problem.peak(outcome.offsets)
        largest_live = int(problem.live.max(initial=0))
        if peak < largest_live:
            return f"a peak of {peak} is below the largest live sum of {largest_live}"
        peaks.append(peak)
    if peaks and outcome.bound > max(min(peaks), problem.enough):
        return f"nothing needs less than {outcome.bound}, says the solver, but a placement needs {min(peaks)}"
    return ""
