"""Places requests with the chosen solver, and checks the placement."""

from __future__ import annotations

from dataclasses import replace

from memo_sim.contract.errors import MemoError, UsageError, did_you_mean
from memo_sim.contract.placement import Placement
from memo_sim.contract.requests import Requests
from memo_sim.memory.bilevel import BilevelPlan, plan_bilevel
from memo_sim.memory.greedy import by_birth, order_of
from memo_sim.memory.portfolio import SOLVERS, Portfolio
from memo_sim.memory.problem import Clock, Ints, Problem, problem_of
from memo_sim.memory.reduction import solve_decomposed
from memo_sim.memory.repeated import period_of, short_step, solve_by_periods
from memo_sim.program.arena.check_placement import check_placement

SOLVER_NAMES = ("portfolio", "bilevel-mip", "mip", "greedy", "cp-sat")
"""``mip`` and ``cp-sat`` place all buffers at once. On every program of ours greedy reaches the lower bound before they
start, so the portfolio leaves them out and they run only when they are named."""

FEW = 10_000
"""Up to so many buffers of a step that repeats are also placed one by one, where repetition misses the lower bound."""

TECHNIQUES = {"portfolio": ("greedy", "canonical"), "greedy": ("greedy",), "bilevel-mip": ("greedy",)}
"""What a solver tries one after the other; of others greedy, then themselves."""


def place(
    requests: Requests,
    *,
    solver: str = "portfolio",
    time_limit_s: float = 60.0,
    most_nodes: int | None = None,
    enough_bytes: int = 0,
) -> Placement:
    """Return a placement of ``requests``, checked; its ``solver`` says what found it.

    With ``most_nodes`` the portfolio searches at most so many nodes per core: equal requests get equal placements on
    every machine, unless ``time_limit_s`` cuts in. For a step that does not repeat, an arena of at most
    ``enough_bytes`` is not improved.

    A solver that finds nothing better than greedy within ``time_limit_s`` seconds leaves greedy's placement, and
    ``solver`` then says greedy.

    Raises:
        UsageError: for an unknown solver or a time limit that is none.
        BadInput: when bilevel-mip gets requests without phases, or with phases that overlap.
        ModuleNotFoundError: when the solver's package is missing.
        MemoError: when the checker finds a fault (a bug).
    """
    if solver not in SOLVER_NAMES:
        raise UsageError(
            "no such solver", got=solver, wanted=", ".join(SOLVER_NAMES), hint=did_you_mean(solver, SOLVER_NAMES)
        )
    if not time_limit_s > 0:
        raise UsageError("a solver needs time", got=time_limit_s, wanted="seconds above 0")
    clock = Clock(time_limit_s)
    if solver == "bilevel-mip" and (bilevel := place_bilevel(requests, clock)) is not None:
        return bilevel[0]
    problem = problem_of(requests)
    asked = replace(problem, enough=enough_bytes // problem.unit_bytes)
    portfolio = Portfolio(TECHNIQUES.get(solver, ("greedy", solver)), most_nodes=most_nodes)
    offsets = _place_repeated(problem, clock, portfolio)
    if offsets is None and enough_bytes:
        offsets = _enough_by_birth(asked, clock)
    if offsets is None or (problem.count <= FEW and problem.peak(offsets) > asked.lower_bound):
        found = solve_decomposed(asked, clock, offsets, portfolio)
        offsets = offsets if found is None else found
    if offsets is None:
        raise MemoError("no technique placed the buffers (a bug)", got=solver)
    return _checked(requests, problem, offsets, "+".join(portfolio.found_by) or "greedy", clock)


def _enough_by_birth(asked: Problem, clock: Clock) -> Ints | None:
    """Return offsets in the order of births, by far the fastest to find, if they are enough; else None."""
    offsets = by_birth(asked, order_of(asked, "birth"), clock)
    return None if offsets is None or asked.peak(offsets) > asked.lower_bound else offsets


def _place_repeated(problem: Problem, clock: Clock, portfolio: Portfolio) -> Ints | None:
    """Return offsets of a step that repeats; None for any other step, or when ``clock`` runs out."""
    period = period_of(problem)
    if period is None:
        return None
    short = short_step(problem, period)
    if short is None:
        portfolio.found_by["greedy"] = None
        return solve_by_periods(problem, period, clock)
    offsets = solve_decomposed(short.problem, clock, None, portfolio)
    return None if offsets is None else short.repeated(offsets)


def place_bilevel(requests: Requests, clock: Clock) -> tuple[Placement, BilevelPlan] | None:
    """Return MEMO's bi-level placement by its MIP, checked; None where a phase has none before ``clock`` runs out.

    Raises:
        BadInput: when the requests have no phases, or phases that overlap.
        ModuleNotFoundError: when python-mip is missing.
    """
    plan = plan_bilevel(requests, clock, SOLVERS["mip"]())
    if plan is None:
        return None
    return _checked(requests, problem_of(requests), plan.offsets, "bilevel-mip", clock), plan


def _checked(requests: Requests, problem: Problem, offsets: Ints, solver: str, clock: Clock) -> Placement:
    """Return the placement after the independent checker has passed it."""
    placement = placement_of(requests, problem, offsets, solver=solver, elapsed_s=clock.elapsed_s)
    if faults := check_placement(placement, requests):
        raise MemoError("a solver placed buffers wrongly (a bug)", where=solver, got="; ".join(faults))
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
