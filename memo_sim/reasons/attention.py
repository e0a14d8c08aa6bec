"""Says which attention kernel a plan assumes, since when there is one, and whether memo-exec runs it."""

from __future__ import annotations

from memo_sim.contract.attention_kernels import ATTENTION_KERNELS
from memo_sim.contract.plan import Decisions
from memo_sim.planning.question import Question


def attention(question: Question, decisions: Decisions) -> list[str]:
    """Return the assumption about attention, and a second sentence when the plan cannot be run."""
    name, year = decisions.kernels.attention, question.hardware.eager_libraries
    kernel = ATTENTION_KERNELS[name]
    own = f"{question.system}'s own, " if name in question.preset.attention else ""
    chosen = "as asked" if question.pins.attention else f"{own}--attention names another"
    pinned = "" if question.pins.libraries else ", the profile's year; --libraries names another"
    lines = [f"The attention kernel is {name}: {kernel.title}; {chosen}. Libraries are those of {year}{pinned}."]
    if not kernel.executed:
        lines.append(f"memo-exec cannot run {name}: this plan is a prediction only.")
    return lines
