"""Tests that a rank's store never holds more bytes than its program's peak, whichever of its lanes is late.

In program order it holds exactly the program's peak, so no buffer is held twice.
"""

import msgspec
import pytest
from _pytest.mark import ParameterSet

from memo_sim.contract.knobs import CpExchange
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.ir.instruction import Lane
from tests.distributed.team import Team
from tests.distributed.timing import held, in_program_order, without_memory
from tests.distributed.training import label, training
from tests.exec_cpu.small import gpt

COMPUTE = frozenset({Lane.COMPUTE})
OTHERS = frozenset(Lane) - COMPUTE
FEW = (Layout(metp=2), Layout(dp=2, zero=3), Layout(pp=2))
MANY = (Layout(metp=4), Layout(tp=2, sequence_parallel=True), Layout(cp=2), Layout(cp=2, subsequences=2))


def small(layout: Layout) -> Decisions:
    return training(gpt(layers=2), layout, recompute="none", global_batch=layout.dp)


def layouts(few: tuple[Layout, ...], many: tuple[Layout, ...]) -> list[ParameterSet]:
    """Return the parameters for the layouts of every run (``few``) and of the slow run (``many``)."""
    return [
        *(pytest.param(layout, id=label(layout)) for layout in few),
        *(pytest.param(layout, id=label(layout), marks=pytest.mark.slow) for layout in many),
    ]


@pytest.mark.parametrize("layout", layouts(FEW[1:2], MANY[1:]))
def test_in_program_order_a_rank_holds_what_its_program_says(team: Team, layout: Layout) -> None:
    found = team.play(held, layout.devices, small(layout), frozenset(), in_program_order)
    assert [measured for measured, _ in found] == [wanted for _, wanted in found]


@pytest.mark.parametrize("exchange", [pytest.param("ring", marks=pytest.mark.slow), "all_gather"])
def test_several_sequences_in_subsequences_hold_what_their_program_says(team: Team, exchange: CpExchange) -> None:
    layout = Layout(cp=2, cp_exchange=exchange, subsequences=2)
    chosen = msgspec.structs.replace(small(layout), micro_batch=2, global_batch=2)
    found = team.play(held, 2, chosen, frozenset(), in_program_order)
    assert [measured for measured, _ in found] == [wanted for _, wanted in found]
    for measured, wanted in team.play(held, 2, chosen, OTHERS):
        assert measured <= wanted


@pytest.mark.parametrize("late", [COMPUTE, OTHERS], ids=["compute", "others"])
@pytest.mark.parametrize("layout", layouts(FEW, MANY))
def test_no_late_lane_makes_a_rank_hold_more(team: Team, layout: Layout, late: frozenset[Lane]) -> None:
    for measured, wanted in team.play(held, layout.devices, small(layout), late):
        assert measured <= wanted


def test_without_the_edges_of_memory_a_late_lane_makes_it_hold_more(team: Team) -> None:
    for measured, wanted in team.play(held, 2, small(Layout(metp=2)), COMPUTE, without_memory):
        assert measured > wanted
