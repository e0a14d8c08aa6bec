"""Tests that ranks with planned arenas have the gradients and losses of one process."""

from typing import Any

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
GATHERED = Layout(cp=2, cp_exchange="all_gather", subsequences=3)


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


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(cp=2, subsequences=3), {"micro_batch": 2}),
        pytest.param(
            Layout(cp=2, cp_exchange="all_gather", subsequences=3), {"micro_batch": 2}, marks=pytest.mark.slow
        ),
        pytest.param(Layout(cp=2, subsequences=3), {}, marks=pytest.mark.slow),
        pytest.param(Layout(cp=2), {"micro_batch": 2, "attention_chunk_tokens": 512}, marks=pytest.mark.slow),
        pytest.param(Layout(cp=2), {"attention_chunk_tokens": 512}, marks=pytest.mark.slow),
    ],
    ids=["ring", "all-gather", "ring-one", "chunks", "chunks-one"],
)
def test_sums_of_bf16_gradients_have_their_scratch_in_the_arena(
    team: Team, layout: Layout, changes: dict[str, int]
) -> None:
    """On a CPU a kernel widens bf16 gradients of keys in scratch before it adds them to an fp32 sum."""
    fields: dict[str, Any] = {"recompute": "full", "swapped_tokens": 0, "seq_tokens": 1536, "global_batch": 2} | changes
    chosen = training(MODELS["llama"], layout, dtype="bf16", **fields)
    program = rank_program(chosen, MeshCoordinates(layout))
    sums = [i for t in program.templates for i in t.instructions if i.op.startswith("grad.accumulate")]
    assert any(operand.role == "workspace" for each in sums for operand in each.operands)
    planned = team.play(play_planned, 2, chosen)
    for found, wanted in zip(planned, team.play(play, 2, chosen, STEPS, {}), strict=True):
        assert (found.losses, found.norms) == (wanted.losses, wanted.norms)
        pairs = zip(found.gradients, wanted.gradients, strict=True)
        assert all(one[-1].equal(other[-1]) for one, other in pairs)
