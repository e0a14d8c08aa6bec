"""Compares layouts with one process for a model of three layer kinds, with half of the tokens swapped."""

import pytest

from memo_sim.contract.plan import Layout
from tests.distributed.team import Team
from tests.distributed.training import label, parity

LAYOUTS = [
    Layout(pp=2, pp_layers=(2, 3)),
    Layout(tp=2, sequence_parallel=True, dp=2, zero=1),
    Layout(dp=2, zero=3),
    Layout(pp=2, pp_layers=(1, 1, 2, 1), schedule="interleaved", virtual_stages=2),
    Layout(tp=2, pp=2, schedule="zero-bubble"),
    Layout(cp=2, dp=2, zero=2),
    Layout(ulysses=2, dp=2, zero=3, zero_ranks=2),
]


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=label)
def test_gradients_equal_those_of_one_process(team: Team, layout: Layout) -> None:
    parity(team, "differing5", layout, 0.5, global_batch=4, debug=layout.pp > 1)


@pytest.mark.parametrize("layout", LAYOUTS[3:], ids=label)
@pytest.mark.slow
def test_gradients_equal_on_more_ranks(team: Team, layout: Layout) -> None:
    parity(team, "differing5", layout, 0.5, global_batch=4, steps=3)
