"""Tests that ranks with planned arenas have the gradients and losses of one process."""

import pytest

from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import rank_program
from memo_exec.machine.rank_placement import rank_placement
from memo_sim.contract.knobs import CpExchange
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.memory.place import place
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.lower import lower
from tests.distributed.parity import Played, compare, play
from tests.distributed.team import Member, Team
from tests.distributed.training import MODELS, label, reference, training

STEPS = 2


def play_planned(member: Member, decisions: Decisions) -> Played:
    """Play in the arena of the first pipeline stage's program, or in the one derived from it for this rank."""
    planned = place(requests_of(lower(decisions)[0]), solver="greedy")
    program = rank_program(decisions, MeshCoordinates(decisions.layout, member.rank))
    own = planned if planned.program_sha256 == program.sha256 else rank_placement(planned, requests_of(program))
    return play(member, decisions, STEPS, {"placement": own, "debug": True})


@pytest.mark.parametrize(
    "layout",
    [
        *(Layout(cp=2), Layout(pp=2), Layout(metp=2)),
        pytest.param(Layout(cp=2, cp_exchange="all_gather"), marks=pytest.mark.slow),
    ],
    ids=label,
)
def test_planned_memory(team: Team, layout: Layout) -> None:
    chosen = training(MODELS["gpt4"], layout, 0.5, global_batch=4)
    ranks = team.play(play_planned, 2, chosen)
    compare(ranks, reference("gpt4", chosen.seq_tokens, chosen.global_batch, STEPS), steps=STEPS)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama5", Layout(pp=2, pp_layers=(2, 3))), ("gpt-uneven", Layout(ulysses=2, uneven_heads=True))],
    ids=["stages", "heads"],
)
def test_planned_memory_of_unequal_ranks(team: Team, name: str, layout: Layout) -> None:
    chosen = training(MODELS[name], layout, recompute="none", swapped_tokens=0, global_batch=4)
    ranks = team.play(play_planned, 2, chosen)
    compare(ranks, reference(name, chosen.seq_tokens, chosen.global_batch, STEPS), steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
def test_planned_memory_of_subsequences_that_ranks_divide(team: Team, exchange: CpExchange, sequences: int) -> None:
    layout = Layout(cp=2, cp_exchange=exchange, subsequences=3)
    batch = {"micro_batch": sequences, "global_batch": 2}
    chosen = training(MODELS["llama4"], layout, recompute="full", swapped_tokens=0, seq_tokens=1040, **batch)
    ranks = team.play(play_planned, 2, chosen)
    compare(ranks, reference("llama4", chosen.seq_tokens, chosen.global_batch, STEPS), steps=STEPS)
