"""Places requests with the chosen solver, and checks the placement."""

from __future__ import annotations

import numpy as np

from memo_sim.contract.errors import MemoError, UsageError, did_you_mean
from memo_sim.contract.placement import Placement
from memo_sim.contract.requests import Requests
from memo_sim.memory.portfolio import COUNTED, SOLVERS, Portfolio, installed
from memo_sim.memory.problem import Clock, Ints, Problem, problem_of
from memo_sim.memory.reduction import solve_decomposed
from memo_sim.program.arena.check_placement import check_placement

SOLVER_NAMES = ("portfolio", "bilevel-mip", "mip", "greedy", "cp-sat")


def place(
    requests: Requests, *, solver: str = "portfolio", time_limit_s: float = 60.0, most_nodes: int | None = None
) -> Placement:
    """Return a placement of ``requests``, checked; its ``solver`` says what found it.

    With ``most_nodes`` the portfolio searches at most so many nodes per core and leaves out what only a clock ends:
    equal requests get equal placements on every machine, unless ``time_limit_s`` cuts in.

    A solver that finds nothing better than greedy within ``time_limit_s`` seconds leaves greedy's placement, and
    ``solver`` then says greedy. Raises UsageError for an unknown solver or a time limit that is none, CannotRun when
    the solver's package is missing, and MemoError (a bug) when the checker finds a fault.
    """
    if solver not in SOLVER_NAMES:
        raise UsageError(
            "no such solver", got=solver, wanted=", ".join(SOLVER_NAMES), hint=did_you_mean(solver, SOLVER_NAMES)
        )
    if not time_limit_s > 0:
        raise UsageError("a solver needs time", got=time_limit_s, wanted="seconds above 0")
    clock = Clock(time_limit_s)
    problem = problem_of(requests)
    offsets, found_by = _solve(requests, problem, solver, clock, most_nodes)
    placement = placement_of(requests, problem, offsets, solver=found_by, elapsed_s=clock.elapsed_s)
    faults = check_placement(placement, requests)
    if faults:
        raise MemoError("a solver placed buffers wrongly (a bug)", where=found_by, got="; ".join(faults))
    return placement


def placement_of(requests: Requests, problem: Problem, offsets: Ints, *, solver: str, elapsed_s: float) -> Placement:
    """Return ``offsets`` (units of ``problem``) as a placement in bytes, unchecked."""
    unit = requests.alignment_bytes
    at = (offsets * problem.unit_bytes).tolist()
    ends = (start + -(-size // unit) * unit for start, size in zip(at, requests.size_bytes, strict=True))
    return Placement(
        name=requests.name,
        program_sha256=requests.program_sha256,
        arena_bytes=max(ends, default=0),
        lower_bound_bytes=problem.lower_bound * problem.unit_bytes,
        alignment_bytes=unit,
        solver=solver,
        elapsed_s=elapsed_s,
        ids=requests.ids,
        lower=requests.lower,
        upper=requests.upper,
        size_bytes=requests.size_bytes,
        offset_bytes=at,
        classes=requests.classes,
    )


def _solve(requests: Requests, problem: Problem, solver: str, clock: Clock, most_nodes: int | None) -> tuple[Ints, str]:
    """Return offsets in units and the names of what found them."""
    if solver == "bilevel-mip":
        from memo_sim.memory.bilevel import solve_bilevel

        offsets = solve_bilevel(requests, clock, SOLVERS["mip"]())
        if offsets is not None:
            return offsets, solver
    whole = installed() if most_nodes is None else COUNTED
    techniques = {"portfolio": whole, "greedy": ("greedy",), "bilevel-mip": ("greedy",)}
    portfolio = Portfolio(techniques.get(solver, ("greedy", solver)), most_nodes=most_nodes)
    found = solve_decomposed(problem, clock, None, portfolio)
    if found is None:
        raise MemoError("no technique placed the buffers (a bug)", got=solver)
    return np.asarray(found, dtype=np.int64), "+".join(portfolio.found_by) or "greedy"
