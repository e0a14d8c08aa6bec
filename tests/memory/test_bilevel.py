"""The bi-level plan is valid, never better than flat, and solves each kind of phase once."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from memo_sim.contract.catalog import load_model
from memo_sim.contract.errors import BadInput
from memo_sim.contract.knobs import Recompute
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.requests import Phase, Requests
from memo_sim.memory.bilevel import plan_bilevel
from memo_sim.memory.greedy import solve_greedy
from memo_sim.memory.mip_model import solve_mip
from memo_sim.memory.place import placement_of
from memo_sim.memory.problem import Clock, Ints, Problem, problem_of
from memo_sim.program.arena.check_placement import check_placement
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.lower import lower
from tests.refusals import Expected, refused

# Two layers' forwards that make the same requests, one that does not, and what crosses them. Bi-level has to pay: while
# a phase's block is as high as its peak, at [1, 2) and [4, 5), "carried" is alive only beside its low end.
HAND = Requests(
    ids=["weights", "carried", "a0", "b0", "a1", "b1", "c"],
    lower=[0, 2, 0, 1, 3, 4, 6],
    upper=[8, 5, 3, 2, 6, 5, 8],
    size_bytes=[10, 4, 1, 6, 1, 6, 3],
    phases=[
        Phase(name="l0/fwd", kind="fwd", lower=0, upper=3),
        Phase(name="l1/fwd", kind="fwd", lower=3, upper=6),
        Phase(name="head", kind="head", lower=6, upper=8),
    ],
)


def requests_for(model: str, recompute: Recompute, swapped: int, seq_tokens: int = 1 << 18) -> Requests:
    decisions = Decisions(
        model=load_model(model),
        layout=Layout(tp=8, sequence_parallel=True, zero=1),
        seq_tokens=seq_tokens,
        recompute=recompute,
        swapped_tokens=swapped,
        loss_chunk_tokens=4096,
    )
    return requests_of(lower(decisions, micro_batches=1)[0])


def faults(requests: Requests, offsets: Ints) -> list[str]:
    placement = placement_of(requests, problem_of(requests), offsets, solver="bilevel", elapsed_s=0.0)
    return check_placement(placement, requests)


def test_a_plan_by_hand() -> None:
    plan = plan_bilevel(HAND, Clock(60), solve_mip)
    assert plan is not None
    assert faults(HAND, plan.offsets) == []
    # Blocks of 7, 7 and 3 beside 10 for the step and 4 that cross [2, 5): 21. Flat, 10 + 1 + 6 + 4 live at [4, 5).
    assert plan.level_1 == {"fwd": (7, 7), "head": (3, 3)}
    assert plan.proven
    assert (plan.peak, plan.level_2_bound, plan.flat_bound) == (21, 21, 21)


def test_a_rigid_block_has_a_price() -> None:
    """With "carried" gone before [4, 5), a flat plan needs 17, and the block of the second forward still stands."""
    shorter = msgspec.structs.replace(HAND, upper=[8, 4, 3, 2, 6, 5, 8])
    plan = plan_bilevel(shorter, Clock(60), solve_mip)
    assert plan is not None
    assert faults(shorter, plan.offsets) == []
    assert (plan.peak, plan.level_2_bound, plan.flat_bound) == (21, 21, 17)
    assert plan.price == pytest.approx(21 / 17 - 1)


def test_phases_of_a_kind_that_differ_are_solved_apart() -> None:
    other = msgspec.structs.replace(HAND, size_bytes=[10, 4, 1, 6, 1, 9, 3])
    solved = []

    def counted(problem: Problem, clock: Clock, incumbent: Ints | None) -> Ints | None:
        solved.append(problem.count)
        return solve_mip(problem, clock, incumbent)

    plan = plan_bilevel(other, Clock(60), counted)
    assert plan is not None
    assert faults(other, plan.offsets) == []
    assert len(solved) == 3
    assert plan.level_1["fwd"] == (10, 10)


@pytest.mark.parametrize("solver", ["highs", "cbc", "greedy"])
@pytest.mark.parametrize(
    ("recompute", "swapped"), [("none", 0), ("tokenwise", 0), ("tokenwise", 1 << 17), ("none", 1 << 18), ("full", 0)]
)
def test_programs_are_planned(solver: str, recompute: Recompute, swapped: int) -> None:
    requests = requests_for("gpt-7b", recompute, swapped)
    level = solve_greedy if solver == "greedy" else partial(solve_mip, backend=solver, cold=True)
    solved = []

    def counted(problem: Problem, clock: Clock, incumbent: Ints | None) -> Ints | None:
        solved.append(problem.count)
        return level(problem, clock, incumbent)

    plan = plan_bilevel(requests, Clock(120), counted)
    assert plan is not None
    assert faults(requests, plan.offsets) == []
    assert plan.peak >= plan.level_2_bound >= plan.flat_bound
    with_buffers = {kind for kind, (peak, _) in plan.level_1.items() if peak}
    # Once per template and not per layer: the last layer's forward is a template of its own with the same requests.
    assert len(solved) <= len(with_buffers) < 10
    if solver != "greedy":
        assert all(peak == bound for peak, bound in plan.level_1.values())
        assert plan.peak == plan.level_2_bound
        assert plan.proven


def test_no_answer_for_a_phase_is_no_plan() -> None:
    assert plan_bilevel(HAND, Clock(60), lambda problem, clock, incumbent: None) is None


@pytest.mark.parametrize(
    ("phases", "fields"),
    [
        ([], {"what": "phases", "where": None, "got": None}),
        ([HAND.phases[1], HAND.phases[0]], {"where": "$.phases", "got": ("l1/fwd [3, 6)", "l0/fwd [0, 3)")}),
        (
            [HAND.phases[0], Phase(name="x", kind="x", lower=2, upper=5)],
            {"where": "$.phases", "got": ("l0/fwd [0, 3)", "x [2, 5)")},
        ),
    ],
)
def test_phases_that_cannot_be_are_refused(phases: list[Phase], fields: dict[str, Expected]) -> None:
    with refused(BadInput, **fields):
        plan_bilevel(msgspec.structs.replace(HAND, phases=phases), Clock(60), solve_greedy)


def test_a_million_tokens_of_a_model_with_experts_are_no_problem_without_solutions() -> None:
    """Router outputs and activations share few factors: a phase has 4e8 units, of which HiGHS could not tell one."""
    requests = requests_for("mixtral-8x7b", "full", 0, seq_tokens=1 << 20)
    plan = plan_bilevel(requests, Clock(60), solve_mip)
    assert plan is not None
    assert faults(requests, plan.offsets) == []
    assert plan.peak == plan.level_2_bound
