"""Says what a sequence length costs that some layouts do not divide: how many are lost, and what the nearest one gains.

The nearest length that every layout divides (``planning/refusals.py``) is asked about again, with the same batch;
sequences can be padded or cut to it.
"""

from __future__ import annotations

from dataclasses import replace

from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.summary import Assumption
from memo_sim.contract.units import counted, format_percent, format_tokens
from memo_sim.planning.outcome import SearchResult
from memo_sim.planning.question import Question
from memo_sim.planning.refusals import OF_THE_SEQUENCE, tokens_that_divide
from memo_sim.planning.search import search

LEAST_GAIN = 0.005
"""A smaller gain in tokens per GPU and second counts as none: no prediction is more exact."""


def about_length(question: Question, found: SearchResult) -> list[Assumption]:
    """Return what the length of a question with a plan costs.

    Empty where every layout divides it, and where the model has no positions for the nearest length.
    """
    best, whole = found.best, tokens_that_divide(question)
    left = sum(any(where in reason for where in OF_THE_SEQUENCE) for reason in found.refused)
    if best is None or best.prediction.tgs is None or not left or question.seq_tokens % whole == 0:
        return []
    near = max(whole, round(question.seq_tokens / whole) * whole)
    if question.model.learned_positions and near > question.model.max_positions:
        return []
    more = near - question.seq_tokens
    text = f"{question.seq_tokens} tokens do not divide over {counted(left, 'layout')}"
    changed = f"{more} more, as padding" if more > 0 else f"{-more} fewer"
    text += f"; {near} tokens ({format_tokens(near)}: {changed}) divide over all"
    gain = _gain(replace(question, seq_tokens=near), best.prediction.tgs)
    if gain is not None:
        speed = f"{format_percent(gain)} more" if gain > LEAST_GAIN else "no more"
        text += f", with {speed} tokens per GPU and second"
    return [Assumption(name="length", value=text, option=f"--seq-len {near}")]


def _gain(question: Question, tgs: float) -> float | None:
    """Return how much faster the best plan of ``question`` is; None where none fits."""
    try:
        best = search(question).best
    except (Infeasible, UsageError):
        return None
    return None if best is None or best.prediction.tgs is None else best.prediction.tgs / tgs - 1
