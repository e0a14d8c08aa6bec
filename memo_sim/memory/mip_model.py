"""Solves the placement problem as a mixed integer program (MEMO 4.2), with CBC or HiGHS through python-mip.

For two buffers i, j that live at one instant, z_ij = 0 puts i below j and z_ij = 1 puts j below i:

    A_i + S_i <= A_j + z_ij M_cap        A_j + S_j <= A_i + (1 - z_ij) M_cap        A_i + S_i <= M

The strengthened form adds constraints that all placements satisfy. For buffers C that are live at one instant (a
section), the buffers of C below i fit under A_i, and those above it fit between i and M:

    sum of S_j, j in C below i  <=  A_i            A_i + S_i + sum of S_j, j in C above i  <=  M

So even a fractional z stacks the whole section, and the relaxation's bound is the largest sum of live sizes. The bound
of the paper's form is far below that. The real numbers A_i are for the solver only: addresses are rebuilt as whole
numbers from z.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeVar

import numpy as np

from memo_sim.contract.errors import MemoError
from memo_sim.memory.greedy import first_fit
from memo_sim.memory.mip_outcome import Backend, Form, MipOutcome, contradiction
from memo_sim.memory.problem import Clock, Ints, Problem
from memo_sim.memory.reduction import crumbs_of, place_by_cores, put_back, sections

EXACT_UNITS = 1 << 24
"""Up to this size the peak is an integer variable, and the solver's bound counts. Above it, tolerances would be whole
units: HiGHS called placements optimal that are not from 2^30 on, and CBC from 2^42 on."""

LARGEST = EXACT_UNITS
"""Largest address in a model. Larger ones are scaled to it: HiGHS called problems of 2^29 units infeasible that have
solutions."""

TOLERANCE = 1e-6
"""Relative differences below this do not count for a solver (the feasibility tolerance of both)."""

S_PER_TERM = 2e-5
"""Seconds that python-mip needs for about one coefficient of the sections."""

T = TypeVar("T")

UNKNOWN = MipOutcome(None, bound=0, said_optimal=False, proved=False, elapsed_s=0.0)


def solve_mip(
    problem: Problem,
    clock: Clock,
    incumbent: Ints | None,
    *,
    backend: Backend = "highs",
    form: Form = "strengthened",
    cold: bool = False,
) -> Ints | None:
    """Return offsets in units, or None when there is nothing better than ``incumbent``; see ``mip_outcome``.

    Raises:
        MemoError: when the solver's answer is impossible.
    """
    outcome = mip_outcome(problem, clock, incumbent, backend=backend, form=form, cold=cold)
    if outcome.fault:
        raise MemoError("a MIP solver contradicts itself (a bug)", where=backend, got=outcome.fault)
    if outcome.offsets is None or incumbent is None:
        return outcome.offsets
    return outcome.offsets if problem.peak(outcome.offsets) < problem.peak(incumbent) else None


def mip_outcome(
    problem: Problem,
    clock: Clock,
    incumbent: Ints | None,
    *,
    backend: Backend,
    form: Form,
    cold: bool,
    known: int | None = None,
) -> MipOutcome:
    """Return the answer of ``backend`` for ``problem`` before ``clock`` runs out.

    The paper's form is one MIP over all buffers. The strengthened form solves the cores of ``problem`` (see
    ``reduction``). With ``cold`` neither the solver nor the reduction knows ``incumbent`` or sums of live sizes. Each
    core is then solved without its crumbs first; that placement, with the crumbs put back, starts the core's MIP.
    ``known`` is the peak, in units, of another placement; it is used only to check the answer.
    """
    if incumbent is not None:
        known = min(problem.peak(incumbent), problem.peak(incumbent) if known is None else known)
    if form == "paper":
        outcome = _solve_whole(problem, clock, incumbent, backend, cold)
    else:
        outcome = _solve_cores(problem, clock, incumbent, backend, cold)
    fault = outcome.fault or contradiction(problem, outcome, known)
    return MipOutcome(**{**vars(outcome), "fault": fault})


def _solve_whole(problem: Problem, clock: Clock, incumbent: Ints | None, backend: Backend, cold: bool) -> MipOutcome:
    return _outcome(problem, None if cold else incumbent, backend, clock, cold=cold, strengthened=False)


def _solve_cores(problem: Problem, clock: Clock, incumbent: Ints | None, backend: Backend, cold: bool) -> MipOutcome:
    outcomes: list[MipOutcome] = []

    def solve_core(part: Problem, buffers: Ints) -> Ints | None:
        start = None
        if cold:
            start = _without_crumbs(part, Clock(clock.left_s / 2), backend)
        elif incumbent is not None:
            # Each buffer as low as possible: the incumbent's offsets are above other parts and in other units.
            start = first_fit(part, np.argsort(incumbent[buffers], kind="stable"), clock)
        outcomes.append(_outcome(part, start, backend, clock, cold=cold, strengthened=True))
        return start if outcomes[-1].offsets is None else outcomes[-1].offsets

    offsets = place_by_cores(problem, solve_core, bounded=not cold)
    proved = offsets is not None and all(o.proved for o in outcomes)
    return MipOutcome(
        offsets=offsets,
        bound=problem.peak(offsets) if offsets is not None and proved else 0,
        said_optimal=all(o.said_optimal for o in outcomes),
        proved=proved,
        elapsed_s=clock.elapsed_s,
        models=len(outcomes),
        fault="; ".join(o.fault for o in outcomes if o.fault),
    )


def _without_crumbs(part: Problem, clock: Clock, backend: Backend) -> Ints | None:
    """Return a placement of ``part`` that a MIP of its larger buffers alone gives, with the crumbs put back."""
    crumbs = crumbs_of(part)
    if not crumbs.size:
        return None
    larger = np.setdiff1d(np.arange(part.count), crumbs)
    found = _solve_cores(part.part(larger), clock, None, backend, cold=True).offsets
    if found is None:
        return None
    offsets = np.zeros(part.count, dtype=np.int64)
    offsets[larger] = found
    put_back(part, larger, crumbs, offsets)
    return offsets


def _outcome(
    problem: Problem, start: Ints | None, backend: Backend, clock: Clock, *, cold: bool, strengthened: bool
) -> MipOutcome:
    """Return the answer of one model, or ``UNKNOWN`` when the model cannot be built in time."""
    if _too_large(problem, clock):
        return UNKNOWN
    # In the paper's form, M is always the sum of all sizes.
    capacity = problem.peak(start) if strengthened and start is not None else int(problem.size.sum())
    try:
        model = _Model(problem, backend, capacity, clock)
        if strengthened:
            model.strengthen()
    except _NoTimeLeftError:
        return UNKNOWN
    model.help(0 if cold else problem.lower_bound, start)
    return model.solve(clock)


class _NoTimeLeftError(Exception):
    """The clock ran out while a model was built."""


def _while_time(items: Iterable[T], clock: Clock) -> Iterator[T]:
    """Yield ``items``; raise when ``clock`` runs out."""
    for item in items:
        if clock.left_s == 0:
            raise _NoTimeLeftError
        yield item


def _pairs(problem: Problem) -> list[tuple[int, int]]:
    """Return the pairs of buffers (i, j), i < j, that are live at the same time."""
    beside = (problem.lower[:, None] < problem.upper) & (problem.lower < problem.upper[:, None])
    return [(int(i), int(j)) for i, j in zip(*np.nonzero(np.triu(beside, 1)), strict=True)]


def _lowest(problem: Problem, order: list[tuple[int, int]]) -> Ints | None:
    """Return the lowest integer offsets with i below j for all (i, j), by longest paths; None if there is a cycle."""
    under: dict[int, list[int]] = {i: [] for i in range(problem.count)}
    for low, high in order:
        under[high].append(low)
    offsets = np.zeros(problem.count, dtype=np.int64)
    try:
        bottom_up = list(TopologicalSorter(under).static_order())
    except CycleError:
        return None
    for buffer in bottom_up:
        offsets[buffer] = max((int(offsets[low] + problem.size[low]) for low in under[buffer]), default=0)
    return offsets


def _too_large(problem: Problem, clock: Clock) -> bool:
    """Return whether building the model would take more than half of the time that is left."""
    live = np.searchsorted(np.sort(problem.lower), problem.instants, side="right")
    live = live - np.searchsorted(np.sort(problem.upper), problem.instants, side="right")
    return 2 * S_PER_TERM * float(np.sum(live.astype(float) ** 2)) > clock.left_s


def _lowered(peak: float) -> int:
    """Return the lowest integer peak that a solver cannot distinguish from ``peak``; for few units ``peak`` itself."""
    return math.ceil(peak * (1 - TOLERANCE) - TOLERANCE)


class _Model:
    """A python-mip model for one solve; building it raises ``_NoTimeLeftError`` when ``clock`` runs out."""

    def __init__(self, problem: Problem, backend: Backend, capacity: int, clock: Clock) -> None:
        import mip

        self.problem = problem
        self.capacity = capacity
        self.clock = clock
        self.model: Any = mip.Model(sense=mip.MINIMIZE, solver_name={"cbc": mip.CBC, "highs": mip.HIGHS}[backend])
        self.model.verbose = 0
        self.model.max_mip_gap = 0.0
        self.model.threads = 1
        self.model.integer_tol = 1e-6
        self.exact = capacity <= EXACT_UNITS
        self.scale = max(1, capacity / LARGEST)
        """Units of the problem in one of the model's."""
        sizes = self.sizes = problem.size.tolist() if self.scale == 1 else (problem.size / self.scale).tolist()
        capacity = min(capacity, LARGEST)
        self.peak = self.model.add_var(ub=capacity, var_type=mip.INTEGER if self.exact else mip.CONTINUOUS)
        self.address = [self.model.add_var(ub=capacity) for _ in range(problem.count)]
        self.above = {pair: self.model.add_var(var_type=mip.BINARY) for pair in _pairs(problem)}
        self.model.objective = mip.minimize(self.peak)
        for i, size in enumerate(sizes):
            self.model += self.address[i] + size <= self.peak
        for (i, j), z in _while_time(self.above.items(), clock):
            self.model += self.address[i] + sizes[i] <= self.address[j] + capacity * z
            self.model += self.address[j] + sizes[j] <= self.address[i] + capacity * (1 - z)

    def strengthen(self) -> None:
        """Add the sections' constraints, an order among equal buffers, and a constraint that excludes mirror images."""
        import mip

        sizes = self.sizes
        for section in _while_time(sections(self.problem), self.clock):
            members = section.tolist()
            for i in members:
                others = [j for j in members if j != i]
                self.model += self.address[i] >= mip.xsum(sizes[j] * self._is_below(j, i) for j in others)
                on_top = mip.xsum(sizes[j] * self._is_below(i, j) for j in others)
                self.model += self.address[i] + sizes[i] + on_top <= self.peak
        for (i, j), z in self.above.items():
            if self._same(i, j):
                self.model += z == 0
        life = self.problem.upper - self.problem.lower
        largest = int(np.argmax(life * self.problem.size))  # the first of its equals, as their order is fixed
        self.model += 2 * self.address[largest] + sizes[largest] <= self.peak

    def help(self, lower_bound: int, incumbent: Ints | None) -> None:
        """Give the solver the lower bound of the peak, and a placement to start from."""
        self.peak.lb = min(lower_bound, self.capacity) / self.scale
        if incumbent is None:
            return
        self.model.start = [
            (self.peak, self.problem.peak(incumbent) / self.scale),
            *((a, offset / self.scale) for a, offset in zip(self.address, incumbent.tolist(), strict=True)),
            *((z, float(incumbent[i] > incumbent[j])) for (i, j), z in self.above.items()),
        ]

    def solve(self, clock: Clock) -> MipOutcome:
        """Return the answer with its addresses rebuilt."""
        import mip

        began = clock.elapsed_s
        if clock.left_s == 0:
            return UNKNOWN
        status = self.model.optimize(max_seconds=clock.left_s)
        said_optimal = status == mip.OptimizationStatus.OPTIMAL
        said = self.model.objective_bound
        # Without a bound, a solver returns None, an infinity, or the largest number.
        bound = 0 if said is None or abs(said) > 1e100 else max(0, _lowered(said * self.scale))
        offsets, fault = None, ""
        if self.model.num_solutions:
            order = [(i, j) if z.x < 0.5 else (j, i) for (i, j), z in self.above.items()]
            offsets = _lowest(self.problem, order)
            if offsets is None:
                fault = "the order of addresses that the solver found has a cycle"
        elif status not in (mip.OptimizationStatus.NO_SOLUTION_FOUND, mip.OptimizationStatus.TRUNCATED):
            fault = f"a problem that has solutions is {status.name.lower()}"
        return MipOutcome(
            offsets=offsets,
            bound=bound,
            said_optimal=said_optimal,
            proved=offsets is not None and self._proves(bound, self.problem.peak(offsets)),
            elapsed_s=clock.elapsed_s - began,
            fault=fault,
        )

    def _proves(self, bound: int, peak: int) -> bool:
        """Return whether the solver's ``bound`` proves ``peak``; for large numbers the live sum must prove it."""
        reached = _lowered(peak) <= max(bound, self.problem.enough)
        return reached and (self.exact or peak <= self.problem.lower_bound)

    def _is_below(self, i: int, j: int) -> Any:
        """Return the expression that is 1 where i lies below j, and 0 where it lies above."""
        return 1 - self.above[i, j] if i < j else self.above[j, i]

    def _same(self, i: int, j: int) -> bool:
        """Return whether i and j have equal lives and sizes, so that they can be exchanged."""
        problem = self.problem
        return bool(
            problem.lower[i] == problem.lower[j]
            and problem.upper[i] == problem.upper[j]
            and problem.size[i] == problem.size[j]
        )
