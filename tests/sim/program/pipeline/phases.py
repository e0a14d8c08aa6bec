"""SPPO's definition of the stages that may share a task: phases (Definition 6.1) and their scopes (6.2).

Tests compare the tasks of ``layout/multiplex.py`` with it.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Phases of a stage's forward; backward goes through them in reverse order."""

    LEFT = "left"
    STEADY = "steady"
    RIGHT = "right"


def identifiers(stages: int, subsequences: int, stage: int) -> dict[Phase, range]:
    """Return the subsequences of each phase of a stage (Definition 6.1).

    The paper prints the upper bounds of Left and Steady as inclusive. Here they are exclusive, because phases do not
    overlap in Table 3.
    """
    left, right = stages - 1 - stage, subsequences - stage
    return {Phase.LEFT: range(left), Phase.STEADY: range(left, right), Phase.RIGHT: range(right, subsequences)}


def scope(stages: int, stage: int, phase: Phase) -> range:
    """Return the stages that may share a stage's tasks of a phase; empty when the phase has no tasks (6.2)."""
    match phase:
        case Phase.LEFT:
            return range(stage, stages) if stage < stages - 1 else range(0)
        case Phase.STEADY:
            return range(stages)
        case Phase.RIGHT:
            return range(stage + 1) if stage else range(0)
