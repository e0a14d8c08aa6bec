"""SPPO's own words for which stages may share a task: phases (Definition 6.1) and their scopes (6.2), as an oracle."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Of a stage's forward; backward goes through them in reverse."""

    LEFT = "left"
    STEADY = "steady"
    RIGHT = "right"


def identifiers(stages: int, subsequences: int, stage: int) -> dict[Phase, range]:
    """Return the subsequences of each phase of a stage (Definition 6.1).

    Left and Steady end before the bounds that the paper prints as inclusive: otherwise they would overlap, and Table 3
    has them apart.
    """
    left, right = stages - 1 - stage, subsequences - stage
    return {Phase.LEFT: range(left), Phase.STEADY: range(left, right), Phase.RIGHT: range(right, subsequences)}


def scope(stages: int, stage: int, phase: Phase) -> range:
    """Return the stages among which a phase's tasks of a stage may be divided; none where it has none (6.2)."""
    match phase:
        case Phase.LEFT:
            return range(stage, stages) if stage < stages - 1 else range(0)
        case Phase.STEADY:
            return range(stages)
        case Phase.RIGHT:
            return range(stage + 1) if stage else range(0)
