"""Runs placement techniques one after the other, cheapest first, until one reaches the lower bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from memo_sim.memory.greedy import solve_greedy
from memo_sim.memory.problem import Clock, Ints, Problem, Solver


class Portfolio:
    """A solver made of solvers; ``found_by`` says which of them found what was returned last.

    ``most_nodes`` bounds the canonical search of each problem beside the clock.
    """

    def __init__(self, techniques: Sequence[str], *, most_nodes: int | None = None) -> None:
        self.techniques = tuple(techniques)
        self.most_nodes = most_nodes
        self.found_by: dict[str, None] = {}

    def __call__(self, problem: Problem, clock: Clock, incumbent: Ints | None) -> Ints | None:
        """Place the buffers of ``problem``; each technique starts from the best so far, in units."""
        best, finder = incumbent, ""
        for name in self.techniques:
            if best is not None and (problem.peak(best) <= problem.lower_bound or clock.left_s == 0):
                break
            found = self._solver(name)(problem, clock, best)
            if found is not None and (best is None or problem.peak(found) < problem.peak(best)):
                best, finder = found, name
        if finder:
            self.found_by[finder] = None
        return None if best is incumbent else best

    def _solver(self, name: str) -> Solver:
        solver = SOLVERS[name]()
        return partial(solver, most_nodes=self.most_nodes) if name == "canonical" else solver


def _greedy() -> Solver:
    return solve_greedy


def _canonical() -> Solver:
    from memo_sim.memory.canonical import solve_canonical

    return solve_canonical


def _cp_sat() -> Solver:
    from memo_sim.memory.cp_sat import solve_cp_sat

    return solve_cp_sat


def _mip() -> Solver:
    from memo_sim.memory.mip_model import solve_mip

    return solve_mip


SOLVERS: dict[str, Callable[[], Callable[..., Ints | None]]] = {
    "greedy": _greedy,
    "canonical": _canonical,
    "cp-sat": _cp_sat,
    "mip": _mip,
}
"""Techniques by name, cheapest first; each is imported when it is first needed."""
