"""The cores that a reduction leaves, which tests count."""

from memo_sim.memory.problem import Problem
from memo_sim.memory.reduction import reduced


def cores_of(problem: Problem, *, bounded: bool = True) -> list[Problem]:
    """Return what is left to solve of ``problem``; an empty list means that the reduction alone proves the optimum."""
    return [part.core for part in reduced(problem, bounded=bounded).parts]
